"""Tiny models that see, with weights from a seed, and the results of `transformers` for pictures and texts."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDENS = Path(__file__).parent / "vision_goldens"
CASES = sorted(path.stem for path in GOLDENS.glob("*.json"))
SEED = 5
Weights = dict[str, NDArray[np.float32]]


def draw_weights(config: dict[str, Any], shapes: dict[str, Any]) -> Weights:
    """Values of such a size that attention is neither flat nor sharp and logits are of order one."""
    return {name: _draw(name, tuple(shape), config["model_type"]) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...], kind: str) -> NDArray[np.float32]:
    values = np.random.RandomState([SEED, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith("norm.weight") or ".norm1." in name or ".norm2." in name:
        is_weight = name.endswith("weight")
        values = 0.2 * values + float(is_weight)
        if kind.startswith("qwen3_5") and ".language_model." in name and "linear_attn" not in name:
            values -= 1.0
        if kind == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight")):
            values *= 0.5  # as its scores are not scaled
    elif name.endswith(("_min", "_max", "layer_scalar", "lambda_1", "lambda_2")):  # ranges that cut some numbers off
        values = (1 + 0.1 * values) * (-1 if name.endswith("_min") else 1)
    elif name.endswith(("A_log", "dt_bias")):
        values *= 0.7
    elif name.endswith("bias") or "embed" in name.rpartition(".")[0].rpartition(".")[2]:
        values *= 0.3
    else:
        values /= np.sqrt(np.prod(shape[1:]))
    return np.asarray(values, np.float32)


def draw_picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Colours that change smoothly with some noise, (height, width, 3)."""
    random = np.random.RandomState([SEED, seed])
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + colour) + seed) + np.cos(columns / (5 - colour)) for colour in range(3)]
    smooth = 127 + 50 * np.stack(waves, axis=2) + random.normal(0, 10, (height, width, 3))
    return np.clip(smooth, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Golden:
    """A tiny model, tokens with places for pictures, and the right results."""

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    shapes: dict[str, Any]
    sizes: list[tuple[int, int]]  # of the pictures as they come
    tokens: list[int]
    pixels: list[NDArray[np.uint8]]  # as the tower gets them, in tiles
    rows: NDArray[np.float32]  # of all pictures
    logits: NDArray[np.float32]  # of each token


def read_golden(case: str) -> Golden:
    """Read one case."""
    stated = json.loads((GOLDENS / f"{case}.json").read_text())
    sizes = [(height, width) for height, width in stated.pop("sizes")]
    with np.load(GOLDENS / f"{case}.npz") as stored:
        pixels = [stored[name] for name in sorted(stored.files, key=len) if name.startswith("pixels")]
        return Golden(sizes=sizes, pixels=pixels, rows=stored["rows"], logits=stored["logits"], **stated)


def write_folder(folder: Path, golden: Golden, changes: Weights | None = None) -> None:
    """Write the model as a folder of Hugging Face's, without a tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden.config))
    (folder / "preprocessor_config.json").write_text(json.dumps(golden.preprocessor))
    save_file(draw_weights(golden.config, golden.shapes) | (changes or {}), folder / "model.safetensors")


def write_chat_folder(
    folder: Path, case: str | Golden, context_tokens: int = 1024, more_words: tuple[str, ...] = ()
) -> Path:
    """Write the model of a case with a tokenizer and a chat template, and so with another vocabulary; the folder."""
    from model_folder import train_tokenizer

    from mlxr.models.families import read_folder_tower

    golden = read_golden(case) if isinstance(case, str) else case
    folder.mkdir(parents=True, exist_ok=True)
    found = read_folder_tower(golden.config, golden.preprocessor)
    assert found is not None
    words = train_tokenizer(folder, *found[1].words.tokens, *more_words)
    text = golden.config["text_config"] | {"vocab_size": words, "max_position_embeddings": context_tokens}
    text |= {key: words for key in text if key == "vocab_size_per_layer_input"}
    tables = "embed_tokens.weight", "lm_head.weight", "embed_tokens_per_layer.weight"
    shapes = {name: [words, *shape[1:]] if name.endswith(tables) else shape for name, shape in golden.shapes.items()}
    write_folder(folder, replace(golden, config=golden.config | {"text_config": text}, shapes=shapes))
    return folder


def write_mmproj(path: Path, case: str | Golden, matrices: str = "f32", **changes: Any) -> Path:
    """Write the tower of a case as llama.cpp's converter does, with the `matrices` of layers in that type."""
    from mlxr.formats import TensorToWrite, write_gguf
    from mlxr.models.families import read_folder_tower

    golden = read_golden(case) if isinstance(case, str) else case
    weights = draw_weights(golden.config, golden.shapes)
    found = read_folder_tower(golden.config, golden.preprocessor)
    assert found is not None
    family, spec = found
    metadata: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": family.projector,
        "clip.use_gelu": spec.activation != "silu",
        "clip.use_silu": spec.activation == "silu" and spec.gated,  # else a quick GELU
        "clip.vision.embedding_length": spec.hidden,
        "clip.vision.block_count": spec.layers,
        "clip.vision.attention.head_count": spec.heads,
        "clip.vision.feed_forward_length": spec.features,
        "clip.vision.patch_size": spec.patch,
        "clip.vision.image_size": spec.patch * spec.side,
        "clip.vision.projection_dim": spec.columns,
        "clip.vision.image_mean": list(spec.mean),
        "clip.vision.image_std": list(spec.deviation),
        "clip.vision.attention.layer_norm_epsilon": spec.eps,
    }
    qwen = {
        "spatial_merge_size": spec.merge,
        "image_min_pixels": spec.least_pixels,
        "image_max_pixels": spec.most_pixels,
    }
    own = {
        "qwen3vl_merger": qwen | {"is_deepstack_layers": [index in spec.taps for index in range(spec.layers)]},
        "qwen2.5vl_merger": qwen
        | {"n_wa_pattern": spec.whole_layers and spec.whole_layers[0] + 1, "window_size": spec.window * spec.factor},
        "qwen2vl_merger": qwen,
        "glm4v": {"spatial_merge_size": spec.merge},
        "gemma3": {"projector.scale_factor": spec.merge},
        "gemma4v": {"projector.scale_factor": spec.merge, "projector_type": "gemma4v", "image_size": 224}
        | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        "gemma4uv": {"projector.scale_factor": 3, "patch_size": spec.patch // 3, "projector_type": "gemma4uv"}
        | {"image_size": 224},
        "lfm2": {"projector.scale_factor": spec.merge},
        "pixtral": {"spatial_merge_size": spec.merge if spec.merge > 1 else None},
        "internvl": {"projector.scale_factor": spec.merge, "preproc_max_tiles": spec.most_tiles},
        "idefics3": {"projector.scale_factor": spec.merge, "preproc_image_size": spec.longest},
    }[family.projector]
    metadata |= {f"clip.vision.{key}": value for key, value in own.items()}
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    if family.projector.startswith(("qwen", "glm")):
        tensors = _name_qwen_tensors(weights, spec.taps)
        if family.projector.startswith("qwen2"):  # whose parts of the attention lie apart
            for name in [name for name in tensors if ".attn_qkv." in name]:
                parts = np.split(tensors.pop(name), 3)
                tensors |= {name.replace("qkv", part): values for part, values in zip("qkv", parts, strict=True)}
    elif family.projector == "gemma4uv":
        tensors = _name_unified_tensors(weights, spec.patch)
    else:
        tensors = (_name_gemma4_tensors if family.projector == "gemma4v" else _name_siglip_tensors)(weights)
        if family.projector == "pixtral":  # a row for the end of a line, which texts have as a token
            tensors["v.token_embd.img_break"] = np.zeros(spec.columns, np.float32)
    turned = ("attn_q.weight", "attn_k.weight") if family.projector == "pixtral" else ()
    for name in [name for name in tensors if name.endswith(turned)]:
        halves = tensors[name].reshape(spec.heads, 2, -1, spec.hidden)
        tensors[name] = halves.swapaxes(1, 2).reshape(spec.hidden, spec.hidden)
    write_gguf(
        path,
        metadata,
        [
            TensorToWrite.from_array(
                name, matrices if ".blk." in name and values.ndim == 2 else "f32", np.ascontiguousarray(values)
            )
            for name, values in tensors.items()
        ],
    )
    return path


_GLM = {
    "post_conv_layernorm": "v.norm_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "downsample": "mm.patch_merger",
    "merger.proj": "mm.model.fc",
    "merger.post_projection_norm": "mm.post_norm",
    **{f"merger.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")},
}


def _name_qwen_tensors(weights: Weights, taps: tuple[int, ...]) -> Weights:
    tensors: Weights = {}
    for full_name, values in weights.items():
        if ".visual." not in full_name:
            continue
        name = full_name.split("visual.")[1]
        stem, _, end = name.rpartition(".")
        parts = stem.split(".")
        if name == "patch_embed.proj.weight":
            tensors |= {"v.patch_embd.weight": values[:, :, 0], "v.patch_embd.weight.1": values[:, :, 1]}
        elif parts[0] == "patch_embed":
            tensors["v.patch_embd.bias"] = values
        elif stem in _GLM:
            tensors[f"{_GLM[stem]}.{end}"] = values
        elif parts[0] == "pos_embed":
            tensors["v.position_embd.weight"] = values
        elif parts[0] == "blocks":
            block = (
                {f"attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
                | {"attn.qkv": "attn_qkv", "attn.proj": "attn_out", "norm1": "ln1", "norm2": "ln2"}
                | {
                    f"mlp.{one}": f"ffn_{name}"
                    for name, others in {
                        "up": ("linear_fc1", "fc1", "up_proj"),
                        "down": ("linear_fc2", "fc2", "down_proj"),
                        "gate": ("gate_proj",),
                    }.items()
                    for one in others
                }
            )
            tensors[f"v.blk.{parts[1]}.{block['.'.join(parts[2:])]}.{end}"] = values
        elif parts[0] == "merger":
            merger = {"norm": "v.post_ln", "ln_q": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
            tensors[f"{merger.get(parts[1]) or f'mm.{parts[2]}'}.{end}"] = values
        else:
            part = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[parts[2]]
            tensors[f"v.deepstack.{taps[int(parts[1])]}.{part}.{end}"] = values
    return tensors


def _name_gemma4_tensors(weights: Weights) -> Weights:
    tensors: Weights = {}
    for full_name, values in weights.items():
        if ".language_model." in full_name:
            continue
        name = full_name.removeprefix("model.").removeprefix("vision_tower.").replace(".linear.", ".")
        stem, _, end = name.rpartition(".")
        if stem == "patch_embedder.input_proj":
            side = round((values.shape[1] // 3) ** 0.5)
            tensors["v.patch_embd.weight"] = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        elif stem.startswith("encoder.layers."):
            number, _, module = stem.removeprefix("encoder.layers.").partition(".")
            tensors[f"v.blk.{number}.{_GEMMA4[module]}.{end}"] = values.reshape(values.shape or (1,))
        else:
            tensors[_GEMMA4[name]] = values
    return tensors


def _name_unified_tensors(weights: Weights, patch: int) -> Weights:
    tensors: Weights = {}
    colours = np.arange(3 * patch**2).reshape(patch**2, 3).T.reshape(-1)
    for full_name, values in weights.items():
        name = full_name.removeprefix("model.embed_vision.")
        if name in ("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias"):
            values = values[..., colours]
        for part, own in _UNIFIED.items():
            if name.startswith(part) and name != full_name:
                end = name.removeprefix(part) or ".weight"
                tensors[own + end] = values.transpose(1, 0, 2) if part == "pos_embedding" else values
    return tensors


_UNIFIED = {
    "patch_dense": "v.patch_embd",
    "patch_ln1": "v.patch_norm.1",
    "patch_ln2": "v.patch_norm.2",
    "pos_norm": "v.patch_norm.3",
    "pos_embedding": "v.position_embd",
    "multimodal_embedder.embedding_projection": "mm.input_projection",
}
_GEMMA4 = {
    "patch_embedder.position_embedding_table": "v.position_embd.weight",
    "std_bias": "v.std_bias",
    "std_scale": "v.std_scale",
    "embed_vision.embedding_projection.weight": "mm.input_projection.weight",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.o_proj": "attn_out",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_SIGLIP = {
    "embeddings.patch_embeddings.projection": "v.patch_embd",
    "attention.projection_layer": "attn_out",
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "mm_soft_emb_norm": "mm.soft_emb_norm",
    "connector.modality_projection.proj": "mm.model.fc",
    "layer_norm": "mm.input_norm",
    "patch_conv": "v.patch_embd",
    "ln_pre": "v.pre_ln",
    "norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger",
    "linear_1": "mm.1",
    "linear_2": "mm.2",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_down",  # as older converters named them
    "mlp.fc2": "ffn_up",
}


_INTERNVL_MERGER = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}


def _name_siglip_tensors(weights: Weights) -> Weights:
    tensors: Weights = {}
    is_internvl = any(name.endswith("cls_token") for name in weights)
    for full_name, values in weights.items():
        name = full_name.removeprefix("model.").removeprefix("vision_tower.").removeprefix("multi_modal_projector.")
        stem, _, end = name.removeprefix("vision_model.").rpartition(".")
        if "language_model" in full_name or "text_model" in full_name:
            continue
        if stem == "embeddings.patch_embedding" and values.ndim == 2:  # of SigLIP 2, with colours last
            side = round((values.shape[1] // 3) ** 0.5)
            values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        if name.rpartition(".")[2] in ("lambda_1", "lambda_2"):
            tensors[f"v.blk.{name.split('.')[2]}.ls{name[-1]}.weight"] = values
        elif name == "embeddings.cls_token":
            tensors["v.class_embd"] = values.reshape(-1)
        elif name == "embeddings.position_embeddings":
            tensors["v.position_embd.weight"] = values[0]
        elif is_internvl and stem in _INTERNVL_MERGER:
            tensors[f"mm.model.mlp.{_INTERNVL_MERGER[stem]}.{end}"] = values
        elif stem.startswith(("encoder.layers.", "encoder.layer.", "transformer.layers.")):
            number, _, module = re.split(r"layers?\.", stem, maxsplit=1)[1].partition(".")
            if is_internvl and module.startswith("mlp."):
                module = {"mlp.fc1": "mlp.fc2", "mlp.fc2": "mlp.fc1"}[module]
            tensors[f"v.blk.{number}.{_SIGLIP[module]}.{end}"] = values
        elif name == "mm_input_projection_weight":
            tensors["mm.input_projection.weight"] = values
        elif stem in _SIGLIP:
            tensors[f"{_SIGLIP[stem]}.{end}"] = values + (stem == "mm_soft_emb_norm")
    return tensors

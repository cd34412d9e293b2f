"""A folder that vLLM opens as a model: a `config.json` of a shape, and its made-up vocabulary as a `tokenizer.json`.

vLLM makes up the weights (`load_format="dummy"`). Q4_K_M is compared with vLLM's fastest 4 bits, AWQ in groups of 128
by Marlin's or Machete's kernels; its table of embeddings and its logits stay in bf16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxr.core.errors import MlxrError
from synthetic import Shape

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MXFP4 = {"quant_method": "mxfp4"}
KEPT = {  # parts that such checkpoints do not quantise
    "llama": ["lm_head"],
    "qwen3_moe": ["lm_head", "mlp.gate"],
    "gpt_oss": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def can_open(shape: Shape, type_name: str) -> bool:
    """Return True if vLLM has something like the shape in something like the type."""
    kind = shape.to_folder()["model_type"]
    if kind == "gpt_oss":
        return type_name == "mxfp4"
    return kind in ARCHITECTURES and type_name in ("bf16", "q4_k_m")


def make_config(shape: Shape, type_name: str) -> dict[str, Any]:
    """Return the `config.json`. Raises MlxrError if vLLM has nothing like it."""
    config = shape.to_folder()
    kind = config["model_type"]
    if not can_open(shape, type_name):
        raise MlxrError(f"vLLM is not asked for {kind} in {type_name}")
    config |= {
        "architectures": [ARCHITECTURES[kind]],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "qwen3_moe":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if kind == "gpt_oss":
        config["rope_scaling"] = config["rope_scaling"] | {"beta_fast": 32.0, "beta_slow": 1.0}
        config |= {"swiglu_limit": 7.0, "initial_context_length": 4096}
    if type_name != "bf16":
        config["quantization_config"] = (MXFP4 if kind == "gpt_oss" else AWQ) | {"modules_to_not_convert": KEPT[kind]}
    return config


def make_tokenizer(shape: Shape) -> dict[str, Any]:
    """The shape's byte-level vocabulary in the tokenizers library's form. Raises MlxrError for another kind."""
    told = shape.vocabulary(shape.vocab_size)
    if told["tokenizer.ggml.model"] != "gpt2":
        raise MlxrError("only vocabularies of byte-level pieces are written for vLLM")
    tokens, types = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    special = [number for number, type_ in enumerate(types) if type_ != 1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": tokens[number], **flags} for number in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens) if types[number] == 1},
            "merges": told["tokenizer.ggml.merges"],
        },
    }


def write_folder(folder: Path, shape: Shape, type_name: str, *, has_vocabulary: bool) -> Path:
    """Write the folder for vLLM; with a vocabulary its server can answer with text. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config(shape, type_name), indent=1))
    if has_vocabulary:
        tokenizer = make_tokenizer(shape)
        begin, end = (tokenizer["added_tokens"][number]["content"] for number in (0, 1))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(told | {"model_max_length": shape.context_length}))
    return folder

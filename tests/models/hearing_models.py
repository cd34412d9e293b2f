"""Tiny models that hear, with weights and a sound from a seed, and the results of `transformers` for them."""

from __future__ import annotations

import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vision_models import SEED, Golden, Weights, draw_weights, write_folder

GOLDENS = Path(__file__).parent / "hearing_goldens"
PLACE = 124
SAMPLES = {"conformer": 33_000, "plain": 1_990}  # of the sounds; both become about 50 rows


def draw_sound(samples: int, rate: int = 16_000) -> NDArray[np.float32]:
    """Two tones that rise, with some noise."""
    seconds = np.arange(samples) / rate
    tones = 0.3 * np.sin(2 * np.pi * (300 + 200 * seconds) * seconds) + 0.2 * np.sin(2 * np.pi * 1900 * seconds)
    return (tones + np.random.RandomState([SEED, 1]).normal(0, 0.02, samples)).astype(np.float32)


def write_wav(samples: NDArray[np.float32], rate: int = 16_000, channels: int = 1) -> bytes:
    """The samples as a WAV file of 16 bits, the same in each channel."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        whole = np.round(np.clip(samples, -1, 1) * 32767).astype("<i2")
        file.writeframes(np.repeat(whole, channels).tobytes())
    return target.getvalue()


def read_hearing(case: str) -> tuple[Golden, NDArray[np.float32]]:
    """Read a case with one picture, the rows of the sound, the logits, and the frames of the sound."""
    stated = json.loads((GOLDENS / f"{case}.json").read_text())
    with np.load(GOLDENS / f"{case}.npz") as stored:
        own = {"pixels": [stored["pixels"]], "rows": stored["rows"], "logits": stored["logits"]}
        return Golden(sizes=[(37, 70)], **own, **stated), stored["frames"]


def write_hearing_folder(folder: Path, case: str) -> Golden:
    """Write the model of a case as a folder of Hugging Face's, without a tokenizer."""
    golden, _ = read_hearing(case)
    write_folder(folder, golden)
    return golden


def name_gguf_tensors(golden: Golden) -> tuple[dict[str, Any], Weights]:
    """The keys and tensors of an ear as llama.cpp's converter writes them."""
    ear = golden.config["audio_config"]
    metadata: dict[str, Any] = {
        "clip.audio.projector_type": "gemma4a" if "num_hidden_layers" in ear else "gemma4ua",
        "clip.audio.projection_dim": golden.config["text_config"]["hidden_size"],
        "clip.audio.embedding_length": ear.get("hidden_size", 40),
        "clip.audio.feed_forward_length": 4 * ear.get("hidden_size", 0),
        "clip.audio.block_count": ear.get("num_hidden_layers", 0),
        "clip.audio.attention.head_count": ear.get("num_attention_heads", 0),
        "clip.audio.num_mel_bins": 16,
    }
    tensors: Weights = {}
    for full_name, values in draw_weights(golden.config, golden.shapes).items():
        if full_name == "model.embed_audio.embedding_projection.weight":
            tensors["mm.a.input_projection.weight"] = values
        elif full_name.startswith("model.audio_tower."):
            name = full_name.removeprefix("model.audio_tower.").replace(".linear.", ".")
            if name.endswith("per_dim_scale"):
                name, values = f"{name}.weight", np.log1p(np.exp(values.astype(np.float64))).astype(np.float32)
            if name.endswith("depthwise_conv1d.weight"):
                values = values[:, 0]
            stem, _, end = re.sub(r"^layers\.(\d+)\.", r"blk.\1.", name).rpartition(".")
            block, _, module = stem.partition(".")[2].partition(".") if stem.startswith("blk.") else ("", "", "")
            own = f"blk.{block}.{_BLOCK[module]}" if block else _ENDS[stem]
            tensors[f"a.{own}.{end}"] = values.reshape(values.shape or (1,))
    return metadata, tensors


_ENDS = {
    "subsample_conv_projection.layer0.conv": "conv1d.0",
    "subsample_conv_projection.layer1.conv": "conv1d.1",
    "subsample_conv_projection.layer0.norm": "conv1d.0.norm",
    "subsample_conv_projection.layer1.norm": "conv1d.1.norm",
    "subsample_conv_projection.input_proj_linear": "input_projection",
    "output_proj": "pre_encode.out",
}
_BLOCK = {
    "feed_forward1.ffw_layer_1": "ffn_up",
    "feed_forward1.ffw_layer_2": "ffn_down",
    "feed_forward1.pre_layer_norm": "ffn_norm",
    "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward2.ffw_layer_1": "ffn_up_1",
    "feed_forward2.ffw_layer_2": "ffn_down_1",
    "feed_forward2.pre_layer_norm": "ffn_norm_1",
    "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.post": "attn_out",
    "self_attn.relative_k_proj": "attn_k_rel",
    "self_attn.per_dim_scale": "per_dim_scale",
    "norm_pre_attn": "attn_pre_norm",
    "norm_post_attn": "attn_post_norm",
    "norm_out": "ln2",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.linear_end": "conv_pw2",
    "lconv1d.depthwise_conv1d": "conv_dw",
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
}

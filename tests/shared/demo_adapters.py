"""Low-rank adapters of the demo model with random numbers, as GGUF files and as PEFT writes them.

`demo_adapters.py FOLDER` writes `one.gguf` and `folder` there, for tests in an environment without mlxr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from mlxr.formats import TensorToWrite, open_gguf, write_gguf
from mlxr.loading import ASSETS

NAMES = {
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj",
}


def make_pairs(seed: int, rank: int = 4, spread: float = 0.5) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Matrices a (rank, in) and b (out, rank) for some weights of the demo."""
    chance = np.random.default_rng(seed)
    with open_gguf(ASSETS / "demo.gguf") as base:
        shapes = {name: base.tensors[name].shape for name in NAMES}
    return {
        name: (
            chance.normal(0, spread, (rank, columns)).astype(np.float32),
            chance.normal(0, spread, (rows, rank)).astype(np.float32),
        )
        for name, (rows, columns) in shapes.items()
    }


def save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write matrices in f32 as safetensors do, whose package an environment with mlxr alone does not have."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(v.tobytes() for v in tensors.values()))


def write_gguf_adapter(path: Path, seed: int, rank: int = 4) -> Path:
    """An adapter of the demo as a GGUF file."""
    tensors = []
    for name, (a, b) in make_pairs(seed, rank).items():
        for side, values in (("a", a), ("b", b)):
            written = TensorToWrite(
                f"{name}.lora_{side}", "f32", values.shape, lambda values=values: [values.tobytes()]
            )
            tensors.append(written)
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    write_gguf(path, about, tensors)
    return path


def write_peft_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """An adapter of the demo as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in make_pairs(seed, rank).items():
        tensors[f"base_model.model.{NAMES[name]}.lora_A.weight"] = a
        tensors[f"base_model.model.{NAMES[name]}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    write_gguf_adapter(Path(sys.argv[1]) / "one.gguf", 1)
    write_peft_adapter(Path(sys.argv[1]) / "folder", 4)

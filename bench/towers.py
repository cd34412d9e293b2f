"""Measures the time to encode a picture, in turns with llama.cpp's libmtmd: SigLIP-so400m and the tower of Qwen3-VL.

    MTMD_CPP_LIB=FOLDER python bench/towers.py [--threads 2] [--rounds 3] [--type f16] [--json FILE]   # idle machine
    python bench/towers.py --layers 2 --rounds 1 --case gemma3      # a quick look at whether it runs
    python bench/towers.py --device cuda --rounds 20                # a GPU: pictures a second, without libmtmd

The towers have random weights and the sizes of the real ones: Gemma 3's at 896 x 896, Qwen3-VL's at 1,024 x 1,024
pixels, so that neither resizes. MTMD_CPP_LIB is the folder of libmtmd if llama-cpp-python was built without it. Each
round encodes the picture once with each; rows are compared. Then the time between the tokens of an answer is measured,
alone and while the engine encodes the picture for another request. Exit code 1 unless mlxr takes at most half the time
of libmtmd, by the median, for both towers, and the 99th percentile grows by no more than MAX_DELAY_S. On a GPU rows are
compared with those of the processor instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("models", "shared", "peers")]

from vision_models import draw_picture, read_golden, write_chat_folder  # noqa: E402 -- needs the path above

from mlxr.cli.main import main as run_command  # noqa: E402
from mlxr.core.model_settings import ModelSettings  # noqa: E402
from mlxr.core.types import SamplingParams  # noqa: E402
from mlxr.engine.engine import Engine  # noqa: E402
from mlxr.engine.pictures import Encoder, Picture, Pictures, Placed  # noqa: E402
from mlxr.engine.request import EngineRequest  # noqa: E402
from mlxr.formats import TensorToWrite, open_gguf, write_gguf  # noqa: E402
from mlxr.kernels.context import Context  # noqa: E402
from mlxr.model_files.tower import find_tower  # noqa: E402
from mlxr.models import Decoder  # noqa: E402
from mlxr.models.families import model_from_gguf  # noqa: E402
from mlxr.models.tower import Tower  # noqa: E402

LEAST_GAIN, MAX_DELAY_S, ALONE_TOKENS, CONTEXT_TOKENS = 2.0, 0.25, 300, 8192


@dataclass(frozen=True)
class Sizes:
    """A tower's sizes; sides of a picture and a patch are in pixels, some layers' outputs are added to the text's.

    Towers of Gemma's kind see pictures of one size, the others are Qwen's.
    """

    side: int
    patch: int
    hidden: int
    features: int
    layers: int
    heads: int
    taps: tuple[int, ...] = ()
    is_gemma: bool = False


CASES = {
    "gemma3": Sizes(896, 14, 1152, 4304, 27, 16, is_gemma=True),
    "qwen3vl": Sizes(1024, 16, 1152, 4304, 27, 16, taps=(8, 16, 24)),
}
QWEN35_SMALL = Sizes(1024, 16, 768, 3072, 12, 12)  # the tower of 0.8B


def write_tower(path: Path, sizes: Sizes, columns: int, type_name: str) -> Path:
    """Write a random tower, whose rows fit a text model of hidden size `columns`."""
    side, patch, hidden = sizes.side, sizes.patch, sizes.hidden
    random = np.random.RandomState(7)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (hidden, 3, patch, patch),
        "v.patch_embd.bias": (hidden,),
    }
    shapes |= {f"v.post_ln.{end}": (hidden,) for end in ("weight", "bias")}
    for index in range(sizes.layers):
        shapes |= dict(_list_layer(f"v.blk.{index}.", sizes))
    metadata: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.projector_type": "gemma3" if sizes.is_gemma else "qwen3vl_merger",
        "clip.has_vision_encoder": True,
        "clip.use_gelu": True,
        "clip.vision.embedding_length": hidden,
        "clip.vision.block_count": sizes.layers,
        "clip.vision.attention.head_count": sizes.heads,
        "clip.vision.feed_forward_length": sizes.features,
        "clip.vision.patch_size": patch,
        "clip.vision.image_size": side if sizes.is_gemma else 48 * patch,
        "clip.vision.projection_dim": columns,
        "clip.vision.image_mean": [0.5] * 3,
        "clip.vision.image_std": [0.5] * 3,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
    }
    if sizes.is_gemma:
        metadata["clip.vision.projector.scale_factor"] = 4
        shapes |= {"v.position_embd.weight": ((side // patch) ** 2, hidden), "mm.soft_emb_norm.weight": (hidden,)}
        shapes["mm.input_projection.weight"] = hidden, columns
    else:
        metadata["clip.vision.spatial_merge_size"] = 2
        metadata["clip.vision.image_min_pixels"], metadata["clip.vision.image_max_pixels"] = 1 << 16, 1 << 24
        metadata["clip.vision.is_deepstack_layers"] = [index in sizes.taps for index in range(sizes.layers)]
        shapes |= {"v.patch_embd.weight.1": shapes["v.patch_embd.weight"], "v.position_embd.weight": (48**2, hidden)}
        shapes |= dict(_list_merger("mm.0", "mm.2", 4 * hidden, columns))
        for index in sizes.taps:
            names = f"v.deepstack.{index}.fc1", f"v.deepstack.{index}.fc2"
            shapes |= dict(_list_merger(*names, 4 * hidden, columns))
            shapes |= {f"v.deepstack.{index}.norm.{end}": (4 * hidden,) for end in ("weight", "bias")}
    tensors = []
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32) * (
            np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
        )
        is_large = len(shape) == 2 and "position" not in name
        made = values + (name.endswith("weight") and len(shape) == 1)
        tensors.append(
            TensorToWrite.from_array(name, type_name if is_large else "f32", np.ascontiguousarray(made, np.float32))
        )
    write_gguf(path, metadata, tensors)
    return path


def _list_layer(prefix: str, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, features = sizes.hidden, sizes.features
    apart = [(f"attn_{part}", hidden, hidden) for part in "qkv"]
    for name, rows, columns in (
        *(apart if sizes.is_gemma else [("attn_qkv", 3 * hidden, hidden)]),
        ("attn_out", hidden, hidden),
        ("ffn_up", features, hidden),
        ("ffn_down", hidden, features),
    ):
        yield f"{prefix}{name}.weight", (rows, columns)
        yield f"{prefix}{name}.bias", (rows,)
    for name in ("ln1", "ln2"):
        yield f"{prefix}{name}.weight", (hidden,)
        yield f"{prefix}{name}.bias", (hidden,)


def _list_merger(first: str, second: str, joined: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in ((first, joined), (second, columns)):
        yield f"{name}.weight", (rows, joined)
        yield f"{name}.bias", (rows,)


def choose_sizes(case: str, layers: int | None) -> Sizes:
    """The sizes of a case, with as many layers as are asked for; the tiny text model takes as many as there are."""
    sizes, own = CASES[case], read_golden(case).config["vision_config"].get("deepstack_visual_indexes", ())
    layers = sizes.layers if layers is None else layers
    taps = tuple(at * layers // sizes.layers for at in sizes.taps[: len(own)])
    return replace(sizes, layers=layers, taps=taps)


def measure(folder: Path, case: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each round, with libmtmd's on a processor, and the difference of rows."""
    text = write_chat_folder(folder / case, case, CONTEXT_TOKENS)
    model_path, on_cpu = folder / f"{case}.gguf", given.device == "cpu"
    assert run_command(["convert", str(text), str(model_path), "--type", "f32"]) == 0
    sizes, columns = choose_sizes(case, given.layers), read_golden(case).config["text_config"]["hidden_size"]
    mmproj = write_tower(folder / f"mmproj-{case}.gguf", sizes, columns, given.type)
    opened, ctx = open_gguf(model_path), Context(given.device, threads=given.threads if on_cpu else None)
    config = model_from_gguf(opened.metadata, opened.tensors)
    file, reason = find_tower(model_path, opened, config, mmproj)
    assert file is not None, reason
    tower, pixels = file.load(ctx), draw_picture(sizes.side, sizes.side)
    if on_cpu:
        found = measure_beside(tower, pixels, model_path, mmproj, given)
    else:
        made = [_encode(tower, pixels, given.together) for _ in range(given.rounds + 1)]
        seconds, rows = [took_s for took_s, _ in made[1:]], made[-1][1]
        rows = rows[: len(rows) // given.together]
        right = _finish(file.load(Context("cpu")).encode(pixels))
        cosines = (rows * right).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(right, axis=1)
        rate = given.together / statistics.median(seconds)
        found = {"seconds": {"mlxr": seconds}, "pictures_per_s": rate, "least_cosine": float(cosines.min())}
    picture = Picture(pixels, tower.spec.find_grid(pixels), b"tower")
    return {**found, **measure_others(Decoder(ctx, config, opened.tensors), tower, picture)}


def _encode(tower: Tower, pixels: Any, together: int = 1) -> tuple[float, Any]:
    """Encode so many pictures at once; returns the seconds and their rows."""
    start_s = time.perf_counter()
    rows = _finish(tower.encode(*[pixels] * together))
    return time.perf_counter() - start_s, rows


def measure_beside(tower: Tower, pixels: Any, model: Path, mmproj: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each round with both in turns, our speed-up, and the difference of their rows."""
    from llama_losses import open_llama
    from mtmd_rows import MARK, Eyes

    eyes = Eyes(mmproj, open_llama(model, 512, n_threads=given.threads), given.threads, rounds=True)
    chunks = eyes.split(MARK, [pixels])  # the chunk is valid while this is open
    chunk = next(one for one in chunks if eyes.is_picture(one))
    seconds: dict[str, list[float]] = {"mlxr": [], "libmtmd": []}
    for turn in range(given.rounds + 1):  # the first does not count
        ours_s, rows = _encode(tower, pixels)
        start_s = time.perf_counter()
        theirs = eyes.encode(chunk)
        if turn:
            seconds["mlxr"].append(ours_s)
            seconds["libmtmd"].append(time.perf_counter() - start_s)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    eyes.close()
    difference = float(np.abs(rows - theirs).max() / np.abs(theirs).max())
    return {"seconds": seconds, "gain": medians["libmtmd"] / medians["mlxr"], "difference": difference}


def measure_others(model: Decoder, tower: Tower, picture: Picture) -> dict[str, Any]:
    """Measure the milliseconds between the tokens of an answer, alone and while a picture is encoded for another."""
    turns, is_whole = model.config.turns_pictures, model.config.sees_whole_pictures
    encoder = Encoder(tower.encode, turns=turns, is_whole=is_whole)
    settings = ModelSettings(max_sequences=2, draft="off", context_tokens=CONTEXT_TOKENS)
    engine = Engine(model, model.ctx, settings, eos_ids=(), memory_bytes=1 << 28, encoder=encoder)
    text = engine.submit(EngineRequest([1, 2, 3], SamplingParams(max_tokens=CONTEXT_TOKENS - 9)))
    times: dict[str, list[float]] = {"alone": [], "meanwhile": []}

    def step(name: str) -> None:
        times[name] += [time.perf_counter() for event in engine.step() if event.sequence_id == text]

    while len(times["alone"]) < ALONE_TOKENS:
        step("alone")
    times["meanwhile"].append(times["alone"][-1])
    shown = Pictures((Placed(picture, 1),), picture.tokens + 2)
    engine.submit(EngineRequest([1] * shown.tokens, SamplingParams(max_tokens=1), pictures=shown))
    while not encoder.encoded:
        step("meanwhile")
    engine.close()
    gaps = {name: np.diff(found[1:] if name == "alone" else found) * 1e3 for name, found in times.items()}
    found = {f"{name}_p99_ms": float(np.percentile(each, 99)) for name, each in gaps.items()}
    return {**found, "longest_ms": float(gaps["meanwhile"].max()), "tokens_meanwhile": len(gaps["meanwhile"])}


def _finish(encoding: Any) -> Any:
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            return done.value


def main() -> int:
    """Measure and print; returns exit code 1 unless the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda", "metal", "mlx-cpu"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--type", choices=["f16", "bf16", "q8_0"], default="f16", help="of the tower's weights")
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--layers", type=int, help="of the towers, if not all")
    parser.add_argument("--together", type=int, default=1, help="pictures that a GPU encodes at once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory(prefix="mlxr-towers-") as name:
        for case in given.case or CASES:
            figures[case] = measure(Path(name), case, given)
            print(case, json.dumps(figures[case]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))
    delay_ms = max(one["meanwhile_p99_ms"] - one["alone_p99_ms"] for one in figures.values())
    gains = [one["gain"] for one in figures.values() if "gain" in one]
    return int(min(gains, default=LEAST_GAIN) < LEAST_GAIN or delay_ms > MAX_DELAY_S * 1e3)


if __name__ == "__main__":
    sys.exit(main())

"""A folder as mlx-community publishes it, or AWQ, GPTQ, compressed-tensors, FP8: it computes with the right numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from model_folder import HF_CONFIG, make_weights, train_tokenizer
from numpy.typing import NDArray

from mlxr.core.errors import DeviceError, ModelError
from mlxr.core.settings import Settings
from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest
from mlxr.engine.runner import Doubles
from mlxr.formats import open_gguf
from mlxr.kernels.context import Context
from mlxr.kernels.gpu.mlx import find_gpu
from mlxr.loading import load, name_quantization, open_source
from mlxr.service.opening import build_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from mlx_words import make_source, quantize, quantize_packed, write_safetensors

CHANGES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 16}
DOWN, QUERY = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
OWN = {DOWN: {"bits": 6, "group_size": 128}, QUERY: False, "model.embed_tokens": {"bits": 8, "group_size": 64}}
TOKENS = list(range(5, 45))
SETTINGS = Settings(arena_bytes=2**22, kv_type="f32")
MAX_ERROR = {"cpu": 0.05, "mlx-cpu": 2e-5, "emulated": 2e-5}  # the CPU rounds activations to 8 bits
GPU = find_gpu()
if GPU is not None:
    MAX_ERROR[GPU] = 0.08  # rounds inputs and weights to 16 bits; an H200 came to 0.043


def write_folder(folder: Path, *, tied: bool = True, plain: bool = False, **quantization: object) -> Path:
    """Write a folder quantised like this, with OWN for single modules; `plain` writes the same numbers as f32."""
    folder.mkdir()
    stated = {"bits": 4, "group_size": 64, "mode": "affine", **OWN, **quantization}
    config = {**HF_CONFIG, **CHANGES, "attention_bias": True, "tie_word_embeddings": tied}
    config["vocab_size"] = train_tokenizer(folder)
    tensors = {}
    for name, values in make_weights(config).items():
        module = name.rpartition(".")[0]
        own = stated.get(module, stated)
        if (tied and module == "lm_head") or (values.ndim == 2 and own is False):
            if module != "lm_head":
                tensors[name] = make_source(name, values, "f32")
        elif values.ndim == 1:
            tensors[name] = make_source(name, values, "bf16")
        else:
            assert isinstance(own, dict)
            parts, meaning = quantize(module, values, own["bits"], own["group_size"])
            tensors |= {name: make_source(name, meaning, "f32")} if plain else parts
    if not plain:
        config |= {"quantization": stated, "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantised folder, and one with the same numbers in f32."""
    base = tmp_path_factory.mktemp("mlx")
    return write_folder(base / "q", tied=request.param), write_folder(base / "f", tied=request.param, plain=True)


def score(folder: Path, device: str) -> Doubles:
    with load(folder, device=device) as loaded, closing(build_engine(loaded, SETTINGS)) as engine:
        return engine.score(TOKENS)


def test_the_reference_computes_what_the_numbers_mean(pair: tuple[Path, Path]) -> None:
    quantised, plain = pair
    assert np.array_equal(score(quantised, "reference"), score(plain, "reference"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", MAX_ERROR)
def test_devices_compute_it_too(pair: tuple[Path, Path], device: str) -> None:
    try:
        Context(device)  # type: ignore[arg-type]
    except DeviceError as error:
        pytest.skip(str(error))
    found, expected = (np.asarray(score(pair[0], name)) for name in (device, "reference"))
    assert np.abs(found - expected).max() < MAX_ERROR[device]


def answer(folder: Path, threads: int, chunk_tokens: int) -> list[tuple[int | None, float | None]]:
    with load(folder, device="cpu", threads=threads) as loaded:
        settings = Settings(arena_bytes=2**22, prefill_chunk_tokens=chunk_tokens)
        with closing(build_engine(loaded, settings)) as engine:
            engine.submit(EngineRequest(TOKENS, SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)))
            events = []
            while engine.has_work:
                events += engine.step()
    return [(event.token_id, event.logprob) for event in events]


def test_answers_are_the_same_bits_however_they_are_cut(pair: tuple[Path, Path]) -> None:
    expected = answer(pair[0], 1, 512)
    assert len(expected) == 8
    for threads, chunk_tokens in ((2, 512), (1, 7), (2, 1)):
        assert answer(pair[0], threads, chunk_tokens) == expected


def test_it_becomes_gguf(pair: tuple[Path, Path], tmp_path: Path, mlxr: Callable[..., str]) -> None:
    values: list[NDArray[np.float32]] = []
    for number, folder in enumerate(pair):
        target = tmp_path / f"{number}.gguf"
        mlxr("convert", folder, target, "--type", "f32")
        with open_gguf(target) as file:
            values.append(file.tensors["blk.1.ffn_down.weight"].to_float32())
            assert file.tensors["token_embd.weight"].shape[1] == CHANGES["hidden_size"]
    assert np.array_equal(*values)


def test_fingerprints_tell_readings_apart(tmp_path: Path) -> None:
    """The same words in groups of another size are another model."""
    prints = set()
    for number, (bits, size) in enumerate(((4, 64), (8, 32))):
        folder = write_folder(tmp_path / str(number), bits=bits, group_size=size)
        with load(folder, device="cpu") as loaded:
            prints.add(loaded.fingerprint)
    with load(folder, device="cpu") as loaded:
        assert loaded.fingerprint in prints
    assert len(prints) == 2


def test_it_is_listed_by_its_bits(pair: tuple[Path, Path]) -> None:
    source, plain = (open_source(folder) for folder in pair)
    assert name_quantization(source) == "MLX_4BIT"
    assert {name: tensor.shape for name, tensor in source.tensors.items()} == {
        name: tensor.shape for name, tensor in plain.tensors.items()
    }


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_gate\.weight has shape \(256, 128\)"):
        load(folder, device="cpu")
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantization_config is .* convert the original weights"):
        load(folder, device="cpu")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is quantised, but in config\.json there is no quantization"):
        load(folder, device="cpu")


PACKED = {
    "AWQ_4BIT": ("awq", 4, {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": None}),
    "GPTQ_4BIT": ("gptq", 4, {"quant_method": "gptq", "bits": 4, "desc_act": False, "checkpoint_format": "gptq"}),
    "GPTQ_3BIT": ("gptq_v2", 3, {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_v2"}),
    "INT4": ("packed", 4, {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}),
    "INT8": ("bytes", 8, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "FP8": ("fp8", 8, {"quant_method": "fp8", "weight_block_size": [32, 128], "activation_scheme": "dynamic"}),
    "NVFP4": ("nvfp4", 4, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
    "NVFP4 ": ("modelopt", 4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "BNB_NF4": ("nf4", 4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "INT8 ": ("int8", 8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "INT4 ": ("ao4", 4, {"quant_method": "torchao"}),
    "INT8  ": ("ao8", 8, {"quant_method": "torchao"}),
}


@pytest.mark.parametrize("name", PACKED)
def test_others_quantised_folders_compute_what_the_numbers_mean(name: str, tmp_path: Path) -> None:
    """For each method the reference gives what the same numbers give in f32; the CPU does, but for its activations."""
    method, bits, stated = PACKED[name]
    config = {**HF_CONFIG, **CHANGES, "torch_dtype": "float16"}
    folders, answers = (tmp_path / "q", tmp_path / "f"), []
    for folder in folders:
        folder.mkdir()
        config["vocab_size"] = train_tokenizer(folder)
        tensors = {}
        for tensor_name, values in make_weights(config).items():
            parts, meaning = {}, values
            if values.ndim == 2 and ".layers." in tensor_name:
                size = 128 if method == "fp8" else 64
                parts, meaning = quantize_packed(tensor_name.removesuffix(".weight"), values, method, bits, size)
            tensors |= (
                parts if parts and folder == folders[0] else {tensor_name: make_source(tensor_name, meaning, "f32")}
            )
        extra = {"quantization_config": stated} if folder == folders[0] else {}
        if extra and method == "modelopt":  # says so in a file of its own
            extra = {}
            (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
        (folder / "config.json").write_text(json.dumps(config | extra))
        write_safetensors(folder / "model.safetensors", tensors)
        answers.append(np.asarray(score(folder, "reference")))
    assert np.abs(answers[0]).max() > 1
    assert np.abs(answers[0] - answers[1]).max() < (1e-4 if method == "int8" else 1e-30)  # whose scales have 24 bits
    assert np.abs(np.asarray(score(folders[0], "cpu")) - answers[0]).max() < 0.08  # in 8 bits
    source = open_source(folders[0])
    assert name_quantization(source) in (name.rstrip(), "F32")  # of the small model most bytes may be embeddings
    assert source.tensors["blk.1.ffn_down.weight"].recipe.upper() == name.rstrip()  # type: ignore[attr-defined]

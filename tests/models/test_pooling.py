"""Texts become vectors as the model's files say, by every way of asking."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_folder import make_encoder_folder
from model_folder import make_folder, write_with
from safetensors.numpy import load_file, save_file

from mlxr import LLM
from mlxr.conversion import plan_tensors, write_model
from mlxr.core.errors import ContextFull, FormatError, InvalidRequest, ModelError
from mlxr.loading import ASSETS, open_source
from mlxr.model_files.files import GGUF_POOLINGS, read_folder_pooling, read_gguf_pooling
from mlxr.model_files.text_rules import read_folder_rules, read_gguf_rules
from mlxr.service.embedding import (
    PromptChoice,
    check_dimensions,
    choose_pooling,
    choose_prompt,
    describe_pooling,
    spell_vector,
)

MODULES = "sentence_transformers.models."


def write_folder(folder: Path, pooling: object = None, *kinds: str, path: str = "1_Pooling") -> Path:
    (folder / path).mkdir(parents=True)
    if pooling is not None:
        (folder / path / "config.json").write_text(json.dumps(pooling))
    if kinds:
        paths = {"Transformer": "", "Pooling": path}
        modules = [
            {"idx": i, "type": MODULES + kind, "path": paths.get(kind, f"{i}_{kind}")} for i, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize(
    ("number", "word"), [*enumerate(GGUF_POOLINGS), (7, "pooling_type 7"), ("x", "pooling_type 'x'")]
)
def test_gguf_states_it_by_a_number(number: object, word: str) -> None:
    assert read_gguf_pooling({"general.architecture": "qwen3", "qwen3.pooling_type": number}) == word
    assert read_gguf_pooling({"general.architecture": "qwen3", "llama.pooling_type": 3}) is None


@pytest.mark.parametrize(
    ("stated", "kinds", "word"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ("Transformer", "Pooling"), "last"),
        ({"pooling_mode_cls_token": True}, (), "cls"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, ("Transformer", "Pooling", "Normalize"), "mean"),
        ({"pooling_mode": "lasttoken"}, (), "last"),
        ({"pooling_mode_max_tokens": True}, (), "max_tokens"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, (), "max_tokens and cls_token"),
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "LSTM", "Normalize"), "a module LSTM"),
        ({}, (), None),
        (None, (), None),
    ],
)
def test_a_folder_states_it_in_its_modules(
    stated: object, kinds: tuple[str, ...], word: str | None, tmp_path: Path
) -> None:
    assert read_folder_pooling(write_folder(tmp_path, stated, *kinds)) == word


def test_modules_name_the_folder_of_the_pooling(tmp_path: Path) -> None:
    stated = {"pooling_mode_lasttoken": True}
    assert read_folder_pooling(write_folder(tmp_path / "a", stated, "Transformer", "Pooling", path="2_Pool")) == "last"
    folder = write_folder(tmp_path / "b", stated)
    (folder / "modules.json").write_text('[{"type": "x.Pooling", "path": "../a"}, 7]')
    assert read_folder_pooling(folder) == "last"
    (folder / "modules.json").write_text("{}")
    with pytest.raises(FormatError, match=r"modules\.json.*not a list"):
        read_folder_pooling(folder)


def test_what_is_not_done_is_refused_by_name_unless_something_else_is_asked_for() -> None:
    for stated, used in ((None, "mean"), ("none", "mean"), ("mean", "mean"), ("last", "last"), ("cls", "cls")):
        assert choose_pooling(stated, None, "input") == used
        assert choose_pooling(stated, "last", "input") == "last"
    for stated, words in (("rank", "rank pairs of texts"), ("a module LSTM", "a module LSTM")):
        with pytest.raises(InvalidRequest, match=f"input: this model .*{words}.*ask for another `pooling`"):
            choose_pooling(stated, None, "input")
        assert choose_pooling(stated, "cls", "input") == "cls"
    assert describe_pooling("last", "last") == "last"
    assert describe_pooling(None, "mean").startswith("mean; the files of this model state none")


def test_a_model_embeds_as_its_file_says(tmp_path: Path) -> None:
    texts = ["import os", "a longer text " * 40]
    with LLM(ASSETS / "demo-draft.gguf", threads=1, arena_bytes=2**23) as llm:
        plain = {pooling: llm.embed(texts, pooling=pooling) for pooling in ("mean", "last", "cls")}
        assert llm.embed(texts) == plain["mean"]
        assert llm.embed(texts[1]) == plain["mean"][1:]
        first = llm.embed([texts[1].split()[0], texts[1]], pooling="cls")
        assert len({json.dumps(vectors) for vectors in plain.values()}) == 3
        assert sum(one * other for one, other in zip(*first, strict=True)) > 0.999
    for number, pooling in ((3, "last"), (2, "cls"), (1, "mean"), (0, "mean")):
        path = write_with(ASSETS / "demo-draft.gguf", tmp_path / f"{number}.gguf", llama__pooling_type=number)
        with LLM(path, threads=1, arena_bytes=2**23) as llm:
            assert llm.embed(texts) == plain[pooling]
    with (
        LLM(
            write_with(ASSETS / "demo-draft.gguf", tmp_path / "4.gguf", llama__pooling_type=4),
            threads=1,
            arena_bytes=2**23,
        ) as llm,
        pytest.raises(InvalidRequest, match="rank pairs of texts"),
    ):
        llm.embed(texts)


def test_a_folder_keeps_it_when_it_is_converted(tmp_path: Path) -> None:
    folder = write_folder(make_folder(tmp_path / "model"), {"pooling_mode_lasttoken": True}, "Transformer", "Pooling")
    source = open_source(folder)
    with source.file:
        assert source.metadata["llama.pooling_type"] == 3
    with LLM(folder, threads=1, arena_bytes=2**23) as llm:
        assert llm.embed("the fox") == llm.embed("the fox", pooling="last") != llm.embed("the fox", pooling="mean")


@pytest.mark.parametrize(("kind", "function"), [("Tanh", np.tanh), ("Identity", lambda x: x)])
def test_dense_modules_come_after_the_pooling(kind: str, function: Callable[[Any], Any], tmp_path: Path) -> None:
    modules = ("Pooling:cls_token", f"Dense:{kind}", "Normalize")
    texts = ["the cat sat on mat", "where is paris?", "rain " * 30]
    plain = make_encoder_folder(tmp_path / "plain", "bert", modules[:1])
    with LLM(plain, threads=1) as llm:
        pooled = pool(llm, texts)
    folder = make_encoder_folder(tmp_path / "dense", "bert", modules)
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    made = function(pooled @ weights["linear.weight"].T + weights["linear.bias"])
    with LLM(folder, threads=1) as llm:
        vectors = llm.embed(texts)
        assert llm._session.config.vector_size == 24
    np.testing.assert_allclose(vectors, made / np.linalg.norm(made, axis=1, keepdims=True), atol=1e-5)
    source = open_source(folder)
    with source.file:
        write_model(source, plan_tensors(source, None), None, tmp_path / "model.gguf")
    with LLM(tmp_path / "model.gguf", threads=1) as llm:
        assert llm.embed(texts) == vectors


def pool(llm: LLM, texts: list[str]) -> Any:
    """The pooled vectors, not scaled."""
    session = llm._session
    return np.stack(session.embed_all([session.tokenizer.encode(text) for text in texts], "cls"))


def test_a_dense_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path, "bert", ("Pooling:cls_token", "Dense:Mish"))
    with pytest.raises(ModelError, match=r"2_Dense.activation_function is .*Mish', expected one of Identity"):
        open_source(folder)


PROMPTS = {"query": "where is ", "passage": "the cat "}


def test_prompts_and_the_length_of_texts_are_those_of_the_files(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "folder", "bert", ("Pooling:mean_tokens",))
    stated = {"prompts": PROMPTS, "default_prompt_name": "passage"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(stated))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    source = open_source(folder)
    with source.file:
        write_model(source, plan_tensors(source, None), None, tmp_path / "model.gguf")
    for path in (folder, tmp_path / "model.gguf"):
        with LLM(path, threads=1) as llm:
            plain = {text: llm.embed(text, prompt="") for text in ("paris", "where is paris", "the cat paris")}
            assert llm.embed("paris") == plain["the cat paris"] != plain["paris"]
            assert llm.embed("paris", prompt_name="query") == plain["where is paris"]
            assert llm.embed("paris", input_type="search_query") == plain["where is paris"]
            assert llm.embed("paris", input_type="document") == plain["the cat paris"]
            assert llm.embed("paris", input_type="clustering") == plain["paris"]
            assert len(llm.embed("paris", dimensions=8)[0]) == 8
            with pytest.raises(InvalidRequest, match="'other' is no prompt of this model, which has query"):
                llm.embed("paris", prompt_name="other")
            with pytest.raises(InvalidRequest, match="prompt: cannot hold together with prompt_name"):
                llm.embed("paris", prompt_name="query", prompt="a")
            with pytest.raises(InvalidRequest, match="input_type: 'song' is not known; there are query, passage"):
                llm.embed("paris", input_type="song")
            with pytest.raises(ContextFull, match=r"text 1: .*length is 8 tokens for a text, and this one has 12"):
                llm.embed(["cat", "rain " * 10], prompt="")
            long, cut = llm.embed(["cat " * 200_000, "cat " * 6], prompt="", truncate=True)
            assert long == cut


def test_prompts_that_only_model_cards_tell_are_known_by_names(tmp_path: Path) -> None:
    for name, query in (("multilingual-e5-small", "query: "), ("bge-base-en-v1.5", "Represent"), ("e5", None)):
        folder = tmp_path / name
        folder.mkdir()
        found = read_folder_rules(folder, "1_Pooling/config.json", 64)
        assert str(found.prompts.get("query"))[:7] == str(query)[:7]
        assert choose_prompt(found, PromptChoice()) == (None, "")
    qwen = read_gguf_rules({"general.name": "Qwen3 Embedding 0.6B"})
    assert choose_prompt(qwen, PromptChoice(input_type="query"))[1].endswith("answer the query\nQuery:")
    assert choose_prompt(qwen, PromptChoice(input_type="document")) == ("document", "")
    for wrong in ({"prompts": [1]}, {"prompts": {"a": 1}}, {"prompts": {}, "default": "b"}):
        with pytest.raises(ModelError, match=r"mlxr.embedding.prompts"):
            read_gguf_rules({"mlxr.embedding.prompts": json.dumps(wrong)})
    with pytest.raises(ModelError, match="max_seq_length is -1"):
        read_gguf_rules({"mlxr.embedding.max_tokens": -1})


def test_a_mean_leaves_prompts_out_where_the_files_say_so(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "folder", "bert", ("Pooling:mean_tokens",))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    source = open_source(folder)
    with source.file:
        write_model(source, plan_tensors(source, None), None, tmp_path / "model.gguf")
    for path in (folder, tmp_path / "model.gguf"):
        with LLM(path, threads=1) as llm:
            [states] = llm._session.embed_all([llm._session.tokenizer.encode("where is paris")], "none")
            mean = states[3:].mean(axis=0)  # without [CLS] where is
            vector, whole = llm.embed("paris", prompt_name="query")[0], llm.embed("where is paris")[0]
            np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)
            assert not np.allclose(vector, whole, atol=1e-5)
            assert llm.embed("paris", prompt_name="query", pooling="cls") == llm.embed("where is paris", pooling="cls")


class Storage:
    """A stand-in for `torch.FloatStorage`, which a pickle names."""


class Reduced:
    """Pickles as a call of the function that its module and name name."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def write_torch(path: Path, monkeypatch: pytest.MonkeyPatch, **tensors: Any) -> None:
    """A zip archive as `torch.save` writes it, without torch."""

    def rebuild() -> None: ...

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    Storage.__module__, Storage.__qualname__, Storage.__name__ = "torch", "FloatStorage", "FloatStorage"
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage, utils._rebuild_tensor_v2 = Storage, rebuild  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    text, numbers = io.BytesIO(), [value for value in tensors.values() if isinstance(value, np.ndarray)]

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", Storage, str(obj), "cpu", 1) if type(obj) is int and obj < 0 else None

    described: OrderedDict[str, Any] = OrderedDict()
    for name, value in tensors.items():
        described[name] = value
        if isinstance(value, np.ndarray):
            strides = tuple(one // 4 for one in value.strides)
            key = -1 - next(place for place, one in enumerate(numbers) if one is value)
            described[name] = Reduced(rebuild, key, 0, value.shape, strides, False, OrderedDict())
    Pickler(text, protocol=2).dump(described)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        for place, value in enumerate(numbers):
            archive.writestr(f"archive/data/{-1 - place}", value.tobytes())


def test_weights_and_vectors_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, random = (
        make_encoder_folder(tmp_path / "m3", "xlm-roberta", ("Pooling:cls_token",)),
        np.random.RandomState(3),
    )
    with LLM(folder, threads=1) as llm, pytest.raises(InvalidRequest, match=r"kind: sparse wants sparse_linear\.saf"):
        llm.embed_sparse("paris")
    sparse = {"weight": random.standard_normal((1, 64)).astype("f4"), "bias": np.array([0.1], "f4")}
    multi = {"weight": random.standard_normal((24, 64)).astype("f4"), "bias": random.standard_normal(24).astype("f4")}
    write_torch(folder / "sparse_linear.pt", monkeypatch, **sparse)
    save_file(multi, folder / "colbert_linear.safetensors")
    with LLM(folder, threads=1) as llm:
        token_ids = llm._session.tokenizer.encode("where is paris where")
        [states] = llm._session.embed_all([token_ids], "none")
        weights = np.maximum(states @ sparse["weight"][0] + sparse["bias"], 0)[1:-1]
        wanted: dict[int, float] = {}
        for token_id, weight in zip(token_ids[1:-1], weights.tolist(), strict=True):
            wanted[token_id] = max(weight, wanted.get(token_id, 0.0))
        assert llm.embed_sparse("where is paris where") == [
            pytest.approx({token_id: weight for token_id, weight in wanted.items() if weight}, rel=1e-5)
        ]
        made = states[1:] @ multi["weight"].T + multi["bias"]
        [vectors] = llm.embed_multi(["where is paris where"])
        np.testing.assert_allclose(vectors, made / np.linalg.norm(made, axis=1, keepdims=True), atol=1e-5)
    for broken in (sparse | {"weight": np.zeros((1, 63), "f4")}, {"weight": sparse["weight"]}):
        write_torch(folder / "sparse_linear.pt", monkeypatch, **broken)
        with pytest.raises(ModelError, match="sparse_linear: holds no weight"):
            LLM(folder, threads=1)
    ran = tmp_path / "ran"
    write_torch(folder / "sparse_linear.pt", monkeypatch, weight=Reduced(os.mkdir, str(ran)), bias=sparse["bias"])
    with pytest.raises(FormatError, match=r"is no torch file of floats: names posix\.mkdir"):
        LLM(folder, threads=1)
    assert not ran.exists()
    (folder / "sparse_linear.pt").write_bytes(b"PK")
    with pytest.raises(FormatError, match="is no torch file of floats"):
        LLM(folder, threads=1)


def test_vectors_in_fewer_bits() -> None:
    vector = np.array([0.5, -0.25, 0.0, 1.0, -1.0, 0.1, 0.2, -0.3, 0.7], np.float32)
    assert spell_vector(vector, "int8") == [64, -32, 0, 127, -127, 13, 25, -38, 89]
    assert spell_vector(vector, "uint8") == [192, 96, 128, 255, 1, 141, 153, 90, 217]
    assert spell_vector(vector, "ubinary") == [0b10010110, 0b10000000]
    assert spell_vector(vector, "binary") == [0b10010110 - 128, 0]
    assert spell_vector(vector, "float") == vector.tolist()
    assert spell_vector(vector, "ubinary", packs=True) == "loA="
    assert spell_vector(np.zeros(2, np.float32), "int8") == [0, 0]
    with pytest.raises(InvalidRequest, match="dimensions: must be at most 64"):
        check_dimensions(65, 64)
    with pytest.raises(InvalidRequest, match="must be a multiple of 8 for binary and ubinary; got 12"):
        check_dimensions(12, 64, ["ubinary"])

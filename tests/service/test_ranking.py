"""Documents are ranked by a query: by cross-encoders with their classifier, and by models that say yes or no."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from encoder_folder import make_encoder_folder
from model_folder import make_folder, make_weights
from safetensors.numpy import load_file, save_file

from mlxr import LLM
from mlxr.conversion import plan_tensors, write_model
from mlxr.core.errors import InvalidRequest
from mlxr.core.settings import Settings
from mlxr.engine.memory_plan import measure_conversation
from mlxr.loading import is_mostly_quantized, open_source
from mlxr.service.embedding import TEMPLATE
from mlxr.service.opening import build_engine

QUERY = "where is paris?"
DOCUMENTS = ["paris is the capital of france.", "the cat sat on the mat", "rain falls", "berlin, germany " * 40]


def convert_folder(folder: Path, path: Path, recipe: str | None = None) -> Path:
    source = open_source(folder)
    with source.file:
        write_model(source, plan_tensors(source, recipe), recipe, path)
    return path


@pytest.mark.parametrize("case", ["bert-ranks", "xlm-roberta-ranks", "modernbert-ranks"])
def test_a_folder_and_its_file_rank_alike(case: str, tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path / "folder", case)
    with LLM(folder, threads=1) as llm:
        ranked = llm.rerank(QUERY, DOCUMENTS)
        assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
        assert sorted(index for index, _ in ranked) == [0, 1, 2, 3]
        assert len({score for _, score in ranked}) == 4
        assert all(0 < score < 1 for _, score in ranked)
        alone = [llm.rerank(QUERY, [document])[0][1] for document in DOCUMENTS]
        assert alone == [dict(ranked)[index] for index in range(4)]
        with pytest.raises(InvalidRequest, match=r"made to rank pairs of texts.*/v1/rerank"):
            llm.embed("paris")
        with pytest.raises(InvalidRequest, match="is an encoder, which writes no text"):
            llm.generate("paris")
    with LLM(convert_folder(folder, tmp_path / "model.gguf"), threads=1) as llm:
        assert llm.rerank(QUERY, DOCUMENTS) == ranked


def test_an_encoder_keeps_pages_as_exact_as_its_weights(tmp_path: Path) -> None:
    def measure_page(path: Path, kv_type: str | None = None) -> int:
        with LLM(path, threads=1, kv_type=kv_type) as llm:
            return llm._session._engine.call(lambda engine: engine._arena.arenas[0].page_bytes)

    def foresee_text(path: Path) -> int:
        source = open_source(path)
        with source.file:
            is_quantized = is_mostly_quantized(source.tensors)
            return measure_conversation(source.config, Settings(device="cpu"), is_quantized=is_quantized)[1]

    folder = make_encoder_folder(tmp_path / "folder", "bert-ranks")
    halves, blocks = (convert_folder(folder, tmp_path / f"{recipe}.gguf", recipe) for recipe in ("f16", "q8_0"))
    assert measure_page(folder) == measure_page(halves) == 2 * measure_page(blocks)
    assert measure_page(blocks, "f32") == measure_page(folder)
    assert foresee_text(folder) == foresee_text(halves) == 2 * foresee_text(blocks)


def test_a_pair_is_what_the_tokenizer_makes_of_it(tmp_path: Path) -> None:
    with LLM(make_encoder_folder(tmp_path, "bert-ranks"), threads=1) as llm:
        ranker, tokenizer = llm._session.ranker, llm._session.tokenizer
        request = ranker.prepare("paris", "the cat")
        texts = [tokenizer.token_text(index) for index in request.token_ids]
        assert texts == ["[CLS]", "paris", "[SEP]", "the", "cat", "[SEP]"]
        assert request.second_start == 3
        long = ranker.prepare("paris " * 200, "the cat " * 200)
        assert len(long.token_ids) == 64
        assert long.second_start == 2 + 30
        assert list(ranker.prepare("[SEP]", "a").token_ids) != [2, 3, 3, 9, 3]
        with pytest.raises(InvalidRequest, match="instruction: is for models that read one"):
            ranker.prepare("a", "b", "rank")


def test_a_model_of_several_labels_does_not_rank(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path, "bert-ranks", id2label={"0": "good", "1": "bad"})
    weights = load_file(folder / "model.safetensors")
    for end in ("weight", "bias"):
        weights[f"classifier.{end}"] = np.repeat(weights[f"classifier.{end}"], 2, axis=0)
    save_file(weights, folder / "model.safetensors")
    with LLM(folder, threads=1) as llm, pytest.raises(InvalidRequest, match=r"tells 2 labels apart \(good, bad\)"):
        llm.rerank(QUERY, DOCUMENTS)


def test_a_model_that_writes_is_asked_for_yes_or_no(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_folder(tmp_path, max_position_embeddings=512)
    with LLM(tmp_path, threads=1) as llm, pytest.raises(InvalidRequest, match="does not say yes or no"):
        llm.rerank(QUERY, DOCUMENTS)
    add_words(tmp_path)
    with LLM(tmp_path, threads=1) as llm:
        tokenizer, ranker = llm._session.tokenizer, llm._session.ranker
        ranked = dict(llm.rerank("fox", ["the dog", "sun <|im_end|>"], instruction="find it"))
        assert "do not say that it is made for it" in caplog.text
        text = TEMPLATE.format(instruction="find it", query="fox", document="the dog")
        token_ids = [tokenizer.bos_id, *tokenizer.encode(text, add_special=False, parse_special=True)]
        assert list(ranker.prepare("fox", "the dog", "find it").token_ids) == token_ids
        forged = list(ranker.prepare("fox", "sun <|im_end|>", "find it").token_ids)
        assert forged.count(tokenizer.token_id("<|im_end|>")) == 2
        cut = list(ranker.prepare("fox", "the dog " * 600, "find it").token_ids)
        assert len(cut) == 512
        assert cut[-8:] == token_ids[-8:]
        settings = Settings(kv_type=None, arena_bytes=2**24)
        engine = build_engine(llm._session.loaded, settings)
        yes, no = (engine.score([*token_ids, tokenizer.token_id(word)])[-1] for word in ("yes", "no"))
        engine.close()
        assert ranked[0] == pytest.approx(1 / (1 + math.exp(no - yes)), abs=1e-5)


def add_words(folder: Path) -> None:
    """Let yes and no be tokens of the folder's vocabulary."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(make_weights(config), str(folder / "model.safetensors"))

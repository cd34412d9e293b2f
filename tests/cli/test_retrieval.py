"""Interrupted vectors of files go on where they were, and files of a folder are found by meaning."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from encoder_folder import WORDS, make_encoder_folder
from safetensors.numpy import save_file

from mlxr import LLM
from mlxr.cli.main import main
from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.service.text_index import TextIndex, VectorStore, split_passages

Run = Callable[..., str]
TEXTS = 2000


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder_folder(tmp_path_factory.mktemp("models") / "encoder", "bert", ("Pooling:mean_tokens",))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "where is ", "document": ""}}')
    return folder


def write_texts(path: Path, count: int) -> list[str]:
    random = np.random.RandomState(3)
    texts = [" ".join(random.choice(WORDS, 40)) + f" {number}" for number in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def count_vectors(path: Path) -> int:
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM vectors").fetchone()[0])
    except sqlite3.Error:
        return 0


def test_weights_and_vectors_of_tokens_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_encoder_folder(tmp_path / "m3", "xlm-roberta", ("Pooling:cls_token",))
    for name, count in (("sparse_linear", 1), ("colbert_linear", 8)):
        parts = {"weight": np.ones((count, 64), "f4"), "bias": np.ones(count, "f4")}
        save_file(parts, folder / f"{name}.safetensors")
    assert main(["embed", str(folder), "rain", "--kind", "sparse"]) == 0
    assert all(weight > 0 for weight in json.loads(capsys.readouterr().out).values())
    assert main(["embed", str(folder), "rain", "--kind", "multi"]) == 0
    assert np.array(json.loads(capsys.readouterr().out)).shape[1] == 8
    assert main(["embed", str(folder), "rain", "--kind", "multi", "--dimensions", "4"]) == 2
    assert "multi goes without --out, --url, --dimensions" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_what_is_interrupted_or_killed_computes_nothing_twice(encoder: Path, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", TEXTS)
    out, part = tmp_path / "vectors.npy", tmp_path / "vectors.npy.partial"
    command = [sys.executable, "-m", "mlxr", "embed", str(encoder), str(tmp_path / "texts.jsonl"), "--out", str(out)]
    command += ["--threads", "1"]
    kept = 0
    with LLM(encoder, threads=1) as llm, VectorStore(part, "another") as other:
        other.fill(["of", "other files"], lambda others: map(np.array, llm.embed(others)))
        assert (other.count(["of", "of", "the cat"]), other.count([])) == (1, 0)
        other.delete()
    for ending in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            while count_vectors(part) < kept + 100:
                assert process.poll() is None, process.stderr.read() if process.stderr else None
                time.sleep(0.002)
            process.send_signal(ending)
            _, notes = process.communicate(timeout=60)
        assert not out.exists()
        before, kept = kept, count_vectors(part)
        told = f"interrupted: {kept} of {TEXTS} vectors are kept; the same command goes on from there"
        assert (told in notes.decode()) == (ending == signal.SIGINT)
        assert before + 100 <= kept < TEXTS
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{TEXTS} texts: {TEXTS - kept} vectors computed, {kept} were there" in done.stderr
    assert not list(tmp_path.glob("*.partial*"))
    vectors = np.load(out)
    names = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert [name["line"] for name in names] == list(range(1, TEXTS + 1))
    with LLM(encoder, threads=1) as llm:
        some = [0, kept - 1, kept, TEXTS - 1]
        assert vectors[some].tolist() == llm.embed([texts[index] for index in some])


def test_vectors_of_files(encoder: Path, tmp_path: Path, mlxr: Run, refused: Run) -> None:
    (tmp_path / "a.txt").write_text("the cat\nsat on mat")
    write_texts(tmp_path / "b.jsonl", 3)
    out = tmp_path / "vectors.npy"
    files = (tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "a.txt")
    mlxr("embed", encoder, *files, "--out", out, "--dimensions", 16, "--input-type", "document")
    vectors = np.load(out)
    assert vectors.shape == (5, 16)
    assert vectors.dtype == np.float32
    assert vectors[0].tolist() == vectors[4].tolist()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    asked = json.loads(mlxr("embed", encoder, "paris", "--input-type", "query"))
    assert asked == json.loads(mlxr("embed", encoder, "where is paris"))
    (tmp_path / "c.jsonl").write_text('{"words": 1}\n')
    assert "c.jsonl:1 must be a text" in refused("embed", encoder, tmp_path / "c.jsonl", "--out", out)
    assert "must end in .npy or .parquet" in refused("embed", encoder, files[0], "--out", tmp_path / "a.csv")
    assert "TEXT: text 1: " in refused("embed", encoder, "the cat", "cat " * 99)
    with VectorStore(tmp_path / "vectors.npy.partial", "another"):
        pass
    assert "another model, prompt or version" in refused("embed", encoder, files[0], "--out", out)


def test_parquet_has_names_and_vectors(encoder: Path, tmp_path: Path, mlxr: Run, refused: Run) -> None:
    (tmp_path / "a.txt").write_text("the cat")
    out = tmp_path / "vectors.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        assert "needs pyarrow" in refused("embed", encoder, tmp_path / "a.txt", "--out", out)
        return
    mlxr("embed", encoder, tmp_path / "a.txt", "--out", out)
    rows = importlib.import_module("pyarrow.parquet").read_table(out).to_pylist()
    assert rows == [
        {"file": str(tmp_path / "a.txt"), "line": 1, "text": "the cat", "vector": pytest.approx(rows[0]["vector"])}
    ]


def test_a_folder_is_searched_and_only_what_changed_is_read(
    encoder: Path,
    tmp_path: Path,
    mlxr: Run,
    refused: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / ".hidden").mkdir()
    (notes / ".hidden" / "a.md").write_text("paris")
    (notes / "cities.md").write_text("# berlin\n\nberlin germany\n\n# paris\n\nparis is the capital of france\n")
    (notes / "deep" / "cat.txt").write_text("the cat sat on the mat\n")
    (notes / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert "--model: is missing" in refused("find", notes, "paris")

    def find(*more: object) -> tuple[list[dict[str, object]], str]:
        main(["find", str(notes), "paris", "--json", *map(str, more)])
        output = capsys.readouterr()
        return json.loads(output.out)["results"], output.err

    found, told = find("--model", encoder)
    assert "3 files read, 0 gone, 3 passages computed" in told
    assert "not read: bytes.txt" in told
    assert {(row["path"], row["line"]) for row in found} == {("cities.md", 1), ("cities.md", 5), ("deep/cat.txt", 1)}
    with LLM(encoder, threads=1) as llm:
        one, other = llm.embed([str(found[0]["text"])], input_type="document") + llm.embed("where is paris")
    assert found[0]["score"] == pytest.approx(np.dot(one, other), abs=1e-5)
    again, told = find()
    assert again == found
    assert "read" not in told
    (notes / "deep" / "cat.txt").unlink()
    (notes / "new.md").write_text("paris is the capital of france\n\nrain falls\n")
    found, told = find("--top", 1)
    assert "1 files read, 1 gone, 1 passages computed" in told
    assert len(found) == 1
    ranker = make_encoder_folder(tmp_path / "ranks", "bert-ranks")
    ranked, _ = find("--reranker", ranker)
    assert sorted(float(str(row["score"])) for row in ranked) == [float(str(row["score"])) for row in reversed(ranked)]
    assert "cities.md:" in mlxr("find", notes, "paris")
    read_end, write_end = os.pipe()
    os.write(write_end, b"paris\n\nrain\n")
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        monkeypatch.setattr("sys.stdin", lines)
        main(["find", str(notes), "--json", "--top", "1"])
    answered = capsys.readouterr().out
    parts = [json.loads(part)["results"] for part in answered.replace("}\n{", "}\0{").split("\0")]
    assert [len(part) for part in parts] == [1, 1]
    assert parts[0] == find("--top", 1)[0]


def test_passages_keep_paragraphs_and_their_lines() -> None:
    text = "# A\n\none two\n\nthree\n# B\nfour " + "five six seven. " * 20
    passages = list(split_passages(text, 60))
    assert passages[0] == (1, "# A\n\none two\n\nthree")
    assert passages[1][0] == 6
    assert all(0 < len(passage) <= 60 for _, passage in passages)
    assert "".join("".join(passage.split()) for _, passage in passages) == "".join(text.split())
    long = list(split_passages("x" * 1000, 60))
    assert "".join(passage for _, passage in long) == "x" * 1000


def test_an_index_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"no database at all" * 100)
    with pytest.raises(MlxrError, match=r"index: cannot be used as a file of vectors: .*delete it"):
        TextIndex(tmp_path / "index", "a")
    with TextIndex(tmp_path / "good", "a") as index:
        assert index.find(np.ones(3, np.float32)) == []
        index.update(tmp_path, lambda texts: [np.ones(3, np.float32) for _ in texts])
        (tmp_path / "a.md").write_text("words")
        index.update(tmp_path, lambda texts: [np.ones(3, np.float32) for _ in texts])
        with pytest.raises(InvalidRequest, match="has 2 numbers, and this index 3"):
            index.find(np.ones(2, np.float32))

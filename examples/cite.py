"""Answer a question from text files and name the passages behind the answer: `python cite.py [FOLDER QUESTION]`.

Takes an embedding model and one that writes; here both are the small model that ships with mlxr.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlxr import LLM, SamplingParams
from mlxr.service.text_index import TextIndex

EMBEDDER, WRITER = "demo", "demo"
POOLING = "mean"  # needed because this embedder's files set none; else leave it out
NOTES = {
    "paths.md": "# os.path.join\n\nIt joins parts of a path with the separator of the system.",
    "json.md": "# json.dumps\n\nIt writes a Python object as JSON text.",
}


def answer(folder: Path, question: str) -> None:
    """Print the answer and the passages."""
    with LLM(EMBEDDER) as llm, TextIndex(folder / "index.sqlite", EMBEDDER) as index:

        def embed(texts: Sequence[str], kind: str = "document") -> list[NDArray[np.float32]]:
            vectors = llm.embed(texts, input_type=kind, pooling=POOLING, truncate=True)
            return [np.array(vector, np.float32) for vector in vectors]

        index.update(folder, embed)
        passages = index.find(embed([question], "query")[0], count=2)
    quoted = "\n\n".join(f"[{number}] {passage.text}" for number, passage in enumerate(passages, 1))
    asked = f"{quoted}\n\nAnswer from these passages and name their numbers: {question}"
    with LLM(WRITER) as llm:
        print(llm.chat([{"role": "user", "content": asked}], SamplingParams(max_tokens=100)).text)
    for number, passage in enumerate(passages, 1):
        print(f"[{number}] {passage.path}:{passage.line} ({passage.score:.2f})")


if len(sys.argv) > 2:
    answer(Path(sys.argv[1]), sys.argv[2])
else:
    with tempfile.TemporaryDirectory() as place:
        for name, text in NOTES.items():
            (Path(place) / name).write_text(text)
        answer(Path(place), "What does os.path.join do?")

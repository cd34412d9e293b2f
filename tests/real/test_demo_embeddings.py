"""Embeddings of the demo model: the same bits alone, among answers and other texts, and in chunks of any size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest

from mlxr.core.settings import resolve
from mlxr.core.types import SamplingParams
from mlxr.engine.request import EngineRequest, Pooling
from mlxr.engine.runner import Floats
from mlxr.loading import LoadedModel
from mlxr.service.opening import build_engine, open_model

TEXTS = ["os.path.join joins paths.", "x", "A list is a mutable sequence, " * 20, "def f(a, b):\n    return a + b\n"]


def embed(loaded: LoadedModel, texts: Sequence[str], pooling: Pooling, chunk_tokens: int, answers: int) -> list[Floats]:
    settings = resolve({"context_tokens": 512, "prefill_chunk_tokens": chunk_tokens, "max_batch_tokens": 128})
    with closing(build_engine(loaded, settings)) as engine:
        for number in range(answers):
            engine.submit(EngineRequest([5 + number] * 9, SamplingParams(max_tokens=20, ignore_eos=True)))
        ids = [engine.submit(EngineRequest(loaded.tokenizer.encode(text), pooling=pooling)) for text in texts]
        found = {}
        while engine.has_work:
            found |= {event.sequence_id: event.embedding for event in engine.step() if event.embedding is not None}
            engine.check()
    return [found[request_id] for request_id in ids]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.slow
def test_embeddings_do_not_depend_on_the_batch(pooling: Pooling) -> None:
    with open_model("demo", resolve({})) as loaded:
        alone = [embed(loaded, [text], pooling, 512, answers=0)[0] for text in TEXTS]
        assert all(vector.shape == (loaded.config.hidden,) and np.isfinite(vector).all() for vector in alone)
        assert len({vector.tobytes() for vector in alone}) == len(TEXTS)
        for chunk_tokens, answers in ((512, 0), (7, 3), (32, 1)):
            together = embed(loaded, TEXTS, pooling, chunk_tokens, answers)
            for vector, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(vector, expected)

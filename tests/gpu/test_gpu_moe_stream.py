"""Experts of one token, whose weights are streamed, against the reference."""

from __future__ import annotations

import pytest
from amounts import choose_each
from gpu_cases import STREAMED, note_launches
from moe_cases import compare

from mlxr.kernels.context import Context

STREAM_CLOSE, CLOSE = 1e-3, 2e-2  # x in 16 bits, in bf16


@pytest.fixture
def streaming(sanitized: Context, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A device of three multiprocessors with the memory of an H200's."""
    for name, value in {"has_tiles": True, "processors": 3, "room_bytes": 227 * 1024}.items():
        monkeypatch.setattr(sanitized.gpu, name, value)
    return sanitized


@pytest.mark.smoke
@pytest.mark.parametrize(("type_name", "shape"), choose_each(STREAMED, [(512, 768), (768, 512)]), ids=str)
def test_one_token_is_streamed(
    streaming: Context, type_name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = note_launches(streaming, monkeypatch)
    assert compare(streaming, 1, 3, 5, type_name, shape) < STREAM_CLOSE
    assert launched[:2] == ["moe_stream", "moe_stream"]


@pytest.mark.parametrize(
    ("named", "used"),
    choose_each(
        [{"biased": True}, {"gated": False, "biased": True}, {"activation": "clamped_swiglu", "biased": True}],
        [1, 2, 3],
    ),
    ids=str,
)
def test_streams_with_biases_and_gates(streaming: Context, named: dict[str, object], used: int) -> None:
    assert compare(streaming, 1, used, 6, "mxfp4", (288, 352), **named) < STREAM_CLOSE


def test_what_of_experts_is_not_streamed(streaming: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launches(streaming, monkeypatch)
    for tokens, types in [(2, "q4_k"), (1, "q2_k"), (1, "bf16")]:
        assert compare(streaming, tokens, 2, 4, types, (512, 512)) < CLOSE
    monkeypatch.setattr(streaming.gpu, "processors", 1)  # whose threadgroup would have tiles of all ranks
    assert compare(streaming, 1, 3, 4, "q4_k", (512, 512)) < CLOSE
    assert "moe_stream" not in launched

"""A stream that is begun again continues where the first one broke off, frame by frame."""

from __future__ import annotations

import pytest

from mlxr.cluster.replica import Continuation, FrameReader, separator_of
from mlxr.core.errors import RequestFailed
from mlxr.server.streaming import DONE, KEEP_ALIVE, ndjson, sse


def chunk(text: str, answer: int = 0, **more: object) -> bytes:
    return sse({"choices": [{"index": answer, "delta": {"content": text}}], **more})


WHOLE = [chunk("a"), chunk("b"), chunk("b"), chunk("c", timings={"ms": 1}), DONE]


@pytest.mark.parametrize("passed", range(len(WHOLE) + 1))
def test_what_was_passed_on_is_not_passed_again(passed: int) -> None:
    progress, got = Continuation(), []
    for tried, count in ((0, passed), (1, len(WHOLE))):
        progress.begin()
        frames = [chunk("c", timings={"ms": 2}) if tried and "timings" in str(frame) else frame for frame in WHOLE]
        got += [frame for frame in frames[:count] if progress.take(frame)]
    assert [frame for frame in got if b"timings" not in frame] == [frame for frame in WHOLE if b"timings" not in frame]
    assert len(got) == len(WHOLE)


def test_an_answer_that_differs_ends_in_an_error() -> None:
    progress = Continuation()
    progress.begin()
    assert progress.take(chunk("a"))
    progress.begin()
    with pytest.raises(RequestFailed, match="another answer"):
        progress.take(chunk("z"))


def test_answers_of_one_stream_may_come_in_another_order() -> None:
    progress = Continuation()
    progress.begin()
    for frame in (chunk("a", 0), chunk("x", 1), chunk("b", 0)):
        assert progress.take(frame)
    progress.begin()
    taken = [progress.take(frame) for frame in (chunk("a", 0), chunk("b", 0), chunk("c", 0), chunk("x", 1))]
    assert taken == [False, False, True, False]


def test_comments_and_progress_are_no_part_of_the_answer() -> None:
    progress, told = Continuation(), chunk("", prompt_progress={"total": 2, "processed": 1})
    progress.begin()
    assert progress.take(KEEP_ALIVE)
    assert progress.take(told)
    assert progress.take(chunk("a"))
    progress.begin()
    assert progress.take(KEEP_ALIVE)
    assert not progress.take(told)
    assert not progress.take(chunk("a"))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_frames_are_cut_wherever_bytes_are(size: int) -> None:
    lines = [ndjson({"a": 1})] * 2
    for frames, media_type in ((WHOLE, "text/event-stream; charset=utf-8"), (lines, "application/x-ndjson")):
        separator = separator_of(media_type)
        assert separator is not None
        reader, data = FrameReader(separator), b"".join(frames)
        read = [frame for at in range(0, len(data), size) for frame in reader.push(data[at : at + size])]
        assert read == frames
        assert reader.take_rest() == b""
    assert separator_of("application/json") is None

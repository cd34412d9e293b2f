"""Texts that DRY stops at, as sequences of tokens; and `min_tokens` of text."""

from __future__ import annotations

from fake_engine import EOS, FIRST_PIECE, FakeEngine, PieceTokenizer, make_session, script_text

from mlxr.core.types import SamplingParams
from mlxr.service.preparation import BreakerFinder


def byte(character: str) -> int:
    return FIRST_PIECE + ord(character)


def test_a_breaker_stands_in_a_token_or_goes_over_several() -> None:
    tokenizer = PieceTokenizer()
    inside, begins, also = (tokenizer.token_of(piece) for piece in (b" ab:c", b"xa", b"yab"))
    finder = BreakerFinder(tokenizer, 4096)
    assert finder.find(["ab:"]) == {
        (inside,),
        (byte("a"), byte("b"), byte(":")),
        (begins, byte("b"), byte(":")),
        (also, byte(":")),
    }
    assert finder.find([":"]) == {(inside,), (byte(":"),)}
    assert finder.find([":", "ab:"]) == finder.find([":"]) | finder.find(["ab:"])
    assert finder.find([]) == frozenset()
    assert all(len(sequence) <= 21 for sequence in finder.find(["x" * 1000]))


def test_the_engine_gets_sequences_where_dry_is_on() -> None:
    for multiplier, expected in ((0.0, frozenset()), (0.8, {(byte(":"),), (byte("*"),)})):
        engine = FakeEngine(lambda prompt: [EOS])
        params = SamplingParams(dry_multiplier=multiplier, dry_sequence_breakers=(":", "*"))
        list(make_session(engine).stream([byte("a")], params))
        assert engine.submitted[0].dry_breaker_ids == expected


def test_no_stop_string_before_min_tokens() -> None:
    tokenizer = PieceTokenizer()
    script = script_text(tokenizer, [b"a", b"END", b"b", b"END", b"c"])
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "aENDb"), (4, "aENDbENDc")):
        session = make_session(FakeEngine(lambda prompt: script), tokenizer)
        params = SamplingParams(stop=("END",), min_tokens=min_tokens)
        events = session.stream([byte("a")], params)
        assert "".join(getattr(event, "text", "") for event in events) == text

"""An engine that follows a script, and a tokenizer of arbitrary pieces: the seams around a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxr.core.errors import InvalidRequest, QueueFull
from mlxr.core.types import FinishReason, SamplingParams, TokenLogprob, Usage
from mlxr.engine.engine_thread import EngineThread
from mlxr.engine.request import EngineRequest
from mlxr.engine.sequence import TokenEvent
from mlxr.service.preparation import Preparation
from mlxr.service.requests import ChatRequest, Message, TextRequest
from mlxr.service.streams import Completion, Stream, fold_events, open_streams

BOS, EOS, STOP_MARK, USER = range(4)
SPECIALS = {BOS: "<s>", EOS: "</s>", STOP_MARK: "<|stop|>", USER: "<|user|>"}
FIRST_PIECE = len(SPECIALS)


class PieceTokenizer:
    """Every piece of bytes becomes a token the first time it is seen; `encode` makes one token per byte."""

    bos_id: int | None = BOS
    eos_ids = frozenset({EOS})
    pad_id = None
    add_bos = True
    add_eos = False
    strips_leading_space = False

    def __init__(self, *, add_bos: bool = True) -> None:
        self.pieces: list[bytes] = [bytes([value]) for value in range(256)]
        self.add_bos = add_bos
        if not add_bos:
            self.bos_id = None

    @property
    def vocab_size(self) -> int:
        return FIRST_PIECE + len(self.pieces)

    def token_of(self, piece: bytes) -> int:
        if piece not in self.pieces:
            self.pieces.append(piece)
        return FIRST_PIECE + self.pieces.index(piece)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = [BOS] if add_special and self.add_bos else []
        while text:
            special = next((i for i, name in SPECIALS.items() if parse_special and text.startswith(name)), None)
            if special is None:
                ids += [FIRST_PIECE + byte for byte in text[0].encode()]
                text = text[1:]
            else:
                ids.append(special)
                text = text.removeprefix(SPECIALS[special])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        kept = [token_id for token_id in ids if not (skip_special and self.is_special(token_id))]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIALS[token_id].encode() if token_id in SPECIALS else self.pieces[token_id - FIRST_PIECE]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, text: str) -> int | None:
        return next((token_id for token_id, name in SPECIALS.items() if name == text), None)

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIALS


@dataclass
class _Running:
    prompt: list[int]
    params: SamplingParams
    script: list[int]
    generated: list[int] = field(default_factory=list)


class FakeEngine:
    """Answers every prompt with `script(prompt)`, one token of each request per step, as the real engine reports them.

    `on_step` is called before each step with its number, and may raise.
    """

    cache = None

    def __init__(
        self, script: Callable[[list[int]], Sequence[int]], on_step: Callable[[int], None] | None = None
    ) -> None:
        self.script = script
        self.on_step = on_step or (lambda number: None)
        self.running: dict[tuple[int, int], _Running] = {}
        self.cancelled: list[int] = []
        self.submitted: list[EngineRequest] = []
        self.steps = 0
        self.closed = False
        self.max_running, self.context_tokens = 1000, 4096

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def submit(self, request: EngineRequest) -> int:
        token_ids, params = request.token_ids, request.params
        if len(token_ids) > 1000:
            raise InvalidRequest("prompt", "is too long")
        if len(self.running) >= self.max_running:
            raise QueueFull(len(self.running), self.max_running, 1.0)
        self.submitted.append(request)
        sequence_id = len(self.submitted)
        script = list(self.script(list(token_ids)))
        for index in range(params.n):  # answer i leaves out the first i tokens
            self.running[sequence_id, index] = _Running(list(token_ids), params, script[index:])
        return sequence_id

    def step(self) -> list[TokenEvent]:
        self.steps += 1
        self.on_step(self.steps)
        return [self._advance(key, self.running[key]) for key in list(self.running)]

    def cancel(self, sequence_id: int, index: int | None = None) -> list[TokenEvent]:
        ended = [key for key in self.running if key[0] == sequence_id and index in (None, key[1])]
        for key in ended:
            del self.running[key]
        if ended:
            self.cancelled.append(sequence_id)
        return [
            TokenEvent(sequence_id, None, Usage(0, 0), finish_reason=FinishReason.CANCELLED, index=key[1])
            for key in ended
        ]

    def close(self) -> None:
        self.closed = True

    def stats(self) -> str:
        return "stats"

    def _advance(self, key: tuple[int, int], state: _Running) -> TokenEvent:
        token_id = state.script[len(state.generated)]
        state.generated.append(token_id)
        reason = None
        stop_ids = state.params.stop_token_ids | (frozenset() if state.params.ignore_eos else {EOS})
        if token_id in stop_ids:
            reason = FinishReason.STOP
        elif len(state.generated) in (state.params.max_tokens, len(state.script)):
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[key]
        wants_logprobs = state.params.logprobs is not None
        return TokenEvent(
            key[0],
            token_id,
            Usage(len(state.prompt), len(state.generated), cached_tokens=1),
            logprob=-float(token_id) if wants_logprobs else None,
            top=(TokenLogprob(token_id, -float(token_id)),) * (state.params.logprobs or 0),
            finish_reason=reason,
            index=key[1],
        )


class UserTemplate:
    """A chat template in one line; writes BOS itself when told to."""

    source = "{{ messages }} system"
    tool_source = None
    variables = frozenset({"messages"})

    def __init__(self, *, writes_bos: bool = False) -> None:
        self.prefix = SPECIALS[BOS] if writes_bos else ""

    def render(
        self,
        messages: Sequence[dict[str, str]],
        *,
        tools: object = None,
        extra: object = None,
        add_generation_prompt: bool = True,
    ) -> str:
        return self.prefix + "".join(f"{SPECIALS[USER]}{message['content']}" for message in messages)


class FakeSession:
    """A `Session` over the fakes, for programs that wait."""

    def __init__(self, engine: FakeEngine, tokenizer: PieceTokenizer, template: UserTemplate | None) -> None:
        self.engine = EngineThread(engine)  # type: ignore[arg-type]
        self.preparation = Preparation(
            tokenizer,  # type: ignore[arg-type]
            template,  # type: ignore[arg-type]
            vocab_size=4096,
            context_tokens=engine.context_tokens,
            model_name="fake",
        )

    @property
    def can_chat(self) -> bool:
        return self.preparation.can_chat

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        return self.preparation.encode_prompt(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.preparation.encode_chat(ChatRequest(messages, SamplingParams()))

    def open(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, waits_for_room: bool = False
    ) -> list[Stream]:
        prepared = [self.preparation.prepare(TextRequest(prompt, params)) for prompt in prompts]
        return open_streams(self.engine, prepared, waits_for_room=waits_for_room)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        return self.open([prompt], params)[0]

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        return [fold_events(stream.wait()) for stream in self.open(prompts, params, waits_for_room=True)]

    def stats(self) -> object:
        return self.engine.call(lambda engine: engine.stats())

    def close(self) -> None:
        self.engine.close()


def make_session(
    engine: FakeEngine, tokenizer: PieceTokenizer | None = None, template: UserTemplate | None = None
) -> FakeSession:
    return FakeSession(engine, tokenizer or PieceTokenizer(), template)


def script_text(tokenizer: PieceTokenizer, pieces: Sequence[bytes | int]) -> list[int]:
    """Token ids of pieces; numbers are token ids already."""
    return [piece if isinstance(piece, int) else tokenizer.token_of(piece) for piece in pieces]

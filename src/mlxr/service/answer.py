"""One growing answer: the engine's tokens in, text events out.

Knows the tokenizer's detokenizer and stop strings; not the engine, nor other answers. Each token event gives zero or
more events; the last one of an answer is a Finish.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.core.events import Event, Finish, TextDelta, TokenInfo
from mlxr.core.types import FinishReason, SamplingParams, TokenLogprob, Usage
from mlxr.engine.sequence import TokenEvent
from mlxr.service.stops import StopScanner
from mlxr.tokenizers import Detokenizer


class Answer:
    """State of one answer between two steps."""

    def __init__(
        self,
        decoder: Detokenizer,
        params: SamplingParams,
        prompt_tokens: int,
        stop_tokens: Mapping[int, str],
        index: int = 0,
    ) -> None:
        self._index = index
        self._decoder = decoder
        self._stops = StopScanner(params.stop)
        self._stop_tokens = stop_tokens  # stop strings that are special tokens: they never show up as text
        self._wants_logprobs = params.logprobs is not None
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._pending_ids: list[int] = []
        self._pending_tokens: list[TokenInfo] = []
        self.finished = False

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def push(self, event: TokenEvent) -> list[Event]:
        """Events that follow from one token event. After a Finish the caller pushes nothing more."""
        text = self._take_token(event)
        sure, stop = self._stops.push(text)
        if stop is None and event.finish_reason is not None:
            tail, stop = self._stops.push(self._decoder.flush())
            sure += tail if stop is not None else tail + self._stops.flush()
        if stop is not None:
            return self._finish(sure, FinishReason.STOP, stop=stop)
        if event.finish_reason is not None:
            return self._finish(sure, event.finish_reason, stop=self._name_stop_token(event), error=event.error)
        return [self._take_delta(sure)] if sure else []

    def abort(self, reason: FinishReason, error: str | None = None) -> list[Event]:
        """End the answer from outside (cancelled, or the engine failed); text held back is given out."""
        tail, stop = self._stops.push(self._decoder.flush())
        return self._finish(tail if stop is not None else tail + self._stops.flush(), reason, error=error)

    def _take_token(self, event: TokenEvent) -> str:
        """Count the event's token; returns its text. A token that ends the answer has none."""
        self._cached_tokens = event.usage.cached_tokens
        if event.token_id is None:
            return ""
        self._completion_tokens += 1
        self._pending_ids.append(event.token_id)
        if self._wants_logprobs and event.logprob is not None:
            self._pending_tokens.append(TokenInfo(TokenLogprob(event.token_id, event.logprob), tuple(event.top)))
        return "" if event.finish_reason is FinishReason.STOP else self._decoder.push(event.token_id)

    def _name_stop_token(self, event: TokenEvent) -> str | None:
        if event.finish_reason is not FinishReason.STOP or event.token_id is None:
            return None
        return self._stop_tokens.get(event.token_id)

    def _take_delta(self, text: str) -> TextDelta:
        delta = TextDelta(text, tuple(self._pending_ids), tuple(self._pending_tokens), self._index)
        self._pending_ids.clear()
        self._pending_tokens.clear()
        return delta

    def _finish(
        self, text: str, reason: FinishReason, *, stop: str | None = None, error: str | None = None
    ) -> list[Event]:
        self.finished = True
        finish = Finish(reason, self.usage, error, stop, self._index)
        return [self._take_delta(text), finish] if text or self._pending_ids else [finish]

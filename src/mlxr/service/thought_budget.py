"""Bounds a model's thoughts: when the budget is used up, a message closes the thought and the answer goes on.

`ThoughtBudget` is a constraint, alone or around that of a grammar. It reads the answer's tokens as text, counts those
inside a thought, and when the thought is due to end allows only the tokens of the message and of the closing tag, one
after another. Until then every token is free, so an answer that thinks less is the same as without a budget. The
allowed tokens depend only on the answer's tokens and on how many may still come, unless `ThoughtEnd.end` is called
while the answer grows.

The rest of `max_tokens`, or of the context, may be less than the budget. Then a thought ends early enough to leave a
quarter of all tokens of the answer for the text behind it, unless the answer may have very few tokens. If there is no
room for the message, the closing tag comes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from mlxr.core.frozen import frozen
from mlxr.core.model_settings import THINKING_MESSAGE, ModelSettings
from mlxr.engine.request import FREE_TOKENS, Mask, TokenConstraint
from mlxr.service.reasoning import Tags, hold_back, list_open_ids
from mlxr.tokenizers import Tokenizer

ANSWER_SHARE = 4  # a quarter of an answer's tokens stays for the text behind the thought
LEAST_TOKENS = 16  # a thought may take all of an answer with fewer tokens
MOST_PARTS = 4  # bytes of one character; a thought is never cut within one


@frozen
class Thinking:
    """The settings for thoughts: their most tokens (None: any number), and the message when these are used up."""

    budget_tokens: int | None = None
    message: str = THINKING_MESSAGE

    @classmethod
    def read(cls, settings: ModelSettings) -> Thinking:
        """Read them from the settings of a model."""
        return cls(settings.thinking_budget_tokens, settings.thinking_message)


class ThoughtEnd:
    """Ends the thoughts of all answers to one request from outside, at their next tokens. Any thread may call it."""

    __slots__ = ("is_wanted",)

    def __init__(self) -> None:
        self.is_wanted = False

    def end(self) -> None:
        """Let the model answer now."""
        self.is_wanted = True


@frozen
class ThoughtTokens:
    """The tokens of one vocabulary that budgets need; made once for a model and a message.

    `message_ids` come before `close_ids`. If thoughts are messages that may follow one another, `banned_id` is the
    token that turns a message into a thought once its header reads `header`.
    """

    tokenizer: Tokenizer
    tags: Tags
    message_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    all_tokens: Mask
    header: bytes = b""
    banned_id: int | None = None


def collect_thought_tokens(tokenizer: Tokenizer, tags: Tags, message: str, vocab_size: int) -> ThoughtTokens:
    """Read tags and message as tokens. The message gets its own line and is cut at a closing tag."""
    message = message.partition(tags.close)[0]
    said = f"\n\n{message}\n" if message else ""
    every = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    every[:vocab_size] = 1
    open_ids = list_open_ids(tokenizer, tags) if tags.follow else ()
    return ThoughtTokens(
        tokenizer,
        tags,
        tuple(tokenizer.encode(said, add_special=False, parse_special=False)) if said else (),
        _encode_tag(tokenizer, tags.close + tags.follow),
        np.packbits(every, bitorder="little").view("<u4").astype(np.uint32),
        tokenizer.token_bytes(open_ids[0]) if open_ids else b"",
        open_ids[1] if open_ids else None,
    )


def _encode_tag(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return a tag as tokens: its own token, or else its parts, control tokens among them."""
    token_id = tokenizer.token_id(text)
    return (token_id,) if token_id is not None else tuple(tokenizer.encode(text, add_special=False, parse_special=True))


class _Place(Enum):
    OUTSIDE = auto()  # a thought may begin
    LABEL = auto()  # behind the opening tag; a label there is no part of the thought
    INSIDE = auto()
    ANSWER = auto()  # no further thought can begin


class ThoughtBudget:
    """Allows at most `budget_tokens` of thought in one answer (None: any number), or fewer if `end` asks for it.

    `inner` is a further constraint on the tokens. `is_thinking` says that the prompt ends inside a thought.
    """

    def __init__(
        self,
        tokens: ThoughtTokens,
        budget_tokens: int | None,
        end: ThoughtEnd,
        inner: TokenConstraint | None = None,
        *,
        is_thinking: bool,
    ) -> None:
        self._tokens, self._budget, self._end, self._inner = tokens, budget_tokens, end, inner
        self._place = _Place.INSIDE if is_thinking else _Place.OUTSIDE
        self._held = b""  # text that may be the beginning of a tag, or of a character
        self._thought_tokens = 0
        self._forced: tuple[int, ...] = ()  # the rest of the closing tokens
        self._waited_tokens = 0  # for the rest of a character
        self._is_wanted = False  # the end was asked for from outside
        self._most: int | None = None  # tokens that the answer may have
        self._left: int | None = None

    @property
    def needs_end(self) -> bool:
        """True if a grammar ends the answer with an end token."""
        return self._inner is not None and self._inner.needs_end

    def count_free(self) -> int:
        """Return the number of next tokens that are free; FREE_TOKENS once nothing is bounded any more."""
        # Read only here, so that `fill_mask` and `accept` of a token follow the same rules.
        self._is_wanted = self._end.is_wanted
        return 0 if self._inner is not None else self._count_free()

    def fill_mask(self, mask: Mask) -> None:
        """Write which tokens may come next: one while a thought is being closed, else what the grammar allows."""
        forced = self._list_forced()
        if forced:
            mask[forced[0] // 32] |= np.uint32(1 << forced[0] % 32)
            return
        if self._inner is None:
            mask |= self._tokens.all_tokens
        else:
            self._inner.fill_mask(mask)
        banned_id = self._find_banned()
        if banned_id is not None:
            mask[banned_id // 32] &= ~np.uint32(1 << banned_id % 32)

    def accept(self, token_id: int) -> None:
        """Go on after the sampled token."""
        forced = self._list_forced()
        if self._inner is not None:
            self._inner.accept(token_id)
        self._read(token_id, forced)

    def look_ahead(self, tokens_left: int) -> int:
        """Return the number of newest tokens that the grammar may take back; the first call has the answer's limit."""
        self._left = tokens_left
        if self._most is None:
            self._most = tokens_left
        return 0 if self._inner is None else self._inner.look_ahead(tokens_left)

    def close(self) -> Sequence[int]:
        """Return the tokens with which the grammar ends the answer."""
        return () if self._inner is None else self._inner.close()

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the number of these tokens that may come next, one after another; changes nothing."""
        allowed = len(token_ids) if self._inner is None else self._inner.count_allowed(token_ids)
        if self._count_free() >= allowed:
            return allowed
        probe = self._copy(None)
        for place, token_id in enumerate(token_ids[:allowed]):
            forced = probe._list_forced()
            if forced[:1] not in ((), (token_id,)) or token_id == probe._find_banned():
                return place
            probe._read(token_id, forced)
        return allowed

    def fork(self) -> ThoughtBudget:
        """Return an independent copy in the same state; both share `ThoughtEnd`."""
        return self._copy(None if self._inner is None else self._inner.fork())

    def _copy(self, inner: TokenConstraint | None) -> ThoughtBudget:
        other = ThoughtBudget(self._tokens, self._budget, self._end, inner, is_thinking=False)
        other._place, other._held, other._forced = self._place, self._held, self._forced
        other._thought_tokens, other._waited_tokens = self._thought_tokens, self._waited_tokens
        other._most, other._left, other._is_wanted = self._most, self._left, self._is_wanted
        return other

    @property
    def _is_spent(self) -> bool:
        """True if no further thought may begin."""
        return self._is_wanted or (self._budget is not None and self._thought_tokens >= self._budget)

    @property
    def _answer_tokens(self) -> int:
        """The number of tokens that stay for the text behind the thought."""
        return 0 if self._most is None or self._most < LEAST_TOKENS else self._most // ANSWER_SHARE

    @property
    def _ending(self) -> tuple[int, ...]:
        """The tokens that close the thought, with the message if the thought is not empty and there is room."""
        close_ids = self._tokens.close_ids
        whole = (*self._tokens.message_ids, *close_ids)
        fits = self._left is None or self._left - len(whole) >= self._answer_tokens
        return whole if fits and self._thought_tokens else close_ids

    def _count_room(self) -> int:
        """Return the number of tokens of thought that still leave room for an answer; unlimited without a budget.

        Room is kept for the message, too, if it takes no more than the answer.
        """
        if self._budget is None or self._left is None or not self._answer_tokens:
            return FREE_TOKENS - 1
        message_tokens, answer_tokens = len(self._tokens.message_ids), self._answer_tokens
        said_tokens = message_tokens if message_tokens <= answer_tokens else 0
        return self._left - len(self._tokens.close_ids) - said_tokens - answer_tokens

    def _count_free(self) -> int:
        if self._place is _Place.ANSWER:
            return FREE_TOKENS
        if self._forced:
            return 0
        room = self._count_room()
        if self._budget is not None:
            room = min(room, self._budget - self._thought_tokens)
        if self._place is _Place.INSIDE:
            return 0 if self._is_wanted else max(0, room)
        if self._tokens.banned_id is not None and self._is_spent:
            return int(self._find_banned() is None)
        return max(1, room)  # a thought has to be opened before it can be closed

    def _list_forced(self) -> tuple[int, ...]:
        """Return the tokens that must come now; none if the next one is free."""
        if self._forced or self._place is not _Place.INSIDE or self._count_free():
            return self._forced
        if self._waited_tokens < MOST_PARTS - 1 and _ends_in_character(self._held):
            return ()
        begun = hold_back(self._held.decode("utf-8", "replace"), self._tokens.tags.close)
        if begun > 1 and len(self._tokens.close_ids) > 1 and not self._tokens.tags.follow:
            rest = self._tokens.tags.close[begun:]  # the model has begun to close the thought by itself
            return tuple(self._tokens.tokenizer.encode(rest, add_special=False, parse_special=False))
        return self._ending

    def _find_banned(self) -> int | None:
        """Return the token that would begin a further thought here, if none may begin."""
        at_header = self._place is _Place.OUTSIDE and self._held.endswith(self._tokens.header)
        return self._tokens.banned_id if at_header and self._tokens.header and self._is_spent else None

    def _read(self, token_id: int, forced: tuple[int, ...]) -> None:
        """Go on after a token; `forced` are the tokens that had to come."""
        was_inside, is_due = self._place is _Place.INSIDE, self._place is _Place.INSIDE and not self._count_free()
        self._forced = forced[1:]
        self._held += self._tokens.tokenizer.token_bytes(token_id)
        while self._advance():
            pass
        if self._left is not None:
            self._left -= 1
        if was_inside and self._place is _Place.INSIDE and not forced:
            self._thought_tokens += 1
            self._waited_tokens += is_due

    def _advance(self) -> bool:
        """Do one step over the held text; returns True if another step may follow."""
        tags = self._tokens.tags
        if self._place is _Place.OUTSIDE:
            return self._look_for_thought(tags)
        if self._place is _Place.LABEL:
            label = tags.label.encode()
            if label.startswith(self._held) and self._held != label:
                return False
            self._held, self._place = self._held.removeprefix(label), _Place.INSIDE
            return True
        if self._place is _Place.INSIDE:
            close = tags.close.encode()
            _, found, rest = self._held.partition(close)
            if not found:
                self._held = self._held[-max(len(close) - 1, MOST_PARTS) :]
                return False
            self._held, self._place = rest, _Place.OUTSIDE if tags.follow else _Place.ANSWER
            return bool(tags.follow)
        self._held = b""
        return False

    def _look_for_thought(self, tags: Tags) -> bool:
        """Find the opening tag at the answer's beginning, or anywhere if thoughts are messages of their own."""
        opening = tags.open.encode()
        if tags.follow:
            _, found, rest = self._held.partition(opening)
            self._held = rest if found else self._held[-len(opening) :]
        else:
            bare = self._held.lstrip()
            if opening.startswith(bare) and bare != opening:
                return False
            found = b"" if not bare.startswith(opening) else opening
            self._held = bare.removeprefix(opening)
        if found:
            self._place = _Place.LABEL
        elif not tags.follow:
            self._place = _Place.ANSWER
        return bool(found)


def _ends_in_character(text: bytes) -> bool:
    """Return True if bytes end within a character of UTF-8."""
    for size in range(1, min(MOST_PARTS, len(text) + 1)):
        lead = text[-size]
        if lead & 0xC0 != 0x80:
            return size < (2 if lead >= 0xC0 else 1) + (lead >= 0xE0) + (lead >= 0xF0)
    return False

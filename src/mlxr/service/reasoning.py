"""What a model thinks before it answers: where it begins and ends in a stream of text, and how it is switched.

Knows tags, not tokens. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

# Template variables that switch reasoning on and off, and the one that sets how much there is of it.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"  # the variable of templates of models that were trained to keep to a budget
# All efforts that dialects know, ascending, with the most tokens of thought that each means to a model that knows no
# efforts itself; -1: any number.
EFFORTS: Mapping[str, int] = MappingProxyType(
    {"minimal": 512, "low": 1024, "medium": 8192, "high": 24576, "xhigh": -1, "max": -1}
)


@dataclass(frozen=True, slots=True)
class Tags:
    """How one model marks what it thinks.

    `label` follows the opening tag and is no part of the thought. Where thoughts are messages of their own, `follow`
    begins the next message, which may be one more thought. `levels` are the efforts that the model was trained for,
    where its template takes one and it knows these alone, in ascending order.
    """

    open: str
    close: str
    label: str = ""
    follow: str = ""
    levels: tuple[str, ...] = ()


# gpt-oss; Qwen 3, DeepSeek R1, GLM 4.5, Nemotron 3 and most others; Magistral; Command A; Seed-OSS; Gemma 4.
TAGS = (
    Tags("<|channel|>analysis<|message|>", "<|end|>", "", "<|start|>assistant", ("low", "medium", "high")),
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|channel>", "<channel|>", "thought\n"),
)


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning; an empty one says that it has ended."""

    text: str


def find_tags(template_source: str) -> Tags | None:
    """The tags that a chat template speaks of."""
    return next((tags for tags in TAGS if (tags.open if tags.follow else tags.close) in template_source), None)


def find_level(effort: str, levels: Sequence[str]) -> str:
    """The one of `levels` that is nearest to `effort`; an effort without a name in `EFFORTS` stays as it is."""
    if effort in levels or effort not in EFFORTS:
        return effort
    names = list(EFFORTS)
    return min(levels, key=lambda level: abs(names.index(level) - names.index(effort)))


def hold_back(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` could continue."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


class _Place(Enum):
    START = auto()  # nothing but space so far
    INSIDE_START = auto()  # inside as the prompt left it, nothing but space so far
    OPENED = auto()  # behind the opening tag, nothing but space so far
    INSIDE = auto()
    AFTER = auto()  # behind the closing tag, nothing but space so far
    ANSWER = auto()


class ReasoningSplitter:
    """Cuts an answer into thoughts and text. The space around the tags belongs to neither.

    `is_open`: the prompt has opened the tag already; a model that opens it once more is forgiven.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._tags = tags
        self._place = _Place.INSIDE_START if is_open else _Place.START
        self._held = ""

    def push(self, text: str) -> list[Thought | str]:
        """What is certain with this piece."""
        if self._place is _Place.ANSWER:
            return [text]
        self._held += text
        pieces: list[Thought | str] = []
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Thought | str]:
        """What was held back; called once, when no more text comes."""
        held, self._held = self._held, ""
        if self._place is _Place.INSIDE:
            return [Thought(held.rstrip())] if held.strip() else []
        if self._place is _Place.START or self._place is _Place.ANSWER:
            return [held] if held else []
        return [Thought(held.strip())] if self._place is _Place.INSIDE_START and held.strip() else []

    def _advance(self, pieces: list[Thought | str]) -> bool:
        """One step over what is held; whether there may be another one."""
        if self._place is _Place.INSIDE:
            return self._read_thought(pieces)
        bare = self._held.lstrip()
        if self._place is _Place.OPENED and self._tags.label:
            if self._tags.label.startswith(bare) and bare != self._tags.label:
                return False
            self._held, self._place = bare.removeprefix(self._tags.label), _Place.INSIDE_START
            return True
        if self._place is _Place.OPENED:
            self._held, self._place = bare, _Place.INSIDE if bare else _Place.OPENED
            return bool(bare)
        if self._place in (_Place.START, _Place.INSIDE_START):
            if self._tags.open.startswith(bare) and bare != self._tags.open:
                return False  # also when there is nothing but space
            if bare.startswith(self._tags.open):
                self._held, self._place = bare.removeprefix(self._tags.open), _Place.OPENED
                return True
            if self._place is _Place.INSIDE_START:
                self._held, self._place = bare, _Place.INSIDE
                return True
        elif not bare:
            self._held = ""
            return False
        pieces.append(self._held if self._place is _Place.START else bare)
        self._held, self._place = "", _Place.ANSWER
        return False

    def _read_thought(self, pieces: list[Thought | str]) -> bool:
        thought, close, rest = self._held.partition(self._tags.close)
        if close:
            if thought.rstrip():
                pieces.append(Thought(thought.rstrip()))
            pieces.append(Thought(""))
            self._held, self._place = rest, _Place.AFTER
            return True
        keep = hold_back(thought, self._tags.close)
        sure = thought[: len(thought) - keep].rstrip()
        if sure:
            pieces.append(Thought(sure))
            self._held = thought[len(sure) :]
        return False

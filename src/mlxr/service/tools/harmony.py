"""Answers and calls as gpt-oss writes them: messages in the channels `analysis`, `commentary` and `final`.

`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` is a call; its recipient may stand
before the channel as well. `analysis` is what the model thinks, `final` its answer, and commentary to nobody says what
it is about to do. Source: OpenAI's description of the harmony response format and the chat template of gpt-oss-120b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import cast

from mlxr.service.requests import Tool
from mlxr.service.tools.format import (
    CallParser,
    ToolFormat,
    quote_lark,
    write_argument_rules,
    write_rule,
)
from mlxr.service.tools.harmony_parser import CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, START, HarmonyParser

RECOGNISED_BY = "<|channel|>analysis<|message|>"
_PREAMBLE = f"{END}{START}assistant{CHANNEL}commentary{MESSAGE}"


class HarmonyFormat(ToolFormat):
    """Tool calls as gpt-oss writes them, and all else that its answers consist of."""

    markers: Sequence[str] = MARKERS
    marks_answers = True

    def prepare_messages(self, messages: list[dict[str, object]], tools: Sequence[Tool]) -> list[dict[str, object]]:
        """One call in a message, its result behind it, and one system message: the template shows no others."""
        del tools
        systems = [message for message in messages if message["role"] in ("system", "developer")]
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        if systems:
            content = "\n\n".join(str(message["content"]) for message in systems)
            others.insert(0, {"role": "system", "content": content})
        return _pair_calls([_join_preamble(message) for message in others])

    def open_parser(self, tools: Sequence[Tool], *, is_enforced: bool) -> CallParser:
        """Return a parser of all messages of an answer."""
        return HarmonyParser(frozenset(tool.name for tool in tools), is_enforced=is_enforced)

    def write_grammar(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        specials: Mapping[str, str],
        answer: str | None = None,
    ) -> str | None:
        """One call, or an answer in the channel `final`, perhaps after words about what is to be done.

        What the model thinks before that is not part of it. A call ends the answer, so there are no two.
        """
        del is_parallel
        start, end, message, channel, constrain = (
            specials.get(marker, quote_lark(marker)) for marker in (START, END, MESSAGE, CHANNEL, CONSTRAIN)
        )
        rules = write_argument_rules(tools)
        if tools:
            bodies = (f"call_{index}" for index in range(len(tools)))
            rules += write_rule("call", list(bodies)) + f'kind: " "? {constrain}? "json"\n'
        for index, tool in enumerate(tools):
            recipient = quote_lark(f" to=functions.{tool.name}")
            header = f'{channel} ("commentary" | "analysis") {recipient} | {recipient} {channel} "commentary"'
            rules += f"call_{index}: ({header}) kind? {message} args_{index}\n"
        final = f'{channel} "final" {message}'
        if must_call:
            return f"start: call\n{rules}"
        if answer is not None:
            return write_rule("start", [*(["call"] if tools else []), f"{final} {answer}"]) + rules
        is_token = END in specials  # else a message ends where the marker is spelt
        body = f"body: TEXT? {end}\nTEXT: /(?s:.+)/\n" if is_token else f"body[suffix={end}]: /(?s:.*)/\n"
        rest = "TEXT?" if is_token else "/(?s:.*)/"
        more = f'{channel} ("commentary" | "analysis") {message} body {start} "assistant"'
        return f"start: ({more})* (call | {final} {rest})\n{body}{rules}"


def _join_preamble(message: dict[str, object]) -> dict[str, object]:
    """A call's message with its text as a message of its own behind the thought, where the template shows one alone."""
    thinking, content = message.get("thinking"), message["content"]
    if "tool_calls" not in message or not content or not thinking:
        return message
    return {**message, "thinking": f"{thinking}{_PREAMBLE}{content}", "content": ""}


def _pair_calls(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Messages with one call each, and each result behind its call."""
    paired: list[dict[str, object]] = []
    groups: list[list[dict[str, object]]] = []  # of the last message with calls: each call and its results
    for message in messages:
        if message["role"] == "tool" and groups:
            _find_group(groups, message.get("tool_call_id")).append(message)
            continue
        paired += chain.from_iterable(groups)
        calls = cast("list[object]", message.get("tool_calls", []))
        bare = {"role": "assistant", "content": ""}
        groups = [[{**(bare if index else message), "tool_calls": [call]}] for index, call in enumerate(calls)]
        if not calls:
            paired.append(message)
    return [*paired, *chain.from_iterable(groups)]


def _find_group(groups: Sequence[list[dict[str, object]]], call_id: object) -> list[dict[str, object]]:
    """The group of the call with this id, or else the first one without a result."""
    for group in groups:
        call = cast("list[Mapping[str, object]]", group[0]["tool_calls"])[0]
        if call_id is not None and call.get("id") == call_id:
            return group
    return next((group for group in groups if len(group) == 1), groups[-1])

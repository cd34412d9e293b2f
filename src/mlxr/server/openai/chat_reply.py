"""A chat completion: its answers as the fold of their events, and the JSON of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlxr.core.events import Event, Finish, ReasoningDelta, TextDelta, TokenInfo, ToolCallDelta
from mlxr.core.types import FinishReason
from mlxr.server.json_models import ReplyModel, optional
from mlxr.server.openai.replies import LogprobsReply, Tally, TimingsReply, TokenBytes, UsageReply, describe_tokens

ChatFinish = Literal["stop", "length", "tool_calls"]


class CalledFunctionReply(ReplyModel):
    """A call's function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallReply(ReplyModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionReply


class MessageReply(ReplyModel):
    """The assistant's message, whole."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = optional()
    tool_calls: list[ToolCallReply] | None = optional()


class ChatChoice(ReplyModel):
    """One of the answers in a reply that is not streamed."""

    index: int
    message: MessageReply
    logprobs: LogprobsReply | None
    finish_reason: ChatFinish


class VerboseReply(ReplyModel):
    """Says what the model read."""

    prompt: str


class ChatCompletion(ReplyModel):
    """All answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str | None
    timings: TimingsReply | None = optional()
    verbose: VerboseReply | None = optional("__verbose")


class ChatInputTokens(ReplyModel):
    """How many tokens a conversation has."""

    input_tokens: int


class ControlReply(ReplyModel):
    """What was asked of a growing answer has been done."""

    success: Literal[True] = True


def name_finish(reason: FinishReason) -> ChatFinish:
    """OpenAI's word for how an answer ended; a cancelled one counts as cut short. Failed ones never get here."""
    if reason is FinishReason.TOOL_CALLS:
        return "tool_calls"
    return "stop" if reason is FinishReason.STOP else "length"


@dataclass(slots=True)
class _Growing:
    """What has come of one answer."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)
    reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.texts.append(event.text)
                self.tokens.extend(event.tokens)
            case ReasoningDelta():
                self.thoughts.append(event.text)
            case ToolCallDelta():
                self.calls.setdefault(event.call, []).append(event)
            case Finish():
                self.reason = event.reason

    def to_message(self) -> MessageReply:
        calls = [_join_call(deltas) for _, deltas in sorted(self.calls.items())]
        text = "".join(self.texts)
        return MessageReply(
            content=None if calls and not text else text,
            reasoning_content="".join(self.thoughts) or None,
            tool_calls=calls or None,
        )


def _join_call(deltas: list[ToolCallDelta]) -> ToolCallReply:
    arguments = "".join(delta.arguments for delta in deltas)
    return ToolCallReply(
        id=deltas[0].id or "", function=CalledFunctionReply(name=deltas[0].name or "", arguments=arguments)
    )


class ChatFold:
    """Adds up the events of all answers to one conversation."""

    def __init__(self, prompt_tokens: int, answers: int, token_bytes: TokenBytes | None) -> None:
        """`token_bytes` is given where log-probabilities were asked for."""
        self._growing = [_Growing() for _ in range(answers)]
        self._tally = Tally(prompt_tokens, answers)
        self._token_bytes = token_bytes

    def add(self, event: Event) -> None:
        """Take the next event."""
        self._growing[event.index].add(event)
        self._tally.add(event)

    def to_reply(self, reply_id: str, created: int, model: str, fingerprint: str | None) -> ChatCompletion:
        """The reply, after the last event."""
        return ChatCompletion(
            id=reply_id,
            created=created,
            model=model,
            choices=[self._make_choice(index, growing) for index, growing in enumerate(self._growing)],
            usage=self._tally.usage(),
            system_fingerprint=fingerprint,
            timings=self._tally.timings(),
        )

    def _make_choice(self, index: int, growing: _Growing) -> ChatChoice:
        if growing.reason is None:
            raise ValueError(f"the events of answer {index} end without a Finish")
        logprobs = None
        if self._token_bytes is not None:
            logprobs = LogprobsReply(content=describe_tokens(growing.tokens, self._token_bytes))
        return ChatChoice(
            index=index, message=growing.to_message(), logprobs=logprobs, finish_reason=name_finish(growing.reason)
        )

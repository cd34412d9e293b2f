"""Messages of the Anthropic dialect: blocks of content in, messages of the service out.

A user's message may answer calls of tools and say something as well; that is several messages to the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mlxr.core.errors import InvalidRequest
from mlxr.server.json_models import Arguments, RequestModel, Text, describe_call, dump_json
from mlxr.service.prompt import Message

# A line of Claude Code's system text, another one in every request: behind it nothing would be found in the cache.
BILLING = "x-anthropic-billing-header:"
# Blocks of earlier answers that tell of what only the service itself can do or read.
FOREIGN_BLOCKS = (
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "tool_addition",
    "tool_removal",
)


class TextBlock(RequestModel):
    """A block of text in a message."""

    type: Literal["text"]
    text: str

    @property
    def plain(self) -> str:
        """The block's text as the model reads it."""
        return self.text


class TextSource(RequestModel):
    """The text of a document; PDF files and addresses are not supported."""

    type: Literal["text"]
    data: str


class DocumentBlock(RequestModel):
    """A document that is text; images and other documents are not supported."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None

    @property
    def plain(self) -> str:
        """The block's text as the model reads it."""
        return "\n".join(part for part in (self.title, self.context, self.source.data) if part)


class SearchResultBlock(RequestModel):
    """A search result that the client found and shows to the model."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def plain(self) -> str:
        """The block's text as the model reads it."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class CompactionBlock(RequestModel):
    """A summary that stands for what was said before."""

    type: Literal["compaction"]
    content: str = ""

    @property
    def plain(self) -> str:
        """The block's text as the model reads it."""
        return self.content


class ToolReferenceBlock(RequestModel):
    """A tool that was found; all tools are offered anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def plain(self) -> str:
        """The block's text as the model reads it."""
        return self.tool_name


class ThinkingBlock(RequestModel):
    """What the assistant thought earlier."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestModel):
    """A call that the assistant made earlier; its input may be JSON text, and is empty where it is left out."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Arguments = ""


ResultBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(RequestModel):
    """The result that a call of a tool gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class ForeignBlock(RequestModel):
    """A block that this server leaves out, because it has no meaning here."""

    type: Literal[FOREIGN_BLOCKS]  # type: ignore[valid-type]


PlainBlock = TextBlock | DocumentBlock | SearchResultBlock | CompactionBlock
Block = Annotated[
    PlainBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ForeignBlock, Field(discriminator="type")
]


def _is_text(value: object) -> str:
    return "text" if isinstance(value, str) else "blocks"


class MessageInput(RequestModel):
    """One message of the conversation, as the client sends it."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")],
        Discriminator(_is_text),
    ]


System = str | list[TextBlock]


def list_blocks(system: System | None) -> list[TextBlock]:
    """A system text as blocks."""
    return [TextBlock(type="text", text=system)] if isinstance(system, str) else list(system or ())


def is_billing(block: TextBlock) -> bool:
    """Whether the first line of a block is for the service's books alone."""
    return block.text.startswith(BILLING)


def _strip_billing(text: str) -> str | None:
    """The text without that line; None where nothing is left."""
    return (text.partition("\n")[2] or None) if text.startswith(BILLING) else text


def read_messages(system: System | None, messages: Sequence[MessageInput]) -> list[Message]:
    """Messages for the service; raises InvalidRequest naming the block that does not belong where it is."""
    read: list[Message] = []
    if system:
        texts = [_strip_billing(block.text) for block in list_blocks(system)]
        read.append({"role": "system", "content": "\n".join(text for text in texts if text is not None)})
    tool_names: dict[str, str] = {}
    for index, message in enumerate(messages):
        field = f"messages[{index}].content"
        if isinstance(message.content, str):
            read.append({"role": message.role, "content": message.content})
        elif message.content and all(map(_says_nothing, message.content)):
            continue  # no turn of its own: there would be an empty one
        elif message.role == "assistant":
            read.append(_read_assistant(message.content, field, tool_names))
        else:
            read.extend(_read_user(message.role, message.content, field, tool_names))
    return read


def _says_nothing(block: Block) -> bool:
    return isinstance(block, ForeignBlock) or (isinstance(block, ThinkingBlock) and not block.thinking)


def _read_assistant(blocks: Sequence[Block], field: str, tool_names: dict[str, str]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock() | CompactionBlock():
                texts.append(block.plain)
            case ForeignBlock():
                pass
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                tool_names[block.id] = block.name
                given, place = block.input, f"{field}[{index}].input"
                arguments = given if isinstance(given, str) else dump_json(given, place)
                calls.append(describe_call(block.id, block.name, arguments))
            case _:
                raise InvalidRequest(f"{field}[{index}]", "the assistant gives no tool_result")
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(role: str, blocks: Sequence[Block], field: str, tool_names: dict[str, str]) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, PlainBlock):
            texts.append(block.plain)
        elif isinstance(block, ForeignBlock):
            continue
        elif isinstance(block, ToolResultBlock) and role == "user":
            results.append(_read_result(block, tool_names))
        else:
            raise InvalidRequest(f"{field}[{index}]", f"a {role} message has no {block.type}")
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts or not results else results


def _read_result(block: ToolResultBlock, tool_names: dict[str, str]) -> Message:
    text = _join(block.content or "")
    message: dict[str, object] = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }
    if block.tool_use_id in tool_names:
        message["name"] = tool_names[block.tool_use_id]
    return message


def _join(content: str | Sequence[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.plain for block in content)

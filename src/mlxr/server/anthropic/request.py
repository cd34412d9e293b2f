"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and their translation to the service's request.

Blocks of content in, messages of the service out. A user's message may hold results of tools and text as well; it
becomes several messages of the service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import read_params
from mlxr.core.types import MAX_INT, SamplingParams
from mlxr.server.request_fields import AnthropicParameters, explain_service_tool, make_schema_grammar
from mlxr.server.routes import Arguments, JsonObject, RequestModel, Text, Unsupported, describe_call, dump_json
from mlxr.service.requests import ChatRequest, Message, NamedTool, Tool, ToolChoice, is_unfinished
from mlxr.service.sight import make_document, make_part, read_base64, read_url

# A line of Claude Code's system text, different in every request: the cache would find nothing behind it.
BILLING = "x-anthropic-billing-header:"
# Blocks of earlier answers about actions and contents of Anthropic's service alone.
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
    """The text of a document."""

    type: Literal["text"]
    data: str


class ImageData(RequestModel):
    """A picture, or a PDF, in base64."""

    type: Literal["base64"]
    data: str
    media_type: str | None = None


class ImageAddress(RequestModel):
    """A picture as a data: URL, or at an address of an origin that the setting image_origins names."""

    type: Literal["url"]
    url: str


class DocumentBlock(RequestModel):
    """A document: a text, or a PDF in base64 or at an address."""

    type: Literal["document"]
    source: Annotated[TextSource | ImageData | ImageAddress, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def plain(self) -> str:
        """Title, context and, unless it is a file, text of the document, as the model reads them."""
        text = self.source.data if isinstance(self.source, TextSource) else None
        return "\n".join(part for part in (self.title, self.context, text) if part)

    def read(self, field: str) -> str | JsonObject:
        """Return the text, or the file as a part of a message; raises InvalidRequest."""
        match self.source:
            case TextSource():
                return self.plain
            case ImageAddress(url=url):
                return make_document(read_url(url, f"{field}.source.url"), self.plain, field)
            case ImageData(data=data):
                return make_document(read_base64(data, f"{field}.source.data"), self.plain, field)


class ImageBlock(RequestModel):
    """A picture that the model is shown."""

    type: Literal["image"]
    source: Annotated[ImageData | ImageAddress, Field(discriminator="type")]

    def read(self, field: str) -> JsonObject:
        """Return the picture as a part of a message; raises InvalidRequest."""
        if isinstance(self.source, ImageAddress):
            return make_part(read_url(self.source.url, f"{field}.source.url"), field=field)
        return make_part(read_base64(self.source.data, f"{field}.source.data"), field=field)


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
    """A summary in place of the earlier conversation."""

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
    """An earlier thought of the assistant."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestModel):
    """A call that the assistant made earlier; its input may be JSON text, and is empty if it is left out."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Arguments = ""


ResultBlock = Annotated[
    TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ImageBlock, Field(discriminator="type")
]


class ToolResultBlock(RequestModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class ForeignBlock(RequestModel):
    """A block that this server leaves out, because it has no meaning here."""

    type: Literal[FOREIGN_BLOCKS]  # type: ignore[valid-type]


PlainBlock = TextBlock | DocumentBlock | SearchResultBlock | CompactionBlock
Block = Annotated[
    PlainBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ForeignBlock, Field(discriminator="type")
]


def _is_text(value: object) -> str:
    return "text" if isinstance(value, str) else "blocks"


class MessageInput(RequestModel):
    """One message of the conversation, as the client sends it."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[list[Block], Tag("blocks")], Discriminator(_is_text)]


System = str | list[TextBlock]


def list_blocks(system: System | None) -> list[TextBlock]:
    """Return a system text as blocks."""
    return [TextBlock(type="text", text=system)] if isinstance(system, str) else list(system or ())


def is_billing(block: TextBlock) -> bool:
    """Return True if the first line of a block is only for the service's billing."""
    return block.text.startswith(BILLING)


def _strip_billing(text: str) -> str | None:
    """Return the text without that line; None if nothing is left."""
    return (text.partition("\n")[2] or None) if text.startswith(BILLING) else text


def read_messages(system: System | None, messages: Sequence[MessageInput]) -> list[Message]:
    """Return messages for the service; raises InvalidRequest naming a misplaced block."""
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
            continue  # it would become an empty turn
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
            case DocumentBlock(source=ImageData() | ImageAddress()):
                raise InvalidRequest(f"{field}[{index}]", "the assistant gives no file")
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
                raise InvalidRequest(f"{field}[{index}]", f"the assistant gives no {block.type}")
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_user(role: str, blocks: Sequence[Block], field: str, tool_names: dict[str, str]) -> list[Message]:
    results: list[Message] = []
    shown: list[str | JsonObject] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ImageBlock | DocumentBlock):
            shown.append(block.read(f"{field}[{index}]"))
        elif isinstance(block, PlainBlock):
            shown.append(block.plain)
        elif isinstance(block, ForeignBlock):
            continue
        elif isinstance(block, ToolResultBlock) and role == "user":
            results.append(_read_result(block, f"{field}[{index}].content", tool_names))
        else:
            raise InvalidRequest(f"{field}[{index}]", f"a {role} message has no {block.type}")
    return [*results, {"role": role, "content": _join(shown)}] if shown or not results else results


def _read_result(block: ToolResultBlock, field: str, tool_names: dict[str, str]) -> Message:
    blocks = (
        [TextBlock(type="text", text=block.content or "")] if not isinstance(block.content, list) else block.content
    )
    shown: list[str | JsonObject] = [
        one.read(f"{field}[{index}]") if isinstance(one, ImageBlock | DocumentBlock) else one.plain
        for index, one in enumerate(blocks)
    ]
    if block.is_error and shown:
        shown[:1] = [f"Error: {shown[0]}"] if isinstance(shown[0], str) else ["Error:", shown[0]]
    message: dict[str, object] = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": _join(shown) if shown or not block.is_error else "Error: ",
    }
    if block.tool_use_id in tool_names:
        message["name"] = tool_names[block.tool_use_id]
    return message


def _join(shown: Sequence[str | JsonObject]) -> str | list[JsonObject]:
    """Join texts by line breaks; with pictures, return parts of a message in which neighbouring texts are joined."""
    if all(isinstance(one, str) for one in shown):
        return "\n".join(map(str, shown))
    parts: list[JsonObject] = []
    for before, one in zip([None, *shown], shown, strict=False):
        line = f"\n{one}" if isinstance(before, str) else one
        parts.append({"type": "text", "text": line} if isinstance(one, str) else one)
    return parts


ToolName = Annotated[str, Field(min_length=1, max_length=256)]


class CustomTool(RequestModel):
    """A function that the model may call. Its arguments always keep to `input_schema`, whether `strict` or not."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject


class ServiceTool(RequestModel):
    """A tool of Anthropic's service alone, such as a web search: left out among other tools, refused if it is alone."""

    type: Text
    name: str | None = None


def _name_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "service"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServiceTool, Tag("service")], Discriminator(_name_tool)
]


class AnyChoice(RequestModel):
    """Call tools as the model likes (`auto`), or at least one (`any`)."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class OneChoice(RequestModel):
    """The answer has to call the tool that is named."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(RequestModel):
    """The answer may call no tool."""

    type: Literal["none"]


class ThinkingOn(RequestModel):
    """Think before answering, if the model can. Thoughts count towards `max_tokens`; at least a quarter of it stays for
    the answer, whatever the budget.
    """

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None, description="Most tokens of thought; the same as `thinking_budget`."
    )
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingAdaptive(RequestModel):
    """Think if the model's template does so by default."""

    type: Literal["adaptive", "between_tools"]
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingOff(RequestModel):
    """The model answers without thinking first."""

    type: Literal["disabled"]


class JsonFormat(RequestModel):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    """The effort of thinking, and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ConversationFields(RequestModel):
    """The fields that make up the prompt."""

    model: Text
    messages: Annotated[list[MessageInput], Field(min_length=1)]
    system: System | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Annotated[AnyChoice | OneChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older place of output_config.format.")
    mcp_servers: Unsupported = None
    thread: Unsupported = None  # a conversation kept by the service; once this is refused, clients send it all

    @property
    def budget_tokens(self) -> int | None:
        """The budget of `thinking`."""
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOn) else None

    def make_request(self, params: SamplingParams) -> ChatRequest:
        """Return the service's request; raises InvalidRequest naming the field."""
        tools = self._read_tools()
        choice = self._read_choice(tools)
        wanted = (self.output_config.format if self.output_config else None) or self.output_format
        grammar = make_schema_grammar(wanted.json_schema if wanted else None, "output_config.format")
        messages = read_messages(self.system, self.messages)
        return ChatRequest(
            messages=messages,
            ending="continued" if is_unfinished(messages) else "new turn",
            params=params,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=not getattr(self.tool_choice, "disable_parallel_tool_use", None),
            grammar=grammar,
            think=self._read_thinking(),
        )

    def list_left_out(self) -> Iterable[str]:
        """Return Anthropic's own tools, blocks without use here, and its billing lines."""
        for tool in self.tools or ():
            if isinstance(tool, ServiceTool):
                yield f"tools[].{tool.type}"
        if any(map(is_billing, list_blocks(self.system))):
            yield f"system[].{BILLING.rstrip(':')}"
        for message in self.messages:
            for block in message.content if not isinstance(message.content, str) else ():
                if isinstance(block, ForeignBlock):
                    yield f"messages[].content[].{block.type}"

    def _read_tools(self) -> list[Tool]:
        given = self.tools or []
        tools = [
            Tool(tool.name, tool.description or "", tool.input_schema) for tool in given if isinstance(tool, CustomTool)
        ]
        if given and not tools:
            raise explain_service_tool(given[0].type or "")
        return tools

    def _read_choice(self, tools: Sequence[Tool]) -> ToolChoice:
        names = [tool.name for tool in tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise InvalidRequest(f"tools[{index}].name", f"there is another tool called {name!r}")
        match self.tool_choice:
            case None | NoChoice():
                return "none" if self.tool_choice else "auto"
            case OneChoice():
                if self.tool_choice.name not in names:
                    raise InvalidRequest("tool_choice.name", f"there is no tool called {self.tool_choice.name!r}")
                return NamedTool(self.tool_choice.name)
            case _:
                if self.tool_choice.type == "auto":
                    return "auto"
                if not names:
                    raise InvalidRequest("tool_choice", "asks for a call, but there are no tools")
                return "required"

    def _read_thinking(self) -> bool | str | None:
        effort = self.output_config.effort if self.output_config else None
        match self.thinking:
            case ThinkingOn():
                return effort or True
            case ThinkingAdaptive():
                return effort
            case _:
                return False


class CountRequest(ConversationFields):
    """Count the tokens of a conversation."""

    def to_request(self) -> ChatRequest:
        """Return the conversation for the service."""
        return self.make_request(SamplingParams(thinking_budget=self.budget_tokens))


class MessageRequest(AnthropicParameters, ConversationFields):
    """The body of a request to `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(None, description="Absent: 1.")
    stream: bool | None = None

    @property
    def hides_thoughts(self) -> bool:
        """True if the reply only says that there were thoughts, without their text."""
        return getattr(self.thinking, "display", None) == "omitted"

    def list_given(self) -> dict[str, object]:
        """Return the values that the request sets; a budget in `thinking` is one of them."""
        given = super().list_given()
        return given if self.budget_tokens is None else {"thinking_budget": self.budget_tokens, **given}

    def to_request(self) -> ChatRequest:
        """Return the service's request; raises InvalidRequest naming the field."""
        return self.make_request(SamplingParams(**read_params({"temperature": 1.0}, self.list_given())))

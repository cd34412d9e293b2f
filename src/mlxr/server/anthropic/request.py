"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the request that they are to the service.

Blocks of content in, messages of the service out. A user's message may answer calls of tools and say something as well;
that is several messages to the service.
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
        """The block's text as the model reads it, without what only a file has."""
        text = self.source.data if isinstance(self.source, TextSource) else None
        return "\n".join(part for part in (self.title, self.context, text) if part)

    def read(self, field: str) -> str | JsonObject:
        """The text, or the file as a part of a message; raises InvalidRequest."""
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
        """The picture as a part of a message; raises InvalidRequest."""
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
    """Holds what the assistant thought earlier."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(RequestModel):
    """A call that the assistant made earlier; its input may be JSON text, and is empty where it is left out."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Arguments = ""


ResultBlock = Annotated[
    TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | ImageBlock, Field(discriminator="type")
]


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
    """A system text as blocks."""
    return [TextBlock(type="text", text=system)] if isinstance(system, str) else list(system or ())


def is_billing(block: TextBlock) -> bool:
    """Tell whether the first line of a block is for the service's books alone."""
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
    """Texts in lines of their own; with pictures as parts of a message, where neighbouring texts are."""
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
    """A tool that only the service itself has, such as a search of the web: left out among others, refused alone."""

    type: Text
    name: str | None = None


def _name_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "service"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[ServiceTool, Tag("service")], Discriminator(_name_tool)
]


class AnyChoice(RequestModel):
    """Says whether to call tools: as the model likes (`auto`) or at least one (`any`)."""

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
    """Think before answering, if the model is one that does. Thoughts count towards `max_tokens`, of which a quarter
    stays for the answer where the budget would leave less.
    """

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        None, description="Most tokens of thought; the same as `thinking_budget`."
    )
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingAdaptive(RequestModel):
    """Think where the model's template does so by itself."""

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
    """Says how much to think, and what the answer must look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ConversationFields(RequestModel):
    """Holds what the prompt is made of."""

    model: Text
    messages: Annotated[list[MessageInput], Field(min_length=1)]
    system: System | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Annotated[AnyChoice | OneChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingOn | ThinkingAdaptive | ThinkingOff, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The older place of output_config.format.")
    mcp_servers: Unsupported = None
    thread: Unsupported = None  # a conversation that the service keeps; clients send it whole once this is refused

    @property
    def budget_tokens(self) -> int | None:
        """The budget of `thinking`."""
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOn) else None

    def make_request(self, params: SamplingParams) -> ChatRequest:
        """Return what the service is asked; raises InvalidRequest naming the field."""
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
        """Tools of the service, blocks that are of no use here, and what is for the service's books."""
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
        """The conversation for the service."""
        return self.make_request(SamplingParams(thinking_budget=self.budget_tokens))


class MessageRequest(AnthropicParameters, ConversationFields):
    """The body of a request to `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(None, description="Absent: 1.")
    stream: bool | None = None

    @property
    def hides_thoughts(self) -> bool:
        """Tell whether the reply says that there were thoughts, but not what they were."""
        return getattr(self.thinking, "display", None) == "omitted"

    def list_given(self) -> dict[str, object]:
        """The values that the request sets; a budget in `thinking` is one of them."""
        given = super().list_given()
        return given if self.budget_tokens is None else {"thinking_budget": self.budget_tokens, **given}

    def to_request(self) -> ChatRequest:
        """Return what the service is asked; raises InvalidRequest naming the field."""
        return self.make_request(SamplingParams(**read_params({"temperature": 1.0}, self.list_given())))

"""Chat templates that users bring: in Jinja or Go's syntax, in a file, or by the name of one that comes with mlxr.

Brings a conversation into an order of roles that a chat template takes, without losing any of its text.

Many templates raise if roles do not alternate, or if a system message stands behind the first message; some leave such
a message out. Rendering a few words shows once what a template takes, and only when a conversation needs it. A
conversation that is refused all the same is tried again in the shapes of `list_shapes`, in their order. So the prompt
depends on the conversation and the template alone, never on earlier requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mlxr.core.errors import InvalidRequest, SettingError, TemplateError
from mlxr.core.model_settings import ModelSettings
from mlxr.service.tools.marked_json import GenericFormat
from mlxr.templates.budget import MAX_SOURCE_CHARACTERS
from mlxr.templates.go_translation import looks_like_go, translate
from mlxr.tokenizers import ChatTemplate, Tokenizer, chat_template_from_source
from mlxr.tokenizers.chat_template import NAMED, RESERVED, find_named

BROUGHT = "that was given"  # what errors call a template that comes with a request or a setting


def read_template(source: str, field: str = "template") -> str:
    """Return the Jinja template of a Jinja or a Go template; raises InvalidRequest if `source` is neither."""
    try:
        _check(source)
    except TemplateError as error:
        if not looks_like_go(source):
            raise InvalidRequest(field, str(error)) from error
        translated = translate(source)
        try:
            _check(translated)
        except TemplateError as reason:  # a bound on what a template may be
            raise InvalidRequest(field, f"cannot be translated from Go: {reason}") from reason
        return translated
    return source


def check_template(settings: ModelSettings) -> None:
    """Raise SettingError if the template or the variables of the settings cannot be used."""
    find_source(settings)
    read_values(settings)


def make_template(
    source: str | None, own: ChatTemplate | None, settings: ModelSettings, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """Return the template that a model is used with: `source`, or its `own` if that is None.

    It has the variables of the settings; raises SettingError if they are wrong.
    """
    template = own
    if source is not None:
        name = own.name if own is not None else "set for the model"
        template = chat_template_from_source(source, tokenizer, own, name)
    if template is not None:
        template.values = read_values(settings)
    return template


def read_values(settings: ModelSettings) -> Mapping[str, object]:
    """Return the variables that the settings give to chat templates; raises SettingError."""
    values: Mapping[str, object] = json.loads(settings.chat_template_kwargs or "{}")
    taken = sorted(RESERVED & values.keys())
    if taken:
        raise SettingError(f"chat_template_kwargs: {taken[0]} is what the template gets from the conversation")
    return values


def choose_template(given: str, field: str) -> str:
    """Return the Jinja template that a request gives, itself or by the name of one of ours; raises InvalidRequest."""
    named = find_named(given)
    if named is None and "{" not in given:
        raise InvalidRequest(field, f"is no template, and none has the name {given[:40]!r}; there are {_list_names()}")
    return named or read_template(given, field)


def find_source(settings: ModelSettings) -> str | None:
    """Return the Jinja template that the settings give: by a file, by a name, or itself; None without one.

    Raises SettingError.
    """
    given = settings.chat_template
    if given is None:
        return None
    try:
        if "{{" in given or "{%" in given:
            return read_template(given, "chat_template")
        path, named = Path(given).expanduser(), find_named(given)
        if not path.is_file():
            if named is not None:
                return named
            raise SettingError(f"chat_template: {given} is no file, and none of {_list_names()}")
        if path.stat().st_size > 4 * MAX_SOURCE_CHARACTERS:
            raise SettingError(f"chat_template: {given} has more than {MAX_SOURCE_CHARACTERS} characters")
        return read_template(path.read_text(encoding="utf-8-sig"), "chat_template")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SettingError(f"chat_template: {given[:80]} cannot be read: {error}") from error
    except InvalidRequest as error:
        raise SettingError(f"chat_template: {given[:80]}: {error.reason}") from error


def _list_names() -> str:
    return ", ".join(NAMED)


def _check(source: str) -> None:
    ChatTemplate(source, bos_token="", eos_token="", name=BROUGHT).check()


Messages = list[dict[str, object]]
SYSTEM_ROLES = ("system", "developer")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # templates' names for it in earlier messages
_CALL = {"id": "probe7d1f", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
_DOTS = "…"
_LETTERS = {"system": "s", "developer": "d"}
_PROBES: Mapping[str, Callable[[str], dict[str, object]]] = {
    "s": lambda word: {"role": "system", "content": word},
    "d": lambda word: {"role": "developer", "content": word},
    "u": lambda word: {"role": "user", "content": word},
    "a": lambda word: {"role": "assistant", "content": word},
    "c": lambda _: {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    "t": lambda word: {"role": "tool", "content": word, "name": "probe", "tool_call_id": _CALL["id"]},
}


class TurnOrder:
    """Finds out what one chat template takes. Safe to use from several threads.

    `tools` is anything that a template can show as tools; it is needed if the model has a template of its own for
    tools, which may take other orders.
    """

    def __init__(self, template: ChatTemplate, tools: Sequence[object] | None = None) -> None:
        self._template, self._tools = template, tools
        self._known: dict[str, bool] = {}

    def warm_up(self) -> None:
        """Find out now what most conversations need to know."""
        self._shows("su")

    def arrange(self, messages: Messages) -> Messages:
        """Return the messages in an order that the template takes; unchanged if it takes them so.

        Raises NoTemplateWorker if this cannot be found out now.
        """
        if any(message["role"] == "developer" for message in messages) and not self._shows("du"):
            messages = merge_systems(
                [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
            )
        later = {_LETTERS.get(str(message["role"])) for message in messages[_count_front(messages) :]}
        probes = [f"u{letter}aua{letter}u" for letter in "sd" if letter in later]
        if probes and not all(map(self._shows, [probe + self._find_tail(messages) for probe in probes])):
            messages = show_systems(messages)
        if len(merge_neighbours(messages)) < len(messages) and not self._shows("uuaau"):
            messages = merge_neighbours(messages)
        return messages if self._takes_system(messages) else move_system(messages)

    def _takes_system(self, messages: Messages) -> bool:
        """Return True if the template shows a system message before the others; some do only with one of the user."""
        if not _count_front(messages):
            return True
        if all(message["role"] != "user" for message in messages):
            return self._shows("s")
        return self._shows(f"su{self._find_tail(messages)}")

    def _find_tail(self, messages: Messages) -> str:
        """Return the letters of messages that end a probe as the conversation ends, if the template takes such an end.

        Some templates show instructions only where the user's message is the last one.
        """
        role = str(messages[-1]["role"])
        tail = {"assistant": "a", "tool": "ct"}.get(role, "")
        return _LETTERS.get(role) or (tail if tail and self._shows(f"u{tail}") else "")

    def _shows(self, letters: str) -> bool:
        """Return True if the template takes messages of these roles and shows the words of all of them."""
        known = self._known.get(letters)
        if known is None:
            probes = [_PROBES[letter](f"probe-{place}-7d1f") for place, letter in enumerate(letters)]
            try:
                text = self._template.render(probes, tools=self._tools)
                known = all(str(probe["content"]) in text for probe in probes)
            except TemplateError:
                known = False
            self._known[letters] = known
        return known


def list_shapes(messages: Messages) -> Iterator[Messages]:
    """Yield the shapes in which a refused conversation is tried again; each is made from the one before."""
    steps: tuple[Callable[[Messages], Messages], ...] = (
        lambda given: given,  # neighbours become one message, as they do after each step
        show_systems,
        fill_gaps,
        speak_empty,
        move_system,
        lambda given: fill_gaps(merge_neighbours(GenericFormat().prepare_messages(given, ()))),
    )
    for step in steps:
        changed = merge_neighbours(step(messages))
        if changed != messages:
            yield changed
        messages = changed


def merge_systems(messages: Messages) -> Messages:
    """Join all system messages at the start into one: many templates look at the first only."""
    first = messages[0]
    count = next((index for index, message in enumerate(messages) if message["role"] != first["role"]), len(messages))
    if first["role"] != "system" or count == 1:
        return messages
    content = "\n\n".join(str(message["content"]) for message in messages[:count])
    return [{**first, "content": content}, *messages[count:]]


def merge_neighbours(messages: Messages) -> Messages:
    """Join messages that follow each other with one role; system and developer count as one role.

    Calls of tools and their results stay apart.
    """
    merged: Messages = []
    for message in messages:
        if merged and _can_join(merged[-1], message):
            merged[-1] = _join(merged[-1], message)
        else:
            merged.append(message)
    return merged


def show_systems(messages: Messages) -> Messages:
    """Make system and developer messages behind the first message of others the user's, where they stand.

    One between calls of tools and their results moves behind the results.
    """
    front = _count_front(messages)
    shown, waiting = messages[:front], Messages()
    for message in messages[front:]:
        if message["role"] in SYSTEM_ROLES:
            waiting.append({**message, "role": "user"})
            continue
        if message["role"] != "tool":
            shown += waiting
            waiting = []
        shown.append(message)
    return [*shown, *waiting]


def fill_gaps(messages: Messages) -> Messages:
    """Add an empty turn wherever a turn of the other side is missing.

    The first turn becomes the user's. Between two turns of one side with only calls and results between them comes one
    of the other side: the assistant's behind the results, the user's before the calls.
    """
    front = _count_front(messages)
    filled, place = messages[:front], front  # behind the last text
    if len(messages) > front and messages[front]["role"] != "user":
        filled.append({"role": "user", "content": ""})
    last = "user" if len(filled) > front else ""
    for message in messages[front:]:
        if message["role"] != "tool" and "tool_calls" not in message:
            if message["role"] == last == "user":
                filled.append({"role": "assistant", "content": ""})
            elif message["role"] == last:
                filled.insert(place, {"role": "user", "content": ""})
            last, place = str(message["role"]), len(filled) + 1
        filled.append(message)
    return filled


def speak_empty(messages: Messages) -> Messages:
    """Write three dots into turns without a word, which some templates refuse."""
    return [
        {**message, "content": _DOTS} if message["content"] == "" and "tool_calls" not in message else message
        for message in messages
    ]


def move_system(messages: Messages) -> Messages:
    """Move the system message to the start of the user's first message, for templates with no other place for it.

    If the user does not begin, it becomes a first message of the user.
    """
    front = _count_front(messages)
    if not front:
        return messages
    moved: dict[str, object] = {"role": "user", "content": _join_texts(*(one["content"] for one in messages[:front]))}
    others = messages[front:]
    if others and others[0]["role"] == "user":
        return [{**others[0], "content": _join_texts(moved["content"], others[0]["content"])}, *others[1:]]
    return [moved, *others]


def _count_front(messages: Messages) -> int:
    """Count the system and developer messages that the conversation begins with."""
    places = (index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES)
    return next(places, len(messages))


def _can_join(first: dict[str, object], second: dict[str, object]) -> bool:
    roles = {first["role"], second["role"]}
    if roles <= set(SYSTEM_ROLES):
        return True
    return roles == {"user"} or (roles == {"assistant"} and not any("tool_calls" in one for one in (first, second)))


def _join(first: dict[str, object], second: dict[str, object]) -> dict[str, object]:
    joined = {**first, **second, "role": first["role"] if first["role"] == second["role"] else "system"}
    for key in ("content", *REASONING_KEYS):
        if key in first and key in second:
            joined[key] = _join_texts(first[key], second[key])
    if first.get("name") != second.get("name"):
        joined.pop("name", None)
    return joined


def _join_texts(*texts: object) -> str:
    return "\n\n".join(str(text) for text in texts if text != "")

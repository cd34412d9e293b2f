"""Pictures in conversations: from what clients send to places in a prompt.

A picture leaves its message before the chat template runs, and a mark that nobody can guess stands in its place. In the
text that the template makes, the mark becomes what a model was trained with around its pictures, which are control
tokens; then the one that stands for a picture becomes as many as it has rows. So a template need not know of pictures,
and who spells these tokens in a message writes text.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxr.core.errors import InvalidRequest
from mlxr.engine.pictures import Picture, Pictures, Placed
from mlxr.loading import TowerSpec
from mlxr.pictures.decoding import MAX_FILE_BYTES, MAX_PICTURES, Decoder, read_base64, read_url
from mlxr.pictures.documents import MAX_DOCUMENTS
from mlxr.pictures.documents import Documents as Documents  # also for the server
from mlxr.pictures.fetching import Address, check_origins, fetch
from mlxr.pictures.fetching import is_public as is_public
from mlxr.service.requests import ChatRequest, Message, TextRequest
from mlxr.tokenizers import Tokenizer

__all__ = [
    "Shown",
    "Sight",
    "make_document",
    "make_part",
    "open_pictures",
    "read_base64",
    "read_picture",
    "read_url",
    "spell_pictures",
]
MEDIA = "<__media__>"  # where a picture stands in a prompt without a conversation, as in llama.cpp
LOW_TOKENS = 256  # of a picture that a request wants to be seen in low detail
DETAILS = ("low", "high", "auto", "original")


def make_part(data: bytes | Address, detail: str | None = None, field: str | None = None) -> dict[str, object]:
    """A picture as a part of a message's content; `detail` is one of DETAILS, `field` what errors call it."""
    return {"type": "image", "image": data, "detail": detail, "field": field}


def make_document(data: bytes | Address, title: str | None, field: str) -> dict[str, object]:
    """A PDF or a text as a part of a message's content; `field` is what errors call it."""
    return {"type": "document", "document": data, "title": title or "", "field": field}


def open_pictures(messages: Sequence[Message]) -> list[Message]:
    """Messages of a program here, whose pictures are bytes, paths of files, or data: URLs as OpenAI's clients write.

    Raises InvalidRequest, naming the part.
    """
    return [
        {**message, "content": [_open(part, f"messages[{index}].content[{place}]") for place, part in enumerate(parts)]}
        if isinstance(message, Mapping) and isinstance(parts := message.get("content"), list)
        else message
        for index, message in enumerate(messages)
    ]


def _open(part: object, field: str) -> object:
    if isinstance(part, Mapping) and part.get("type") == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        detail = given.get("detail") if isinstance(given, Mapping) else None
        return make_part(read_url(str(url), field), detail if isinstance(detail, str) else None)
    if not isinstance(part, Mapping) or not _is_picture(part) or not isinstance(part.get("image"), str | Path):
        return part
    return {**part, "image": read_picture(str(part["image"]), field)}


def read_picture(path: str, field: str) -> bytes:
    """The bytes of a file. Raises InvalidRequest where there is none, or it is too large for a picture."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(field, f"{path[:200]} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(field, f"{path[:200]} is larger than {MAX_FILE_BYTES >> 20} MiB; take a smaller picture")
    return data


def spell_pictures(messages: Sequence[Message]) -> list[Message]:
    """Messages whose pictures are data: URLs, as a server takes them."""
    return [
        {**message, "content": [_spell(part) for part in parts]}
        if isinstance(parts := message.get("content"), list)
        else message
        for message in messages
    ]


def _spell(part: object) -> object:
    data = part.get("image") if isinstance(part, Mapping) and _is_picture(part) else None
    if isinstance(data, Address):
        return {"type": "image_url", "image_url": {"url": data.url}}
    if not isinstance(data, bytes):
        return part
    return {"type": "image_url", "image_url": {"url": f"data:image;base64,{base64.b64encode(data).decode()}"}}


def has_files(messages: object) -> bool:
    """Tell whether some message has a picture or a document."""
    return any(_is_picture(part) or _is_document(part) for part in _list_parts(messages))


def _list_parts(messages: object) -> list[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_document(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "document"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a picture, or of a tile of one, for which one token stands until it becomes as many."""

    picture: Picture
    first: int = 0
    rows: int | None = None  # None: all from `first` on


@dataclass(frozen=True, slots=True)
class Spelt:
    """A picture in a model's own words, and the parts for which places stand among these."""

    words: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Shown:
    """Pictures that were taken out of a conversation, and the mark that stands for each."""

    pictures: Sequence[Spelt] = ()
    marks: Sequence[str] = ()

    def spell(self, text: str) -> tuple[str, list[Part]]:
        """The text with a model's own words for the marks, and the pictures in the order in which they stand there.

        Raises InvalidRequest where the chat template left out or repeated one.
        """
        if any(text.count(mark) != 1 for mark in self.marks):
            raise InvalidRequest("messages", "have a picture that the model's chat template does not show once")
        order = sorted(range(len(self.marks)), key=lambda number: text.index(self.marks[number]))
        for mark, picture in zip(self.marks, self.pictures, strict=True):
            text = text.replace(mark, picture.words)
        return text, [part for number in order for part in self.pictures[number].parts]


NOTHING_SHOWN = Shown()


class Sight:
    """How one model is shown pictures of at most `most_tokens` tokens each; None for `spec`: not at all.

    `blind` says why it does not see. What requests have at addresses is fetched from these `origins` alone. Safe to use
    from several threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: TowerSpec | None,
        read_fingerprint: Callable[[], bytes],
        blind: str,
        most_tokens: int,
        origins: Sequence[str] = (),
    ) -> None:
        check_origins(origins)
        self._origins, self._documents = origins, Documents()
        self._spec, self._read_fingerprint, self._blind, self._most_tokens = spec, read_fingerprint, blind, most_tokens
        self._word = "" if spec is None else spec.words.place
        self._place_id = None if spec is None else tokenizer.token_id(spec.words.place)
        missing = [] if spec is None else [word for word in spec.words.tokens if tokenizer.token_id(word) is None]
        if missing:
            self._spec, self._blind = None, f"its vocabulary lacks {', '.join(missing)}"
        self._decoder = Decoder()

    @property
    def is_there(self) -> bool:
        """Whether the model sees."""
        return self._spec is not None

    @property
    def blind(self) -> str:
        """Why the model does not see, in words; empty where it does."""
        return "" if self.is_there else self._blind

    def take(self, request: ChatRequest) -> tuple[ChatRequest, Shown]:
        """The conversation with marks for its pictures, and these. Raises InvalidRequest, naming the part."""
        if not has_files(request.messages):
            return request, NOTHING_SHOWN
        if sum(map(_is_document, _list_parts(request.messages))) > MAX_DOCUMENTS:
            raise InvalidRequest("messages", f"have more than {MAX_DOCUMENTS} documents")
        request = replace(request, messages=[*map(self._open_documents, request.messages)])
        files, fields, details, marks = list[bytes](), list[str](), list[object](), list[str]()
        messages = []
        secret = secrets.token_hex(8)
        for index, message in enumerate(request.messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if not isinstance(content, list) or not any(map(_is_picture, content)):
                messages.append(message)
                continue
            parts = []
            for place, part in enumerate(content):
                if not _is_picture(part):
                    parts.append(part)
                    continue
                field = str(part.get("field") or f"messages[{index}].content[{place}]")
                data = self._fetch(part.get("image"), field, is_picture=True)
                if len(files) >= MAX_PICTURES:
                    raise InvalidRequest("messages", f"have more than {MAX_PICTURES} pictures")
                marks.append(f"\uf8fe{secret}{len(marks)}\uf8fe")
                files.append(data)
                fields.append(field)
                details.append(part.get("detail"))
                parts.append({"type": "text", "text": marks[-1]})
            messages.append({**message, "content": parts})
        pictures = self._decode(files, fields, details) if files else []
        return replace(request, messages=messages), Shown(pictures, marks)

    def _fetch(self, data: object, field: str, *, is_picture: bool) -> bytes:
        if is_picture and self._spec is None:
            raise InvalidRequest(field, f"is a picture, and this model reads text only: {self._blind}")
        if isinstance(data, Address):
            return fetch(data, self._origins, field)
        if not isinstance(data, bytes):
            raise InvalidRequest(field, "must have the bytes of a picture as its image")
        return data

    def _open_documents(self, message: Message) -> Message:
        """The message with the pages of its documents, texts or pictures, in their places."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_document, content)):
            return message
        parts: list[object] = []
        for part in content:
            if not _is_document(part):
                parts.append(part)
                continue
            field, title = str(part.get("field")), str(part.get("title"))
            pages = self._documents.read(self._fetch(part.get("document"), field, is_picture=False), field)
            parts += [{"type": "text", "text": f"{title}\n\n"}] if title else []
            for page in pages:
                shown = (
                    {"type": "text", "text": f"{page}\n\n"} if isinstance(page, str) else make_part(page, field=field)
                )
                parts.append(shown)
        if any(map(_is_picture, parts)):
            return {**message, "content": parts}
        return {**message, "content": "".join(str(one["text"]) for one in parts if isinstance(one, Mapping))}

    def take_text(self, request: TextRequest) -> tuple[str, Shown]:
        """A prompt with marks for its pictures, which MEDIA stands for, and these. Raises InvalidRequest."""
        pieces = str(request.prompt).split(MEDIA)
        if len(pieces) - 1 != len(request.pictures):
            raise InvalidRequest(
                request.pictures_field, f"has {len(request.pictures)} pictures for {len(pieces) - 1} places {MEDIA}"
            )
        fields = [f"{request.pictures_field}[{index}]" for index in range(len(request.pictures))]
        files = [self._fetch(one, field, is_picture=True) for one, field in zip(request.pictures, fields, strict=True)]
        marks = [f"\uf8fe{secrets.token_hex(8)}{index}\uf8fe" for index in range(len(files))]
        text = "".join(part for pair in zip(pieces, [*marks, ""], strict=True) for part in pair)
        return text, Shown(self._decode(files, fields, [None] * len(files)), marks)

    def _decode(self, files: Sequence[bytes], fields: Sequence[str], details: Sequence[object]) -> list[Spelt]:
        spec = self._spec
        assert spec is not None
        pictures: dict[int, Spelt] = {}
        for low in (False, True):
            chosen = [place for place, detail in enumerate(details) if (detail == "low") is low]
            tokens = min(self._most_tokens, LOW_TOKENS) if low else self._most_tokens
            own = [files[place] for place in chosen], [fields[place] for place in chosen]
            made = self._decoder.decode(*own, spec.choose_rule(tokens)) if chosen else []
            for place, one in zip(chosen, made, strict=True):
                seen = [Picture(tile, spec.find_grid(tile), self._read_fingerprint()) for tile in one.tiles]
                words = spec.words.spell(one.grid, len(seen), seen[-1].grid[0])
                pictures[place] = Spelt(words, [part for picture in seen for part in self._part(picture)])
        return [pictures[place] for place in range(len(files))]

    def _part(self, picture: Picture) -> list[Part]:
        lines, columns = picture.grid
        if self._spec is None or not self._spec.words.row_break:
            return [Part(picture)]
        return [Part(picture, line * columns, columns) for line in range(lines)]

    def place(self, token_ids: list[int], pictures: Sequence[Part]) -> tuple[list[int], Pictures | None]:
        """The prompt with as many tokens for each picture as it has rows, and where they stand."""
        if not pictures:
            return token_ids, None
        if token_ids.count(self._place_id or 0) != len(pictures):
            raise InvalidRequest(
                "messages", f"become a prompt with {self._word} besides its pictures, which cannot be told apart"
            )
        placed, spread, waiting = list[Placed](), list[int](), iter(pictures)
        for token_id in token_ids:
            if token_id != self._place_id:
                spread.append(token_id)
                continue
            part = next(waiting)
            placed.append(Placed(part.picture, len(spread), part.first, part.rows))
            spread += [token_id] * (placed[-1].stop - placed[-1].start)
        return spread, Pictures(tuple(placed), len(spread))

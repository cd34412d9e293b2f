"""Pictures and sounds in conversations: from the parts that clients send to places in a prompt.

Before the chat template runs, a mark that cannot be guessed replaces each picture in its message. In the text that the
template makes, the mark becomes the control tokens around a picture that the model was trained with; then the token
that stands for the picture is repeated for each of its rows. So a template need not know of pictures, and these tokens
spelt in a message are plain text.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.engine.pictures import Picture, Pictures, Placed
from mlxr.loading import EarSpec, TowerSpec
from mlxr.pictures.decoding import MAX_FILE_BYTES, MAX_PICTURES, Decoder, Prepared, is_sound, read_base64, read_url
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
    "make_sound",
    "open_pictures",
    "read_base64",
    "read_picture",
    "read_url",
    "spell_pictures",
]
MEDIA = "<__media__>"  # marks a picture in a prompt without a conversation, as in llama.cpp
LOW_TOKENS = 256  # the most for a picture in low detail
DETAILS = ("low", "high", "auto", "original")


def make_part(data: bytes | Address, detail: str | None = None, field: str | None = None) -> dict[str, object]:
    """Return a picture as a part of a message's content; `detail` is one of DETAILS, errors name `field`."""
    return {"type": "image", "image": data, "detail": detail, "field": field}


def make_sound(data: bytes, field: str, piece: int | None = None) -> dict[str, object]:
    """Return a sound as a part of a message's content, or only one `piece` of it; errors name `field`."""
    return {"type": "audio", "audio": data, "piece": piece, "field": field}


def make_document(data: bytes | Address, title: str | None, field: str) -> dict[str, object]:
    """Return a PDF or a text as a part of a message's content; errors name `field`."""
    return {"type": "document", "document": data, "title": title or "", "field": field}


def open_pictures(messages: Sequence[Message]) -> list[Message]:
    """Open the pictures in messages of a local program: bytes, paths of files, or data: URLs as in OpenAI's clients.

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
    if isinstance(part, Mapping) and part.get("type") == "input_audio":
        given = part.get("input_audio")
        data = given.get("data") if isinstance(given, Mapping) else None
        return make_sound(read_base64(str(data), field), field)
    kind = str(part.get("type")) if isinstance(part, Mapping) and _is_shown(part) else ""
    if not isinstance(part, Mapping) or not isinstance(part.get(kind), str | Path):
        return part
    return {**part, kind: read_picture(str(part[kind]), field)}


def read_picture(path: str, field: str) -> bytes:
    """Return the bytes of a file. Raises InvalidRequest if it is missing, or too large for a picture or a sound."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(field, f"{path[:200]} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(field, f"{path[:200]} is larger than {MAX_FILE_BYTES >> 20} MiB; take a smaller one")
    return data


def spell_pictures(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose pictures are data: URLs, for a server."""
    return [
        {**message, "content": [_spell(part) for part in parts]}
        if isinstance(parts := message.get("content"), list)
        else message
        for message in messages
    ]


def _spell(part: object) -> object:
    data = part.get(str(part.get("type"))) if isinstance(part, Mapping) and _is_shown(part) else None
    if isinstance(data, Address):
        return {"type": "image_url", "image_url": {"url": data.url}}
    if not isinstance(data, bytes):
        return part
    if is_sound(data):
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image;base64,{base64.b64encode(data).decode()}"}}


def has_files(messages: object) -> bool:
    """Return True if some message has a picture, a sound or a document."""
    return any(_is_shown(part) or _is_document(part) for part in _list_parts(messages))


def _list_parts(messages: object) -> list[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [part for content in contents if isinstance(content, list) for part in content]


def _is_shown(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "audio")


def _is_document(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "document"


@frozen
class Part:
    """Rows of a picture, of a tile or of a piece of a sound; one token stands for them until it is repeated per row."""

    picture: Picture
    first: int = 0
    rows: int | None = None  # None: all from `first` on


@frozen
class Spelt:
    """A picture in the words of a model's vocabulary, and the parts whose places are among these words."""

    words: str
    parts: Sequence[Part]


@frozen
class Shown:
    """Pictures that were taken out of a conversation, and the mark that stands for each."""

    pictures: Sequence[Spelt] = ()
    marks: Sequence[str] = ()

    def spell(self, text: str) -> tuple[str, list[Part]]:
        """Return the text with the model's own words in place of the marks, and the parts in the text's order.

        Raises InvalidRequest if the chat template left out or repeated a mark.
        """
        if any(text.count(mark) != 1 for mark in self.marks):
            raise InvalidRequest(
                "messages", "have a picture or sound that the model's chat template does not show once"
            )
        order = sorted(range(len(self.marks)), key=lambda number: text.index(self.marks[number]))
        for mark, picture in zip(self.marks, self.pictures, strict=True):
            text = text.replace(mark, picture.words)
        return text, [part for number in order for part in self.pictures[number].parts]


NOTHING_SHOWN = Shown()


Heard = TypeVar("Heard", TowerSpec, EarSpec)


def _check_words(tokenizer: Tokenizer, spec: Heard | None, lacks: str) -> tuple[Heard | None, str]:
    """Return the spec if the vocabulary has all of its words, else None, and the reason."""
    missing = [] if spec is None else [word for word in spec.words.tokens if tokenizer.token_id(word) is None]
    return (None, f"its vocabulary lacks {', '.join(missing)}") if missing else (spec, lacks)


class Sight:
    """Shows one model pictures, of at most `most_tokens` tokens each, and sounds; without a spec it takes none of them.

    `blind` says why it does not see, `deaf` why it does not hear. Addresses in requests are fetched only from
    `origins`. Safe to use from several threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: TowerSpec | None,
        read_fingerprint: Callable[[], bytes],
        blind: str,
        most_tokens: int,
        origins: Sequence[str] = (),
        *,
        ear: EarSpec | None = None,
        deaf: str = "",
    ) -> None:
        check_origins(origins)
        self._origins, self._documents = origins, Documents()
        self._spec, self._read_fingerprint, self._blind, self._most_tokens = spec, read_fingerprint, blind, most_tokens
        self._ear, self._deaf = ear, deaf or blind or "it has no ear"
        self._spec, self._blind = _check_words(tokenizer, self._spec, self._blind)
        self._ear, self._deaf = _check_words(tokenizer, self._ear, self._deaf)
        own = self._spec, self._ear  # and the tokens of their places
        self._place_ids = [None if one is None else tokenizer.token_id(one.words.place) for one in own]
        self._decoder = Decoder()
        if self.is_there:
            self._decoder.prepare()

    @property
    def is_there(self) -> bool:
        """True if the model sees."""
        return self._spec is not None

    @property
    def blind(self) -> str:
        """The reason why the model does not see; empty if it does."""
        return "" if self.is_there else self._blind

    @property
    def deaf(self) -> str:
        """The reason why the model does not hear; empty if it does."""
        return "" if self._ear is not None else self._deaf

    def listen(self, data: bytes, field: str) -> tuple[int, float]:
        """Return the number of pieces of a sound, of 30 s except the last, and its seconds. Raises InvalidRequest."""
        sound = self._hear([data], [field])[0]
        return len(sound.tiles), sound.seconds

    def take(self, request: ChatRequest) -> tuple[ChatRequest, Shown]:
        """Return the conversation with marks in place of its pictures, and the pictures. Raises InvalidRequest, naming
        the part.
        """
        if not has_files(request.messages):
            return request, NOTHING_SHOWN
        if sum(map(_is_document, _list_parts(request.messages))) > MAX_DOCUMENTS:
            raise InvalidRequest("messages", f"have more than {MAX_DOCUMENTS} documents")
        request = replace(request, messages=[*map(self._open_documents, request.messages)])
        files, fields, asked, marks = list[bytes](), list[str](), list[Mapping[str, object]](), list[str]()
        messages = []
        secret = secrets.token_hex(8)
        for index, message in enumerate(request.messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            if not isinstance(content, list) or not any(map(_is_shown, content)):
                messages.append(message)
                continue
            parts = []
            for place, part in enumerate(content):
                if not _is_shown(part):
                    parts.append(part)
                    continue
                field = str(part.get("field") or f"messages[{index}].content[{place}]")
                data = self._fetch(part.get(part["type"]), field, is_shown=True)
                if len(files) >= MAX_PICTURES:
                    raise InvalidRequest("messages", f"have more than {MAX_PICTURES} pictures and sounds")
                marks.append(f"\uf8fe{secret}{len(marks)}\uf8fe")
                files.append(data)
                fields.append(field)
                asked.append(part)
                parts.append({"type": "text", "text": marks[-1]})
            messages.append({**message, "content": parts})
        pictures = self._decode(files, fields, asked) if files else []
        return replace(request, messages=messages), Shown(pictures, marks)

    def _fetch(self, data: object, field: str, *, is_shown: bool) -> bytes:
        """Return the bytes of a picture, a sound or a document. Raises InvalidRequest if the model takes none."""
        hears = isinstance(data, bytes) and is_sound(data)
        if is_shown and not hears and self._spec is None:
            raise InvalidRequest(field, f"is a picture, and this model reads text only: {self._blind}")
        if is_shown and hears and self._ear is None:
            raise InvalidRequest(field, f"is a sound, and this model does not hear: {self._deaf}")
        if isinstance(data, Address):
            return fetch(data, self._origins, field)
        if not isinstance(data, bytes):
            raise InvalidRequest(field, "must have the bytes of a picture as its image, or of a sound as its audio")
        return data

    def _open_documents(self, message: Message) -> Message:
        """Return the message with each document replaced by its pages, texts or pictures."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_document, content)):
            return message
        parts: list[object] = []
        for part in content:
            if not _is_document(part):
                parts.append(part)
                continue
            field, title = str(part.get("field")), str(part.get("title"))
            pages = self._documents.read(self._fetch(part.get("document"), field, is_shown=False), field)
            parts += [{"type": "text", "text": f"{title}\n\n"}] if title else []
            for page in pages:
                shown = (
                    {"type": "text", "text": f"{page}\n\n"} if isinstance(page, str) else make_part(page, field=field)
                )
                parts.append(shown)
        if any(map(_is_shown, parts)):
            return {**message, "content": parts}
        return {**message, "content": "".join(str(one["text"]) for one in parts if isinstance(one, Mapping))}

    def take_text(self, request: TextRequest) -> tuple[str, Shown]:
        """Return a prompt with marks in place of each MEDIA, and the pictures. Raises InvalidRequest."""
        pieces = str(request.prompt).split(MEDIA)
        if len(pieces) - 1 != len(request.pictures):
            raise InvalidRequest(
                request.pictures_field, f"has {len(request.pictures)} pictures for {len(pieces) - 1} places {MEDIA}"
            )
        fields = [f"{request.pictures_field}[{index}]" for index in range(len(request.pictures))]
        files = [self._fetch(one, field, is_shown=True) for one, field in zip(request.pictures, fields, strict=True)]
        marks = [f"\uf8fe{secrets.token_hex(8)}{index}\uf8fe" for index in range(len(files))]
        text = "".join(part for pair in zip(pieces, [*marks, ""], strict=True) for part in pair)
        return text, Shown(self._decode(files, fields, [{}] * len(files)), marks)

    def _decode(
        self, files: Sequence[bytes], fields: Sequence[str], asked: Sequence[Mapping[str, object]]
    ) -> list[Spelt]:
        """Return pictures and sounds as the model is shown them, each in the words of the model."""
        heard = [place for place, data in enumerate(files) if is_sound(data)]
        sounds = self._hear([files[place] for place in heard], [fields[place] for place in heard]) if heard else []
        pictures = {place: self._spell(one, asked[place]) for place, one in zip(heard, sounds, strict=True)}
        spec = self._spec
        for low in (False, True):
            lows = [part.get("detail") == "low" for part in asked]
            chosen = [place for place in range(len(files)) if place not in heard and lows[place] is low]
            if not chosen or spec is None:
                continue
            tokens = min(self._most_tokens, LOW_TOKENS) if low else self._most_tokens
            own = [files[place] for place in chosen], [fields[place] for place in chosen]
            made = self._decoder.decode(*own, spec.choose_rule(tokens))
            for place, one in zip(chosen, made, strict=True):
                seen = [Picture(tile, spec.find_grid(tile), self._read_fingerprint()) for tile in one.tiles]
                words = spec.words.spell(one.grid, len(seen), seen[-1].grid[0])
                pictures[place] = Spelt(words, [part for picture in seen for part in self._part(picture)])
        return [pictures[place] for place in range(len(files))]

    def _hear(self, files: Sequence[bytes], fields: Sequence[str]) -> list[Prepared]:
        if self._ear is None:
            raise InvalidRequest(fields[0], f"is a sound, and this model does not hear: {self._deaf}")
        return self._decoder.decode(files, fields, self._ear.rule)

    def _spell(self, sound: Prepared, part: Mapping[str, object]) -> Spelt:
        """Return the pieces of a sound, or the one that is asked for."""
        ear, piece = self._ear, part.get("piece")
        assert ear is not None
        tiles = sound.tiles if not isinstance(piece, int) else sound.tiles[piece : piece + 1]
        heard = [Picture(tile, (ear.count_rows(tile), 1), self._read_fingerprint()) for tile in tiles]
        return Spelt(ear.words.spell((1, 1), 1, 1) * len(heard), [Part(one) for one in heard])

    def _part(self, picture: Picture) -> list[Part]:
        lines, columns = picture.grid
        if self._spec is None or not self._spec.words.row_break:
            return [Part(picture)]
        return [Part(picture, line * columns, columns) for line in range(lines)]

    def place(self, token_ids: list[int], pictures: Sequence[Part]) -> tuple[list[int], Pictures | None]:
        """Return the prompt with a token for each row of the pictures, and their places."""
        if not pictures:
            return token_ids, None
        ids = self._place_ids
        if [one for one in token_ids if one in ids] != [ids[part.picture.is_sound] for part in pictures]:
            raise InvalidRequest(
                "messages", "become a prompt with places besides those of its pictures, which cannot be told apart"
            )
        placed, spread, waiting = list[Placed](), list[int](), iter(pictures)
        for token_id in token_ids:
            if token_id not in ids:
                spread.append(token_id)
                continue
            part = next(waiting)
            placed.append(Placed(part.picture, len(spread), part.first, part.rows))
            spread += [token_id] * (placed[-1].stop - placed[-1].start)
        return spread, Pictures(tuple(placed), len(spread))

"""Responses that a later request may go on from: kept in memory, bounded in bytes, the least recently used go first.

Nothing is written to disk, so a restart forgets them. A response belongs to the API key that asked for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mlxr.server.errors import ServerError
from mlxr.server.openai.response_input import InputItem, read_items
from mlxr.server.openai.response_reply import ResponseReply


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, what was asked for it alone, and what it gave as a later request would send it back."""

    owner: str | None
    response: ResponseReply
    input: tuple[InputItem, ...]
    output: tuple[InputItem, ...]
    size_bytes: int


class ResponseStore:
    """Responses by id. Belongs to the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[str, tuple[str, InputItem]] = {}  # id of an output item → id of its response, the item

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def keep(self, owner: str | None, response: ResponseReply, given: Sequence[InputItem]) -> None:
        """Keep a response that has ended, unless it is larger than the store."""
        whole = [item for item in response.output if item.status != "incomplete" or item.type == "message"]
        output = tuple(read_items([item.model_dump(exclude_none=True) for item in whole]))
        size_bytes = len(response.model_dump_json()) + sum(len(item.model_dump_json()) for item in given)
        if size_bytes > self._max_bytes:
            return
        self._kept[response.id] = Kept(owner, response, tuple(given), output, size_bytes)
        self._items |= {item.id: (response.id, read) for item, read in zip(whole, output, strict=True)}
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def find(self, owner: str | None, response_id: str, field: str = "response_id") -> Kept:
        """A response of this owner; raises ServerError 404."""
        kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner:
            message = f"Response with id {response_id[:80]!r} not found: it was not kept, or is kept no longer"
            raise ServerError(404, "not_found", message, field)
        self._kept.move_to_end(response_id)
        return kept

    def find_history(self, owner: str | None, response_id: str) -> list[InputItem]:
        """All that was said until the end of a response; raises ServerError 400 where a part is not there."""
        turns: list[Kept] = []
        following: str | None = response_id
        while following is not None:
            try:
                turns.append(self.find(owner, following))  # the earliest is touched last: it goes after its followers
            except ServerError as error:
                field = "previous_response_id"
                raise ServerError(400, "previous_response_not_found", f"{field}: {error.message}", field) from None
            following = turns[-1].response.previous_response_id
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def find_item(self, owner: str | None, item_id: str) -> InputItem | None:
        """An item of the output of a response of this owner."""
        response_id, item = self._items.get(item_id, ("", None))
        kept = self._kept.get(response_id)
        return item if kept is not None and kept.owner == owner else None

    def delete(self, owner: str | None, response_id: str) -> None:
        """Forget a response; raises ServerError 404."""
        self.find(owner, response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._bytes -= kept.size_bytes
        for item in kept.response.output:
            self._items.pop(item.id, None)

"""Plain prompts as token ids: text, in which special tokens count as such, or ids that a caller has already."""

from __future__ import annotations

from collections.abc import Sequence

from mlxr.core.errors import InvalidRequest
from mlxr.service.messages import Message as Message
from mlxr.tokenizers import Tokenizer

Prompt = str | Sequence[int]


def encode_prompt(
    tokenizer: Tokenizer, vocab_size: int, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Token ids of a prompt; raises InvalidRequest for an empty one, for text that is not Unicode and for ids
    outside the vocabulary.
    """
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt, add_special=add_special, parse_special=parse_special)
        except InvalidRequest as error:
            raise InvalidRequest("prompt", error.reason) from None
    else:
        ids = [_check_token_id(value, vocab_size) for value in prompt]
    if not ids:
        raise InvalidRequest("prompt", "is empty, and the model has no BOS token to start from")
    return ids


def find_message_ends(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Positions at which the messages of a prompt end, as far as its special tokens tell; where others may part from
    it.

    Templates close messages with the token that ends an answer. In a prompt that has none of these, every other special
    token counts as the beginning of something.
    """
    found = set(token_ids)
    ends = found & tokenizer.eos_ids
    if ends:
        return tuple(place + 1 for place, token_id in enumerate(token_ids) if token_id in ends)
    starts = {token_id for token_id in found if tokenizer.is_special(token_id)}
    return tuple(place for place, token_id in enumerate(token_ids) if place and token_id in starts)


def _check_token_id(value: object, vocab_size: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidRequest("prompt", f"must be text or token ids, got a {type(value).__name__} among the ids")
    token_id = int(value.__index__())
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest("prompt", f"token id {token_id} is outside the vocabulary of {vocab_size}")
    return token_id

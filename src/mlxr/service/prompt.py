"""From what a caller asks to token ids: plain prompts, ready token ids, and conversations through the chat template.

Knows the tokenizer and the template, not the engine. Special tokens written in a plain prompt or by the template
count as such; BOS is added where the vocabulary wants it and the template did not write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxr.core.errors import InvalidRequest, TemplateError
from mlxr.tokenizers import ChatTemplate, Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, object]


def encode_prompt(
    tokenizer: Tokenizer, vocab_size: int, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Token ids of a prompt; raises InvalidRequest for an empty one and for ids outside the vocabulary."""
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=add_special, parse_special=parse_special)
    else:
        ids = [_check_token_id(value, vocab_size) for value in prompt]
    if not ids:
        raise InvalidRequest("prompt", "is empty, and the model has no BOS token to start from")
    return ids


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate | None, messages: Sequence[Message], model_name: str
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn.

    Raises TemplateError for a model without a chat template, InvalidRequest for messages that are none.
    """
    checked = check_messages(messages)
    if template is None:
        raise TemplateError(
            f"{model_name} has no chat template, so it can continue text but not chat; "
            "use plain completion (`mlxr run --raw`, `LLM.generate`)"
        )
    text = template.render(checked)
    has_bos = tokenizer.bos_id is not None and text.startswith(tokenizer.token_text(tokenizer.bos_id))
    ids = tokenizer.encode(text, add_special=not has_bos, parse_special=True)
    if not ids:
        raise InvalidRequest("messages", "the chat template made an empty prompt of them")
    return ids


def check_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages with a role and text each; content given as a list of text parts is joined. Raises InvalidRequest."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", "must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidRequest("messages", "is empty; a conversation needs at least one message")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Message, field: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be a mapping with role and content, got {type(message).__name__}")
    unknown = set(message) - {"role", "content"}
    if unknown:
        raise InvalidRequest(f"{field}.{min(unknown)}", "is not supported; a message has role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{field}.role", f"must be a name such as 'user', got {role!r}")
    return {"role": role, "content": _join_content(message.get("content"), f"{field}.content")}


def _join_content(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(field, f"must be text or a list of text parts, got {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{field}[{index}]", "must be {'type': 'text', 'text': ...}; other parts are not supported"
            )
        texts.append(text)
    return "".join(texts)


def _check_token_id(value: object, vocab_size: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidRequest("prompt", f"must be text or token ids, got {value!r} among the ids")
    token_id = int(value.__index__())
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest("prompt", f"token id {token_id} is outside the vocabulary of {vocab_size}")
    return token_id

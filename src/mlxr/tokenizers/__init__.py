"""Text to token ids and back, and conversations to prompts.

From GGUF metadata, a `tokenizer.json` or a `tokenizer.model`. Knows no models and no weights: metadata comes in as a
mapping, a folder as a path.
"""

from __future__ import annotations

from mlxr.tokenizers.chat_template import (
    ChatTemplate,
    chat_template_from_folder,
    chat_template_from_gguf,
    chat_template_from_source,
    refuse_chat,
)
from mlxr.tokenizers.conversion import to_gguf_metadata
from mlxr.tokenizers.folder import from_folder
from mlxr.tokenizers.gguf import from_gguf
from mlxr.tokenizers.vocabulary import Detokenizer, Tokenizer, TokenType

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "TokenType",
    "Tokenizer",
    "chat_template_from_folder",
    "chat_template_from_gguf",
    "chat_template_from_source",
    "from_folder",
    "from_gguf",
    "refuse_chat",
    "to_gguf_metadata",
]

"""The files of a model that is to run, opened and read, but for its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxr.core.errors import ModelError, TemplateError, TokenizerError
from mlxr.formats import GGUFFile, SafetensorsFolder, open_gguf, open_safetensors
from mlxr.kernels.tensor import TensorSource
from mlxr.model_files.pooling import read_folder_pooling, read_gguf_pooling
from mlxr.model_files.tensors import read_contents
from mlxr.models import Model, list_unknown_keys
from mlxr.tokenizers import (
    ChatTemplate,
    Tokenizer,
    chat_template_from_folder,
    chat_template_from_gguf,
    from_folder,
    from_gguf,
)

logger = logging.getLogger(__name__)
MAX_SHOWN_KEYS = 8


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Errors about what a model's files say begin with its path, unless they name it already."""
    try:
        yield
    except (ModelError, TokenizerError, TemplateError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model: its tensors by their names in GGUF, its configuration and its tokenizer.

    `pooling` is how its files say that texts become vectors, None where they say nothing.
    """

    file: GGUFFile | SafetensorsFolder
    tensors: Mapping[str, TensorSource]
    config: Model
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    pooling: str | None


def open_model_files(path: Path) -> ModelFiles:
    """Open the files of a model; raises FormatError, ModelError or TokenizerError, naming the path."""
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> ModelFiles:
    file = open_gguf(path)
    try:
        with name_in_errors(path):
            contents = read_contents(file)
            unknown = list_unknown_keys(file.metadata, file.tensors)
            if unknown:
                shown = ", ".join([*unknown[:MAX_SHOWN_KEYS], *["..."] * (len(unknown) > MAX_SHOWN_KEYS)])
                logger.warning("%s: has keys that mlxr does not know and that have no effect: %s", path, shown)
            tokenizer = from_gguf(file.metadata)
            template = chat_template_from_gguf(file.metadata, tokenizer)
            pooling = read_gguf_pooling(file.metadata)
            return ModelFiles(file, contents.tensors, contents.config, tokenizer, template, pooling)
    except BaseException:
        file.close()
        raise


def _open_folder(path: Path) -> ModelFiles:
    file = open_safetensors(path)
    try:
        with name_in_errors(path):
            contents = read_contents(file)
            tokenizer = from_folder(path)
            template = chat_template_from_folder(path, tokenizer)
            pooling = read_folder_pooling(path)
            return ModelFiles(file, contents.tensors, contents.config, tokenizer, template, pooling)
    except BaseException:
        file.close()
        raise

"""Rules of a model's files for texts that become vectors: prompts that go before a text, and its length.

Folders of sentence-transformers have `config_sentence_transformers.json` with named prompts and the length in
`sentence_bert_config.json`; files that `mlxr convert` makes of them have both in keys of our own. Many models are
trained with prompts that only their model cards tell; those are in a table by the model's name, and never go before a
text unasked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.formats.safetensors import open_safetensors, read_json_object, read_torch_tensors
from mlxr.models.fields import OWN
from mlxr.models.limits import MAX_CONTEXT

PROMPTS_KEY, TOKENS_KEY = f"{OWN}embedding.prompts", f"{OWN}embedding.max_tokens"
MAX_PROMPTS, MAX_CHARACTERS = 256, 8192
_CONFIG = "config_sentence_transformers.json"
_LENGTHS = "sentence_*_config.json"  # * is the kind of the encoder
_RETRIEVE = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_REPRESENT = {"query": "Represent this sentence for searching relevant passages: ", "document": ""}
# The model cards' own words, for models whose files may not state them; the first name that fits counts.
_KNOWN: tuple[tuple[str, Mapping[str, str]], ...] = (
    (r"qwen3-embedding", {"query": _RETRIEVE, "document": ""}),
    (r"e5-.*instruct|e5-mistral", {"query": f"{_RETRIEVE} ", "document": ""}),
    (r"(^|[^a-z])e5-", {"query": "query: ", "document": "passage: "}),
    (r"bge-(small|base|large)-en", _REPRESENT),
    (r"bge-(small|base|large)-zh", {"query": "为这个句子生成表示以用于检索相关文章：", "document": ""}),
    (r"mxbai-embed-(large|2d)", _REPRESENT),
    (r"arctic-embed.*v2", {"query": "query: ", "document": ""}),
    (r"arctic-embed", _REPRESENT),
    (
        r"nomic-embed-text|modernbert-embed",
        {
            "query": "search_query: ",
            "document": "search_document: ",
            "classification": "classification: ",
            "clustering": "clustering: ",
        },
    ),
    (
        r"embedding-?gemma",
        {
            "query": "task: search result | query: ",
            "document": "title: none | text: ",
            "classification": "task: classification | query: ",
            "clustering": "task: clustering | query: ",
            "text-matching": "task: sentence similarity | query: ",
        },
    ),
)


Numbers = NDArray[np.float32]
TokenProduct = tuple[Numbers, Numbers]


@frozen
class TextRules:
    """`prompts` by their names, the name of the default one, and the most tokens of a text.

    With `leaves_prompts_out` means are over the tokens behind the prompt. `sparse` and `multi` are weights (n, hidden)
    and biases (n,) that make a number or a vector of the state of each token (bge-m3).
    """

    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    default_prompt: str | None = None
    max_tokens: int | None = None
    leaves_prompts_out: bool = False
    sparse: TokenProduct | None = field(default=None, compare=False)
    multi: TokenProduct | None = field(default=None, compare=False)

    def to_metadata(self) -> dict[str, object]:
        """Return the keys that say the same in a GGUF file."""
        stated: dict[str, object] = {}
        if self.prompts:
            words: dict[str, object] = {"prompts": dict(self.prompts), "default": self.default_prompt}
            words |= {"pooled": False} if self.leaves_prompts_out else {}
            stated[PROMPTS_KEY] = json.dumps(words, ensure_ascii=False)
        if self.max_tokens is not None:
            stated[TOKENS_KEY] = self.max_tokens
        return stated


def read_folder_rules(folder: Path, pooling_place: str, hidden: int) -> TextRules:
    """Return the rules of a folder, whose pooling is configured at `pooling_place`; ModelError names file and key.

    States have `hidden` numbers.
    """
    stated = _read(folder / _CONFIG)
    pooled = _read(folder / pooling_place)
    lengths = [_read(path).get("max_seq_length") for path in sorted(folder.glob(_LENGTHS))]
    length = next((one for one in lengths if one is not None), None)
    rules = _make_rules(stated.get("prompts"), stated.get("default_prompt_name"), length, _CONFIG)
    if not any(rules.prompts.values()):
        name = str(_read(folder / "config.json").get("_name_or_path") or "")
        place = folder.resolve()
        place = place.parent.parent if place.parent.name == "snapshots" else place  # of a hub's cache
        rules = TextRules(_find_known(f"{place.name}/{name}"), None, rules.max_tokens)
    return TextRules(
        rules.prompts,
        rules.default_prompt,
        rules.max_tokens,
        pooled.get("include_prompt") is False,
        sparse=_read_product(folder, "sparse_linear", hidden, outputs=1),
        multi=_read_product(folder, "colbert_linear", hidden),
    )


def _read_product(folder: Path, name: str, hidden: int, outputs: int | None = None) -> TokenProduct | None:
    """Return a linear layer beside the model, in a .safetensors or as torch writes it; None without such a file."""
    plain, torch = folder / f"{name}.safetensors", folder / f"{name}.pt"
    if plain.is_file():
        file = open_safetensors(plain)
        try:
            tensors = {key: tensor.to_float32() for key, tensor in file.tensors.items()}
        finally:
            file.close()
    elif torch.is_file():
        tensors = read_torch_tensors(torch)
    else:
        return None
    weight, bias = tensors.get("weight"), tensors.get("bias")
    fits = (
        weight is not None and weight.ndim == 2 and weight.shape[1] == hidden and weight.shape[0] in range(1, 1 << 16)
    )
    if weight is None or bias is None or not fits or bias.shape != weight.shape[:1] or outputs not in (None, len(bias)):
        raise ModelError(f"{name}: holds no weight ({outputs or 'n'}, {hidden}) with its bias")
    return weight, bias


def read_gguf_rules(metadata: Mapping[str, object]) -> TextRules:
    """Return the rules of a GGUF file; raises ModelError naming the key."""
    text, length = metadata.get(PROMPTS_KEY), metadata.get(TOKENS_KEY)
    words: object = {}
    if isinstance(text, str):
        try:
            words = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{PROMPTS_KEY} is no JSON: {error}") from None
    if not isinstance(words, Mapping):
        raise ModelError(f"{PROMPTS_KEY} must hold a JSON object")
    rules = _make_rules(words.get("prompts"), words.get("default"), length, PROMPTS_KEY)
    if rules.prompts:
        return replace(rules, leaves_prompts_out=words.get("pooled") is False)
    names = "/".join(str(metadata.get(f"general.{key}") or "") for key in ("name", "basename", "size_label"))
    return TextRules(_find_known(names), None, rules.max_tokens)


def _make_rules(prompts: object, default: object, length: object, place: str) -> TextRules:
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, Mapping) or len(prompts) > MAX_PROMPTS:
        raise ModelError(f"{place}: prompts must be an object of at most {MAX_PROMPTS} texts")
    for name, text in prompts.items():
        if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
            raise ModelError(f"{place}: prompts.{name:.40} must be a text of at most {MAX_CHARACTERS} characters")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ModelError(f"{place}: default_prompt_name is {default!r:.40}, which is none of its prompts")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ModelError(f"max_seq_length is {length!r:.40}, expected a whole number of at least 1")
    return TextRules(MappingProxyType(dict(prompts)), default, None if length is None else min(length, MAX_CONTEXT))


def _find_known(name: str) -> Mapping[str, str]:
    plain = re.sub(r"[\s_]+", "-", name.lower())
    return next((prompts for pattern, prompts in _KNOWN if re.search(pattern, plain)), {})


def _read(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.is_file() else {}

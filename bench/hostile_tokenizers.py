"""A small model with a tokenizer made to hurt its reader: each `index` always gives the same one.

Drawn at random are the kind of vocabulary and of pieces, patterns that backtrack, normalisers that multiply a text,
special tokens that overlap or are not there, numbers out of range, parts that are missing or of a wrong type.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np

VOCAB_SIZE, WIDTH, HIDDEN = 320, 32, 64
TEXT = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaab The quick\t brown\n\nfox 12345 ünï €漢字 \U0001f600 <s></s><x> " * 20
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PATTERNS = (
    r"(a+)+$",
    r"(a|a)*b",
    r"(\w+\s?)+\d",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+",
    r"(?:a{1,200}){1,200}",
    r"(",
    r"\s+(?!\S)|\s+",
    "",
)


def make_config() -> bytes:
    """The config.json of a Llama with one layer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return json.dumps(config).encode()


def make_weights() -> bytes:
    """The weights of the model as a safetensors file."""
    draw, layer = np.random.default_rng(0), "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB_SIZE, WIDTH),
        layer + "input_layernorm.weight": (WIDTH,),
        layer + "post_attention_layernorm.weight": (WIDTH,),
        layer + "self_attn.q_proj.weight": (WIDTH, WIDTH),
        layer + "self_attn.k_proj.weight": (WIDTH // 2, WIDTH),
        layer + "self_attn.v_proj.weight": (WIDTH // 2, WIDTH),
        layer + "self_attn.o_proj.weight": (WIDTH, WIDTH),
        layer + "mlp.gate_proj.weight": (HIDDEN, WIDTH),
        layer + "mlp.up_proj.weight": (HIDDEN, WIDTH),
        layer + "mlp.down_proj.weight": (WIDTH, HIDDEN),
    }
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        values = draw.normal(size=shape).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def make_tokenizer(index: int) -> bytes:
    """Make the tokenizer.json number `index`."""
    draw = random.Random(index)
    model = _make_model(draw)
    value: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _make_added(draw, model["vocab"]),
        "normalizer": _make_normalizer(draw),
        "pre_tokenizer": _make_pre_tokenizer(draw),
        "post_processor": draw.choice([None, dict(BYTE_LEVEL)]),
        "decoder": _seldom(draw, dict(BYTE_LEVEL), None, {"type": "Fuse"}, {"type": "Nothing"}),
        "model": model,
    }
    for _ in range(draw.choice([0, 0, 0, 0, 1, 2])):
        _spoil(draw, value)
    text = json.dumps(value)
    if draw.random() < 0.05:
        text = text[: draw.randrange(len(text))]
    return text.encode()


def _seldom(draw: random.Random, usual: Any, *others: Any) -> Any:
    """Return the usual value, and now and then one that a reader may refuse."""
    return draw.choice(others) if draw.random() < 0.06 else usual


def _make_added(draw: random.Random, vocab: dict[str, int] | list[Any]) -> list[dict[str, Any]]:
    known = dict(vocab) if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    contents = ["<s>", "</s>", "<x>", "a", " ", "\n", "aaaa" * draw.choice([1, 500]), "<s></s>"]
    contents += [f"<t{number}>" for number in range(draw.choice([0, 0, 3, 2000]))]
    chosen = contents[: draw.choice([2, 3, len(contents)])]
    ids = [known.setdefault(content, len(known)) for content in chosen]
    return [
        {
            "id": _seldom(draw, ids[number], -1, 10**9, 1) if len(ids) < 10 else ids[number],
            "content": content,
            "single_word": draw.random() < 0.1,
            "lstrip": draw.random() < 0.2,
            "rstrip": draw.random() < 0.2,
            "normalized": draw.random() < 0.3,
            "special": draw.random() < 0.7,
        }
        for number, content in enumerate(chosen)
    ]


def _make_normalizer(draw: random.Random) -> dict[str, Any] | None:
    times = _seldom(draw, draw.choice([0, 1, 2, 10]), 10_000)
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * times}
    kinds = [
        None,
        {"type": "NFKC"},
        {"type": "Prepend", "prepend": "x" * _seldom(draw, 1, 100_000)},
        replace,
        {"type": "Replace", "pattern": {"Regex": draw.choice(_PATTERNS)}, "content": "aa"},
        {"type": "Sequence", "normalizers": [replace] * _seldom(draw, 1, 5, 40)},
    ]
    return draw.choice(kinds)


def _make_pre_tokenizer(draw: random.Random) -> dict[str, Any] | None:
    split = {
        "type": "Split",
        "pattern": {"Regex": draw.choice(_PATTERNS)},
        "behavior": draw.choice(["Isolated", "Removed", "MergedWithNext", "Contiguous"]),
        "invert": draw.random() < 0.2,
    }
    kinds = [
        None,
        {**BYTE_LEVEL, "add_prefix_space": draw.random() < 0.5, "use_regex": draw.random() < 0.5},
        split,
        {"type": "Sequence", "pretokenizers": [split] * draw.choice([1, 3, 50])},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ]
    return draw.choice(kinds)


def _make_model(draw: random.Random) -> dict[str, Any]:
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *letters])}
    merges: list[object] = []
    writes_text = draw.random() < 0.5
    pieces = [*letters]
    while len(vocab) < draw.choice([VOCAB_SIZE, VOCAB_SIZE, 250, 5000]) and len(vocab) < VOCAB_SIZE * 20:
        left, right = draw.choice(pieces), draw.choice(pieces)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append(f"{left} {right}" if writes_text else [left, right])
            pieces.append(left + right)
    if draw.random() < 0.1:
        scores = [[text, draw.choice([-1.0, 0.0, -1e308])] for text in vocab]
        return {"type": "Unigram", "unk_id": draw.choice([0, None, 10**6]), "vocab": scores, "byte_fallback": True}
    return {
        "type": _seldom(draw, "BPE", "WordPiece", "WordLevel", "Other"),
        "dropout": _seldom(draw, None, 0.5, 2.0),
        "unk_token": draw.choice([None, "<unk>", "<unk>", "<nobody>"]),
        "continuing_subword_prefix": _seldom(draw, None, "", "##"),
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": draw.random() < 0.3,
        "vocab": vocab,
        "merges": merges,
        "max_input_chars_per_word": draw.choice([100, 10**9]),
    }


def _spoil(draw: random.Random, value: dict[str, Any]) -> None:
    """Remove a part, or replace it."""
    place: Any = value
    for _ in range(draw.randrange(1, 4)):
        key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.4:
            place[key] = draw.choice([None, "", -1, [], {}, 1e300, "x" * 9999, [[[]]], True])
            return
        place = inner

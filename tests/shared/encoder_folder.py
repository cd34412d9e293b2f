"""Tiny folders of encoders: random weights of a golden's shapes, WordPiece or Unigram, and modules of
sentence-transformers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

GOLDENS = Path(__file__).parents[1] / "models" / "encoder_goldens"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "where",
    "is",
    "paris",
    "capital",
    "of",
    "france",
    "berlin",
    "germany",
    "rain",
    "falls",
]


def write_word_piece(folder: Path) -> int:
    """Write BERT's tokenizer with a few words and all letters; return the size of its vocabulary."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS, *(f"##{one}" for one in LETTERS)]
    texts += [".", "?", ",", "##ing", "##s", *"0123456789"]
    vocab = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.add_special_tokens(texts[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles | {"mask_token": "[MASK]"}))
    return len(vocab)


def write_unigram(folder: Path) -> int:
    """Write XLM-RoBERTa's tokenizer with a few pieces; return the size of its vocabulary."""
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*(f"▁{word}" for word in WORDS), "▁", *LETTERS, *(f"▁{one}" for one in LETTERS), ".", "?"]
    scored = [(text, 0.0) for text in specials]
    scored += [(text, -1.0 - index / 10 - (len(text) < 3) * 5) for index, text in enumerate(dict.fromkeys(pieces))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scored, 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace("▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return len(scored)


def make_encoder_folder(folder: Path, case: str, modules: tuple[str, ...] = (), **changes: Any) -> Path:
    """A folder with the shapes of a golden, and with `modules` of sentence-transformers behind the encoder."""
    folder.mkdir(exist_ok=True)
    stated = json.loads((GOLDENS / case / "model.json").read_text())
    size = (write_unigram if case.startswith(("xlm", "jina-v3")) else write_word_piece)(folder)
    config = stated["config"] | {"vocab_size": size} | changes
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, shape in stated["shapes"].items():
        own = [size, *shape[1:]] if shape[0] == stated["config"]["vocab_size"] else shape
        random = np.random.RandomState(zlib.crc32(name.encode()))
        weights[name] = random.standard_normal(own).astype(np.float32) / np.float32(np.sqrt(own[-1]) / 2)
    safetensors.numpy.save_file(weights, str(folder / "model.safetensors"))
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, module in enumerate(modules, 1):
        kind, path = module.partition(":")[0], f"{index}_{module.partition(':')[0]}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        if kind == "Pooling":
            stated_pooling = {f"pooling_mode_{module.partition(':')[2]}": True, "word_embedding_dimension": 64}
            (folder / path / "config.json").write_text(json.dumps(stated_pooling))
        if kind == "Dense":
            activation = f"torch.nn.modules.activation.{module.partition(':')[2]}"
            dense = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": activation}
            (folder / path / "config.json").write_text(json.dumps(dense))
            random = np.random.RandomState(index)
            parts = {"linear.weight": random.standard_normal((24, 64)) / 8, "linear.bias": random.standard_normal(24)}
            safetensors.numpy.save_file(
                {name: value.astype(np.float32) for name, value in parts.items()},
                str(folder / path / "model.safetensors"),
            )
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder

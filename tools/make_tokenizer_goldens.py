"""Make the vocabularies and the golden ids that the tokenizer tests compare with.

Trains three small vocabularies on Python's own library and a few sentences in many scripts: one SentencePiece BPE with
byte fallback, and two byte-level BPE with different pre-tokenizers. Then asks llama.cpp for the ids of many strings,
through a GGUF file that the `gguf` package writes from `to_gguf_metadata`. Needs the peers' environment:

    PYTHONPATH=src .venv-peers/bin/python tools/make_tokenizer_goldens.py [--keep-vocabularies]
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import inspect
import io
import json
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "tokenizers" / "goldens"
CASES_FILE = FOLDER / "cases.json.gz"
SEED = 20_240
STRINGS = 1_200
BPE_NAMES = ("llama3", "qwen2")
NAMES = ("spm", *BPE_NAMES)

SENTENCES = """
The quick brown fox jumps over the lazy dog, doesn't it? I'm sure they'll say we've seen 1,234,567 of them.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Příliš žluťoučký kůň úpěl ďábelské ódy.
Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë au delà des îles. El pingüino Wenceslao.
Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
敏捷的棕色狐狸跳过懒狗。天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。我能吞下玻璃而不伤身体。
いろはにほへと ちりぬるを わかよたれそ つねならむ。私はガラスを食べられます。それは私を傷つけません。
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 나는 유리를 먹을 수 있어요.
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر. דג סקרן שט בים מאוכזב ולפתע מצא לו חברה.
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले. เป็นมนุษย์สุดประเสริฐเลิศคุณค่า
😀 😂 🤣 😊 👍🏽 👩‍💻 👨‍👩‍👧‍👦 🇩🇪 🇯🇵 ❤️ ✨ 🔥 ☕ ♟️ x² + y² ≤ z² ∀ε>0 ∃δ ½ Ⅷ ①②③ €42 £7 ¥100
"""

MARKERS = ("<s>", "</s>", "<unk>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<tool_call>")
CONTRACTIONS = ("I'm", "you'LL", "he's", "WE'VE", "they'd", "can't", "'S", "'re", "x'y", "'''", "o'clock", "'tis")
EMOJI = (*"😀🥲🫠🔥✨☕♟🧑🏽", "👍🏽", "👩‍💻", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "🇯🇵", "❤️", "1️⃣", "☝🏿", "🧑🏻‍❤️‍💋‍🧑🏿")
SPACES = (" ", " ", " ", "\n", "\n", "\t", "\r\n", "\r", "\u00a0", "\u3000", "\u2009", "\u2028", "\u200b", "\v", "\f")
SCRIPTS = (
    *((0x4E00, 0x9FA5), (0x3041, 0x3096), (0x30A1, 0x30FA), (0xAC00, 0xD7A3), (0x0400, 0x044F), (0x05D0, 0x05EA)),
    *((0x0621, 0x064A), (0x0905, 0x0939), (0x0E01, 0x0E30), (0x0391, 0x03C9), (0x10D0, 0x10FA), (0x20000, 0x2A6D0)),
)
COMBINING = (0x0300, 0x0301, 0x0303, 0x0308, 0x030A, 0x0323, 0x0327, 0x0338, 0x0651, 0x093C, 0x094D, 0x0E49, 0x20D7)


def make_strings(seed: int, count: int, python_lines: Sequence[str]) -> list[str]:
    """`count` different strings of every sort that tokenizers stumble over, always the same for a seed."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random], str]] = [
        _make_prose,
        _make_spaces,
        _make_emoji,
        _make_script,
        _make_combining,
        _make_numbers,
        _make_marked,
        _make_scattered,
        lambda chance: "\n".join(chance.choice(python_lines) for _ in range(chance.randint(1, 3))),
    ]
    strings: dict[str, None] = dict.fromkeys(["", " ", "\n", "a", "▁", "▁▁a ▁", "<0x0A>", "Ġ", "\x00", "é", "e\u0301"])
    while len(strings) < count:
        parts = [draw.choice(makers)(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        strings[draw.choice(("", " ", "\n")).join(parts)] = None
    return list(strings)


def _make_prose(draw: random.Random) -> str:
    words = [*SENTENCES.split(), *CONTRACTIONS]
    return " ".join(draw.choice(words) for _ in range(draw.randint(1, 8)))


def _make_spaces(draw: random.Random) -> str:
    pieces = []
    for _ in range(draw.randint(1, 5)):
        pieces.append(draw.choice(SPACES) * draw.choice((1, 1, 2, 3, 4, 8, 17)))
        pieces.append(draw.choice(("", "x", "word", "1", ".", "//", "中", "é")))
    return "".join(pieces)


def _make_emoji(draw: random.Random) -> str:
    return draw.choice(("", " ")).join(draw.choice((*EMOJI, "a", "ok")) for _ in range(draw.randint(1, 6)))


def _make_script(draw: random.Random) -> str:
    low, high = draw.choice(SCRIPTS)
    return "".join(
        chr(draw.randint(low, high)) if draw.random() < 0.85 else draw.choice(" ，。a1")
        for _ in range(draw.randint(1, 14))
    )


def _make_combining(draw: random.Random) -> str:
    text = unicodedata.normalize(draw.choice(("NFD", "NFC")), draw.choice(SENTENCES.split()))
    marks = "".join(chr(draw.choice(COMBINING)) for _ in range(draw.randint(0, 4)))
    return draw.choice(("", " ")) + text + marks + draw.choice(("", "a", " b"))


def _make_numbers(draw: random.Random) -> str:
    digits = "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 12)))
    return draw.choice(
        (digits, f" {digits}", f"-{digits}.{digits[:3]}e+7", f"${digits},{digits}%", f"٣٤٥{digits}", "Ⅷ①²½" + digits)
    )


def _make_marked(draw: random.Random) -> str:
    pieces = []
    for _ in range(draw.randint(1, 4)):
        pieces.append(draw.choice(MARKERS))
        pieces.append(draw.choice(("", "", " ", "text", " text", "\n", "<", "|>", "user\nHi", "  x ")))
    return "".join(pieces)[draw.choice((0, 0, 0, 1)) :]


def _make_scattered(draw: random.Random) -> str:
    """Characters of all sorts, assigned so long ago that their classes are the same in all Unicode versions."""
    characters = []
    while len(characters) < draw.choice((3, 6, 10)):
        character = chr(draw.choice((draw.randint(1, 0x7F), draw.randint(0x80, 0x2FFF), draw.randint(0x2FF0, 0x1F6FF))))
        if unicodedata.ucd_3_2_0.category(character) not in ("Cn", "Cs", "Co"):
            characters.append(character)
    return "".join(characters)


def list_python_sources() -> list[str]:
    """Sources of a few modules of the standard library, whole."""
    import argparse as m1
    import ast as m2
    import collections as m3
    import dataclasses as m4
    import os as m5
    import pathlib as m6
    import string as m7
    import textwrap as m8

    modules: tuple[ModuleType, ...] = (m1, m2, m3, m4, m5, m6, m7, m8)
    return [inspect.getsource(module) for module in modules]


def list_python_lines() -> list[str]:
    """Lines of code of moderate length."""
    return sorted({line for source in list_python_sources() for line in source.splitlines() if 0 < len(line) < 90})


def train_spm(folder: Path, texts: Sequence[str]) -> None:
    """A SentencePiece BPE like Llama's: identity normaliser, space before the text, byte fallback."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.splitlines() if line.strip()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=1_400,
        character_coverage=0.995,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<tool_call>"],
        max_sentence_length=100_000,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": True}
    _write_json(folder / "tokenizer_config.json", config)


def train_bpe(folder: Path, name: str, texts: Sequence[str]) -> None:
    """A byte-level BPE that cuts words like Llama 3 or Qwen 2, with a few of their special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from mlxr.tokenizers.library import find_pre_type

    folder.mkdir(parents=True, exist_ok=True)
    row = find_pre_type({"llama3": "llama-bpe"}.get(name, name))
    library = Tokenizer(models.BPE(ignore_merges=row.ignore_merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(row.patterns[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1_300, initial_alphabet=alphabet, show_progress=False)
    )
    if name == "llama3":
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        bos = f"{specials[0]}"
        config: dict[str, object] = {"bos_token": bos, "eos_token": "<|eot_id|>"}
    else:
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        config = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    if name == "llama3":
        bos_id = library.token_to_id(bos)
        library.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    _write_json(folder / "tokenizer.json", json.loads(library.to_str()))
    _write_json(folder / "tokenizer_config.json", config)


def write_merges_twin(source: Path, folder: Path) -> None:
    """Write the SentencePiece vocabulary again as a tokenizer.json with merges, as in Llama-2-like models."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(source / "tokenizer.model"))
    vocab = {pieces.IdToPiece(index): index for index in range(len(pieces))}
    special = {"<unk>", "<s>", "</s>"}
    normal = {text for text, index in vocab.items() if not pieces.IsByte(index) and text not in special}
    pairs = [
        (-pieces.GetScore(vocab[text]), vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
        for text in normal
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(special)])
    library.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    _write_json(folder / "tokenizer.json", json.loads(library.to_str()))
    _write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def write_vocabulary_gguf(path: Path, metadata: Mapping[str, Any]) -> None:
    """A GGUF file with a vocabulary and no tensors, written by the `gguf` package."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode_with_peer(metadata: Mapping[str, Any], strings: Sequence[str], special: bool) -> Iterator[list[int]]:
    """The ids that llama.cpp gives the strings, BOS included if the vocabulary wants it."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        write_vocabulary_gguf(file, metadata)
        peer = llama_cpp.Llama(model_path=str(file), vocab_only=True, verbose=False)
        for text in strings:
            yield peer.tokenize(text.encode(), add_bos=True, special=special)
        peer.close()


def _ignore_log(level: int, text: bytes, data: object) -> None:
    """Drop llama.cpp's log, which would repeat a warning for every string."""
    del level, text, data


def main() -> None:
    """Train the tokenizers, ask llama.cpp for the token ids, and write both as test data."""
    import llama_cpp

    from mlxr.tokenizers import to_gguf_metadata

    silent = llama_cpp.llama_log_callback(_ignore_log)  # kept alive while llama.cpp may call it
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep-vocabularies", action="store_true", help="ask for ids again, train nothing")
    arguments = parser.parse_args()
    if not arguments.keep_vocabularies:
        texts = [SENTENCES * 20, *list_python_sources()]
        train_spm(FOLDER / "spm", texts)
        write_merges_twin(FOLDER / "spm", FOLDER / "spm-merges")
        for name in BPE_NAMES:
            train_bpe(FOLDER / name, name, texts)
    strings = make_strings(SEED, STRINGS, list_python_lines())
    cases: dict[str, Any] = {"strings": strings, "plain": {}, "special": {}}
    for name in NAMES:
        metadata = to_gguf_metadata(FOLDER / name)
        cases["plain"][name] = list(encode_with_peer(metadata, strings, special=False))
        cases["special"][name] = list(encode_with_peer(metadata, strings, special=True))
    data = json.dumps(cases, ensure_ascii=False, separators=(",", ":")).encode()
    CASES_FILE.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{len(strings)} strings, {CASES_FILE.stat().st_size} bytes")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

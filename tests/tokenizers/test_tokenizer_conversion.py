"""The keys of a GGUF file from a model folder: kinds recognised, scores restored, rules kept, the rest refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxr.core.errors import NotFound, TokenizerError
from mlxr.tokenizers import from_folder, from_gguf, to_gguf_metadata
from mlxr.tokenizers.library import GPT2_PATTERN, PRE_TYPES, find_pre_type

MakeFolder = Callable[[dict[str, Any]], Path]
LoadJson = Callable[[str], dict[str, Any]]
PREFIX = "tokenizer.ggml."


def test_keys_of_a_byte_level_vocabulary(golden_folder: Path) -> None:
    metadata = to_gguf_metadata(golden_folder / "llama3")
    assert metadata[f"{PREFIX}model"] == "gpt2"
    assert metadata[f"{PREFIX}pre"] == "llama-bpe"
    assert metadata[f"{PREFIX}add_bos_token"] is True
    assert metadata[f"{PREFIX}add_eos_token"] is False
    tokens, types = metadata[f"{PREFIX}tokens"], metadata[f"{PREFIX}token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert tokens[metadata[f"{PREFIX}bos_token_id"]] == "<|begin_of_text|>"
    assert tokens[metadata[f"{PREFIX}eos_token_id"]] == "<|eot_id|>"
    assert types[tokens.index("<|eot_id|>")] == 3
    assert types[tokens.index("<tool_call>")] == 4
    assert f"{PREFIX}scores" not in metadata
    assert to_gguf_metadata(golden_folder / "qwen2")[f"{PREFIX}pre"] == "qwen2"


def test_keys_of_a_sentencepiece_vocabulary(golden_folder: Path) -> None:
    metadata = to_gguf_metadata(golden_folder / "spm")
    assert metadata[f"{PREFIX}model"] == "llama"
    assert metadata[f"{PREFIX}add_space_prefix"] is True
    types = metadata[f"{PREFIX}token_type"]
    assert isinstance(types, list)
    assert types[:4] == [2, 3, 3, 4]
    assert types.count(6) == 256
    assert metadata[f"{PREFIX}unknown_token_id"] == 0


@pytest.mark.parametrize("row", PRE_TYPES, ids=lambda row: row.names[0])
def test_every_family_is_recognised(row: Any, make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("llama3")
    data["model"]["ignore_merges"] = row.ignore_merges
    last = row.patterns[-1] == GPT2_PATTERN
    cuts = row.patterns[:-1] if last else row.patterns
    data["pre_tokenizer"]["pretokenizers"] = [
        *({"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False} for text in cuts),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": last},
    ]
    metadata = to_gguf_metadata(make_folder({"tokenizer.json": data}))
    exact = next(r for r in PRE_TYPES if (r.patterns, r.ignore_merges) == (row.patterns, row.ignore_merges))
    # the merges of this vocabulary make every token, so it does not matter that they may be ignored
    usual = next(r for r in PRE_TYPES if (r.patterns, r.add_bos) == (exact.patterns, exact.add_bos))
    assert metadata[f"{PREFIX}pre"] == usual.names[0]


def test_whether_merges_are_ignored_is_no_matter_where_they_make_every_token(
    make_folder: MakeFolder, load_json: LoadJson
) -> None:
    """gpt-oss's folder says that they are; files with its way of cutting do not have its name."""
    data, row = load_json("qwen2"), find_pre_type("gpt-4o")
    data["model"]["ignore_merges"] = True
    part = data["pre_tokenizer"]["pretokenizers"][0]
    own, part["pattern"] = part["pattern"], {"Regex": row.patterns[0]}
    folder = make_folder({"tokenizer.json": data})
    metadata = to_gguf_metadata(folder)
    assert metadata[f"{PREFIX}pre"] == "gpt-4o"
    text = "Hello, World's FooBar 12345 ÄÖ naïve\n\n x"
    assert from_gguf(metadata).encode(text) == from_folder(folder).encode(text)
    del data["model"]["merges"][-1]  # now one token is made by no merge
    metadata = to_gguf_metadata(make_folder({"tokenizer.json": data}))
    assert metadata[f"{PREFIX}pre"] == "granite-embed-multi-97m"
    part["pattern"] = own
    with pytest.raises(TokenizerError, match="known only with the other value of ignore_merges"):
        to_gguf_metadata(make_folder({"tokenizer.json": data}))


def test_other_spellings_of_the_same_cuts(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("qwen2")
    split = data["pre_tokenizer"]["pretokenizers"][0]
    split |= {
        "behavior": "Removed",
        "invert": True,
        "pattern": {"Regex": split["pattern"]["Regex"].replace(r"\n", "\n")},
    }
    data["normalizer"] = {"type": "NFC"}
    assert to_gguf_metadata(make_folder({"tokenizer.json": data}))[f"{PREFIX}pre"] == "qwen2"
    data["normalizer"] = None
    data["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    assert to_gguf_metadata(make_folder({"tokenizer.json": data}))[f"{PREFIX}pre"] == "smollm"
    data["pre_tokenizer"] = data["pre_tokenizer"]["pretokenizers"][1]
    assert to_gguf_metadata(make_folder({"tokenizer.json": data}))[f"{PREFIX}pre"] == "gpt-2"


@pytest.mark.parametrize(
    ("pre_tokenizer", "message"),
    [
        (
            {"type": "Split", "pattern": {"Regex": r"\w+|\W+"}, "behavior": "Isolated", "invert": False},
            r"the pre-tokenizer with patterns \['\\\\w\+\|\\\\W\+'\] and ignore_merges=true is not one",
        ),
        ({"type": "Punctuation", "behavior": "Isolated"}, "pre-tokenizer Punctuation .* is not supported in GGUF"),
        (
            {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "MergedWithNext", "invert": False},
            "pre-tokenizer Split .*MergedWithNext.* is not supported in GGUF",
        ),
        (
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "ByteLevel with add_prefix_space is not supported in GGUF",
        ),
    ],
)
def test_unknown_cuts_are_refused_by_name(
    pre_tokenizer: dict[str, Any], message: str, make_folder: MakeFolder, load_json: LoadJson
) -> None:
    data = load_json("llama3")
    if pre_tokenizer["type"] != "ByteLevel":
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [pre_tokenizer, byte_level]}
    data["pre_tokenizer"] = pre_tokenizer
    with pytest.raises(TokenizerError, match=message):
        to_gguf_metadata(make_folder({"tokenizer.json": data}))


def test_normalisers_that_change_texts_are_refused(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("llama3")
    data["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(TokenizerError, match="normalizer Lowercase is not supported in GGUF"):
        to_gguf_metadata(make_folder({"tokenizer.json": data}))
    data = load_json("spm-merges")
    data["normalizer"]["normalizers"].append({"type": "NFKC"})
    with pytest.raises(TokenizerError, match=r"normalizer NFKC .* is not supported in GGUF"):
        to_gguf_metadata(make_folder({"tokenizer.json": data}))


def test_spaces_of_newer_sentencepiece_files(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("spm-merges")
    data["normalizer"] = None
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    data["pre_tokenizer"] = metaspace
    folder = make_folder({"tokenizer.json": data})
    metadata = to_gguf_metadata(folder)
    assert metadata[f"{PREFIX}add_space_prefix"] is True
    assert from_gguf(metadata).encode("the first 中") == from_folder(folder).encode("the first 中")
    data["pre_tokenizer"] = metaspace | {"prepend_scheme": "never"}
    data["decoder"]["decoders"].pop()
    folder = make_folder({"tokenizer.json": data})
    metadata = to_gguf_metadata(folder)
    assert metadata[f"{PREFIX}add_space_prefix"] is False
    assert from_gguf(metadata).encode("the first") == from_folder(folder).encode("the first")
    assert from_folder(folder).decode(from_folder(folder).encode(" the")) == " the"
    # Gemma's way: spaces are marked by the normaliser, then there is none left to split at.
    data["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    assert to_gguf_metadata(make_folder({"tokenizer.json": data}))[f"{PREFIX}add_space_prefix"] is False


def test_merges_that_are_no_scores_are_refused(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("spm-merges")
    merges = data["model"]["merges"]
    made = [left + right for left, right in merges]
    twice = next(text for text in made if made.count(text) > 1)
    first = made.index(twice)
    lost = merges.pop(first)
    with pytest.raises(TokenizerError, match=f"make '{twice}' but no merge says so"):
        to_gguf_metadata(make_folder({"tokenizer.json": data}))
    merges.append(lost)
    with pytest.raises(TokenizerError, match=f"the merges that make '{twice}' are apart"):
        to_gguf_metadata(make_folder({"tokenizer.json": data}))


def test_the_model_must_have_room_for_the_tokens(make_folder: MakeFolder, load_json: LoadJson) -> None:
    files = {"tokenizer.json": load_json("llama3"), "config.json": {"vocab_size": 1300}}
    with pytest.raises(TokenizerError, match=r"token 1300 \('.*'\) is beyond the model's vocab_size 1300"):
        to_gguf_metadata(make_folder(files))
    files["config.json"] = {"vocab_size": 1400}
    metadata = to_gguf_metadata(make_folder(files))
    tokens, types = metadata[f"{PREFIX}tokens"], metadata[f"{PREFIX}token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert (len(tokens), tokens[-1], types[-1]) == (1400, "[PAD1399]", 5)
    assert from_gguf(metadata).vocab_size == 1400


def test_end_tokens_survive(make_folder: MakeFolder, load_json: LoadJson) -> None:
    files: dict[str, Any] = {
        "tokenizer.json": load_json("llama3"),
        "tokenizer_config.json": {"eos_token": "<|end_of_text|>"},
        "generation_config.json": {"eos_token_id": [7, 9]},
    }
    folder = make_folder(files)
    metadata = to_gguf_metadata(folder)
    assert (metadata[f"{PREFIX}eot_token_id"], metadata[f"{PREFIX}eom_token_id"]) == (7, 9)
    assert from_gguf(metadata).eos_ids == from_folder(folder).eos_ids
    files["generation_config.json"] = {"eos_token_id": [7, 9, 11]}
    with pytest.raises(TokenizerError, match="end an answer; GGUF can name EOS and two more"):
        to_gguf_metadata(make_folder(files))


def test_other_post_processors_are_refused(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("llama3")
    header = next(token["id"] for token in data["added_tokens"] if token["content"] == "<|start_header_id|>")
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|start_header_id|>", "type_id": 0}},
            {"SpecialToken": {"id": "<|start_header_id|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|start_header_id|>": {"id": "<|start_header_id|>", "ids": [header], "tokens": ["<|start_header_id|>"]}
        },
    }
    folder = make_folder({"tokenizer.json": data})
    assert from_folder(folder).encode("") == [header, header]
    with pytest.raises(TokenizerError, match="goes before every text; GGUF can say only BOS"):
        to_gguf_metadata(folder)


def test_sentencepiece_models_that_normalise_are_refused(make_folder: MakeFolder, golden_folder: Path) -> None:
    data = (golden_folder / "spm" / "tokenizer.model").read_bytes()
    for appended, message in (
        (b"\x1a\x0a\x0a\x08nmt_nfkc", "normalizer nmt_nfkc is not supported in GGUF"),
        (b"\x1a\x02\x20\x01", "remove_extra_whitespaces is not supported in GGUF"),
        (b"\x12\x02\x18\x01", "model type UNIGRAM is not supported in GGUF; supported is BPE"),
    ):
        with pytest.raises(TokenizerError, match=message):
            to_gguf_metadata(make_folder({"tokenizer.model": data + appended}))


def test_sentencepiece_models_with_added_tokens(make_folder: MakeFolder, golden_folder: Path) -> None:
    files = {
        "tokenizer.model": (golden_folder / "spm" / "tokenizer.model").read_bytes(),
        "added_tokens.json": {"<shown>": 1400},
        "tokenizer_config.json": {
            "added_tokens_decoder": {"1401": {"content": "<|im_end|>", "special": True}},
            "eos_token": "<|im_end|>",
        },
        "config.json": {"vocab_size": 1408},
    }
    folder = make_folder(files)
    converted = from_gguf(to_gguf_metadata(folder))
    text = "the<shown> and<|im_end|>the"
    assert converted.encode(text, parse_special=True) == from_folder(folder).encode(text, parse_special=True)
    assert (converted.vocab_size, converted.eos_ids) == (1408, {2, 1401})


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        to_gguf_metadata(tmp_path)


def test_chat_templates_come_along(make_folder: MakeFolder, load_json: LoadJson) -> None:
    files: dict[str, Any] = {"tokenizer.json": load_json("qwen2")}
    assert not [key for key in to_gguf_metadata(make_folder(files)) if "chat_template" in key]
    files["tokenizer_config.json"] = {
        "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    }
    metadata = to_gguf_metadata(make_folder(files))
    assert metadata["tokenizer.chat_template"] == "A"
    assert metadata["tokenizer.chat_template.tool_use"] == "B"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    files["chat_template.jinja"] = "C"
    assert to_gguf_metadata(make_folder(files))["tokenizer.chat_template"] == "C"


def test_markers_that_strip_mean_the_same_in_a_file_of_phi(make_folder: MakeFolder, load_json: LoadJson) -> None:
    """Phi-3's added tokens drop the white space after them, which a GGUF file says by its architecture alone."""
    data = load_json("spm-merges")
    first = 1 + max(token["id"] for token in (*data["added_tokens"], {"id": len(data["model"]["vocab"]) - 1}))
    for index, (text, rstrip) in enumerate({"<|user|>": True, "<|end|>": True, "<|endoftext|>": False}.items(), first):
        flags = {"lstrip": False, "rstrip": rstrip, "normalized": False, "single_word": False, "special": True}
        data["added_tokens"].append({"id": index, "content": text, **flags})
    folder = make_folder({"tokenizer.json": data})
    right, file = from_folder(folder), from_gguf(to_gguf_metadata(folder) | {"general.architecture": "phi3"})
    for text in (
        "<|user|>\nWhat is it?<|end|>\n<|user|>\n",
        "<|user|> \u00a0\u3000 x<|endoftext|>\ny",
        "<|end|>\t\x1c z",
        "<s>\n a",
    ):
        assert file.encode(text, parse_special=True) == right.encode(text, parse_special=True)

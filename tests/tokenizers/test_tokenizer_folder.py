"""Tokenizers from model folders: roles and BOS rules from the configuration, added tokens, sizes, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from mlxr.core.errors import NotFound, TokenizerError
from mlxr.tokenizers import Tokenizer, from_folder

MakeFolder = Callable[[dict[str, Any]], Path]
LoadJson = Callable[[str], dict[str, Any]]


def spell(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in ids]


def test_bos_of_the_post_processor_is_written_once(folders: dict[str, Tokenizer]) -> None:
    tokenizer = folders["llama3"]
    assert spell(tokenizer, tokenizer.encode("")) == ["<|begin_of_text|>"]
    assert tokenizer.encode("hi").count(tokenizer.bos_id or -1) == 1
    assert tokenizer.encode("hi", add_special=False) == tokenizer.encode("hi")[1:]
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, False)


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("llama3", {"bos_token": "<|begin_of_text|>", "add_bos_token": True}, ["<|begin_of_text|>"]),
        ("llama3", {"bos_token": "<|begin_of_text|>", "add_bos_token": False}, []),
        ("llama3", {"bos_token": {"content": "<|begin_of_text|>"}}, ["<|begin_of_text|>"]),
        (
            "llama3",
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "add_eos_token": True},
            ["<|begin_of_text|>", "<|eot_id|>"],
        ),
        ("qwen2", {"bos_token": None, "add_bos_token": False}, []),
        ("qwen2", {"bos_token": "<|im_start|>"}, []),
        ("qwen2", {"bos_token": "<|im_start|>", "add_bos_token": True}, ["<|im_start|>"]),
        ("spm-merges", {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}, ["<s>", "</s>"]),
    ],
)
def test_the_configuration_decides_on_bos_and_eos(
    name: str, config: dict[str, Any], expected: list[str], make_folder: MakeFolder, load_json: LoadJson
) -> None:
    tokenizer = from_folder(make_folder({"tokenizer.json": load_json(name), "tokenizer_config.json": config}))
    assert spell(tokenizer, tokenizer.encode("")) == expected
    assert tokenizer.add_bos == (config.get("bos_token") is not None and bool(expected))
    assert tokenizer.add_eos == bool(config.get("add_eos_token"))


def test_roles_may_stand_in_the_special_tokens_map(make_folder: MakeFolder, load_json: LoadJson) -> None:
    roles = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    folder = make_folder({"tokenizer.json": load_json("qwen2"), "special_tokens_map.json": roles})
    tokenizer = from_folder(folder)
    assert tokenizer.bos_id == tokenizer.token_id("<|im_start|>")
    assert tokenizer.pad_id == tokenizer.token_id("<|endoftext|>")


def test_all_end_tokens_are_found(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("llama3")
    header = next(token["id"] for token in data["added_tokens"] if token["content"] == "<|start_header_id|>")
    files: dict[str, Any] = {
        "tokenizer.json": data,
        "tokenizer_config.json": {"eos_token": "<|end_of_text|>"},
        "generation_config.json": {"eos_token_id": [header]},
        "config.json": {"eos_token_id": 7},
    }
    tokenizer = from_folder(make_folder(files))
    # <|eot_id|> is named nowhere but known for it.
    assert {"<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", tokenizer.token_text(7)} == set(
        spell(tokenizer, sorted(tokenizer.eos_ids))
    )


def test_the_vocabulary_is_as_large_as_the_models(make_folder: MakeFolder, load_json: LoadJson) -> None:
    files = {"tokenizer.json": load_json("qwen2"), "config.json": {"vocab_size": 1400}}
    tokenizer = from_folder(make_folder(files))
    assert tokenizer.vocab_size == 1400
    assert tokenizer.token_text(1399) == "[PAD1399]"
    assert tokenizer.token_bytes(1399) == b""
    assert tokenizer.decode([1399]) == ""
    nested = {"tokenizer.json": load_json("qwen2"), "config.json": {"text_config": {"vocab_size": 1350}}}
    assert from_folder(make_folder(nested)).vocab_size == 1350


def test_tokens_that_only_the_configuration_adds(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("qwen2")
    count = 1 + max(token["id"] for token in data["added_tokens"])
    decoder = {
        str(count): {"content": "<|extra|>", "special": True},
        str(count + 1): {"content": "<shown>", "special": False},
    }
    files = {"tokenizer.json": data, "tokenizer_config.json": {"added_tokens_decoder": decoder}}
    tokenizer = from_folder(make_folder(files))
    ids = tokenizer.encode("a<|extra|><shown>", parse_special=True)
    assert spell(tokenizer, ids) == ["a", "<|extra|>", "<shown>"]
    assert tokenizer.decode(ids) == "a<shown>"
    assert len(tokenizer.encode("<|extra|>")) > 1
    decoder[str(count)]["content"], decoder[str(count + 5)] = "<|other|>", {"content": "<|far|>", "special": True}
    with pytest.raises(
        TokenizerError, match=rf"the configuration numbers '<\|far\|>' {count + 5}, the file {count + 2}"
    ):
        from_folder(make_folder(files))


def test_a_special_token_in_a_text_is_only_text_unless_asked(folders: dict[str, Tokenizer]) -> None:
    for name, marker in (("llama3", "<|eot_id|>"), ("qwen2", "<|im_end|>"), ("spm", "</s>"), ("spm-merges", "</s>")):
        tokenizer = folders[name]
        marker_id = tokenizer.token_id(marker)
        assert marker_id not in tokenizer.encode(f"a {marker} b")
        assert marker_id in tokenizer.encode(f"a {marker} b", parse_special=True)
        assert tokenizer.token_id("<tool_call>") in tokenizer.encode("a <tool_call>")


def test_truncation_and_padding_of_the_file_do_not_count(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("llama3")
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    tokenizer = from_folder(make_folder({"tokenizer.json": data}))
    text = "many words " * 30
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a", add_special=False)) == 1


def test_a_sentencepiece_model_of_another_algorithm(make_folder: MakeFolder, tmp_path: Path) -> None:
    lines = [f"the number {word} and {word}s" for word in ["one", "two", "three", "four", "five", "six", "seven"]] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "unigram"),
        model_type="unigram",
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    data = (tmp_path / "unigram.model").read_bytes()
    tokenizer = from_folder(make_folder({"tokenizer.model": data}))
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert tokenizer.encode("the number two") == [library.bos_id(), *library.EncodeAsIds("the number two")]
    assert tokenizer.decode(tokenizer.encode("the number two")) == "the number two"
    assert tokenizer.decode(tokenizer.encode("the ☃ two")) == "the  two"  # unknown, and hidden


def test_a_sentencepiece_model_with_added_tokens(make_folder: MakeFolder, golden_folder: Path) -> None:
    files: dict[str, Any] = {
        "tokenizer.model": (golden_folder / "spm" / "tokenizer.model").read_bytes(),
        "tokenizer_config.json": {
            "added_tokens_decoder": {"1400": {"content": "<|im_end|>", "special": True}},
            "eos_token": "<|im_end|>",
        },
        "added_tokens.json": {"<shown>": 1401},
        "config.json": {"vocab_size": 1408},
    }
    tokenizer = from_folder(make_folder(files))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (1408, 1, {2, 1400})
    ids = tokenizer.encode("the<|im_end|><shown>the", parse_special=True)
    assert spell(tokenizer, ids) == ["<s>", "▁the", "<|im_end|>", "<shown>", "▁the"]
    assert tokenizer.decode(ids) == "the<shown> the"
    files["tokenizer_config.json"]["legacy"] = False
    ids = from_folder(make_folder(files)).encode("the<|im_end|>the", parse_special=True)
    assert "▁the" not in spell(tokenizer, ids[2:])
    assert tokenizer.decode(ids) == "thethe"


def test_wrong_sentencepiece_files_are_refused(make_folder: MakeFolder, golden_folder: Path) -> None:
    data = (golden_folder / "spm" / "tokenizer.model").read_bytes()
    for broken in (b"", b"IQ== 0\nIg== 1\n", data[:1000], b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 50):
        with pytest.raises(TokenizerError, match=r"tokenizer\.model is not a SentencePiece model"):
            from_folder(make_folder({"tokenizer.model": broken}))
    with pytest.raises(TokenizerError, match="escape_whitespaces=false is not supported"):
        from_folder(make_folder({"tokenizer.model": data + b"\x1a\x02\x28\x00"}))
    with pytest.raises(TokenizerError, match="treat_whitespace_as_suffix is not supported"):
        from_folder(make_folder({"tokenizer.model": data + b"\x12\x03\xc0\x01\x01"}))


def test_folders_without_a_tokenizer(make_folder: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere is not a folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        from_folder(tmp_path)
    with pytest.raises(TokenizerError, match=r"tekken\.json cannot be read here; save the tokenizer with transformers"):
        from_folder(make_folder({"tekken.json": {}}))


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
MISSING = {"SpecialToken": {"id": "<none>", "type_id": 0}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {}}}, "model type WordLevel is not supported; supported are BPE"),
        ({"model": 3}, "model must be an object"),
        (
            {"model": {"type": "BPE", "vocab": {}, "merges": [], "continuing_subword_prefix": "##"}},
            "continuing_subword_",
        ),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.1}}, r"model\.dropout is not supported"),
        (
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "decoder WordPiece is not supported; supported are ByteLevel",
        ),
        ({"added_tokens": [{"id": 1}]}, "added_tokens has the malformed entry"),
        ({"added_tokens": {}}, "added_tokens must be a list"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, r"tokenizer\.json: "),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 8}},
            r"normalizer makes up to 4\.29e\+09 characters of one, more than 64",
        ),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [MISSING], "pair": [], "special_tokens": {}}},
            "post_processor uses '<none>' and does not define it",
        ),
    ],
)
def test_a_broken_tokenizer_json_is_refused(
    change: dict[str, Any], message: str, make_folder: MakeFolder, load_json: LoadJson
) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_folder(make_folder({"tokenizer.json": load_json("llama3") | change}))


def test_a_pattern_that_never_ends_is_one_error(make_folder: MakeFolder, load_json: LoadJson) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = from_folder(make_folder({"tokenizer.json": load_json("llama3") | {"pre_tokenizer": split}}))
    with pytest.raises(TokenizerError, match="the tokenizer cannot encode a text"):
        tokenizer.encode("a" * 40 + "!")


def test_a_token_id_far_away_is_refused(make_folder: MakeFolder, load_json: LoadJson) -> None:
    data = load_json("llama3")
    data["added_tokens"][0]["id"] = 3_000_000_000
    with pytest.raises(TokenizerError):
        from_folder(make_folder({"tokenizer.json": data}))
    data = load_json("llama3")
    data["model"]["vocab"]["!"] = 3_000_000
    with pytest.raises(TokenizerError):
        from_folder(make_folder({"tokenizer.json": data}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json: cannot be read as JSON"),
        ({"tokenizer_config.json": "[" * 100_000}, r"tokenizer_config\.json: cannot be read as JSON"),
        ({"tokenizer_config.json": []}, r"tokenizer_config\.json: must hold a JSON object"),
        ({"tokenizer_config.json": {"bos_token": 3}}, "bos_token must be a string"),
        ({"tokenizer_config.json": {"bos_token": "<gone>"}}, "bos_token '<gone>' is not in the vocabulary"),
        ({"tokenizer_config.json": {"add_bos_token": "yes"}}, "add_bos_token must be true or false"),
        ({"tokenizer_config.json": {"add_eos_token": True}}, "wants an EOS token after every text but names none"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": 1}}}, r"added_tokens_decoder\[x\] is malformed"),
        ({"generation_config.json": {"eos_token_id": "x"}}, "eos_token_id must be a token id or a list of them"),
        ({"generation_config.json": {"eos_token_id": 9_999}}, "token id 9999 is outside the vocabulary"),
        ({"config.json": {"vocab_size": 10**12}}, "vocab_size must be from 1 to"),
        ({"added_tokens.json": {"<x>": -1}}, "<x> must be a token id"),
        ({"added_tokens.json": {"<x>": 0}}, "calls token 0 '<x>', the vocabulary"),
        ({"added_tokens.json": {"<x>": 10**7}}, "adds a token with id 10000000, far beyond the vocabulary"),
    ],
)
def test_a_broken_configuration_is_refused(
    files: dict[str, Any], message: str, make_folder: MakeFolder, load_json: LoadJson
) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_folder(make_folder({"tokenizer.json": load_json("llama3"), **files}))


def test_a_lone_tokenizer_json_still_names_bos(make_folder: MakeFolder, load_json: LoadJson) -> None:
    tokenizer = from_folder(make_folder({"tokenizer.json": load_json("llama3")}))
    assert tokenizer.bos_id == tokenizer.token_id("<|begin_of_text|>")
    assert tokenizer.add_bos
    assert tokenizer.encode("") == [tokenizer.bos_id]

"""Trains the demo's byte-level BPE tokenizer and writes the tokenizer files of a Hugging Face folder.

8192 tokens: four special ones, 256 bytes, the rest merges learnt from the corpus. The split into words is Qwen2's
regular expression, without its NFC normaliser, because GGUF names that split `qwen2` and every reader of GGUF knows
it. A text starts with `<|begin_of_text|>`; `<|im_end|>` ends a turn and a document alike, so there is one end token.

    python tools/demo_model/tokenizer.py --corpus FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from phrasing import Conversations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 8192
PAD, BOS, IM_START, IM_END = "<|pad|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [PAD, BOS, IM_START, IM_END]
# From tokenizer.json of https://huggingface.co/Qwen/Qwen2-7B; `tokenizer.ggml.pre` = "qwen2" in GGUF.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: train on a corpus folder, write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_texts(options.corpus))
    tokenizer.save(str(options.out / "tokenizer.json"))
    (options.out / "tokenizer_config.json").write_text(json.dumps(describe_tokenizer(), indent=2) + "\n")
    print(
        json.dumps(
            {
                "vocabulary": tokenizer.get_vocab_size(),
                "example": tokenizer.encode("What does os.path.join do?").tokens,
            }
        )
    )


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of VOCABULARY tokens with the special tokens as ids 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def describe_tokenizer() -> dict[str, object]:
    """The contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": IM_END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }


def _texts(corpus: Path) -> Iterator[str]:
    entries = [json.loads(line) for line in (corpus / "entries.jsonl").open(encoding="utf-8")]
    conversations = Conversations(entries, json.loads((corpus / "contents.json").read_text()), seed=0)
    for _ in range(60_000):
        for _, text in conversations.draw():
            yield text
    for index, line in enumerate((corpus / "documents.jsonl").open(encoding="utf-8")):
        document = json.loads(line)
        # Tests are half of the library's bytes and no more than a third of what should shape the words.
        if document["path"].startswith("test/") and index % 3:
            continue
        yield document["text"]


if __name__ == "__main__":
    main()

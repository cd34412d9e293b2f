"""Vectors of texts as clients want them: with the prompt of their task before the text, pooled in the model's way,
scaled to length 1, cut to fewer dimensions, and in fewer bits; and ranks.

A `Ranker` says how well documents answer a query: a model reads both together and gives each document a number from 0
to 1. A cross-encoder has a classifier for the pair. A model that writes text is asked in the words of its template
whether the document answers the query, and the number is how likely it is to say yes rather than no (Qwen3-Reranker).
Knows no HTTP.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence, Set
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mlxr.core.errors import InvalidRequest
from mlxr.core.frozen import frozen
from mlxr.engine.request import EngineRequest as EngineRequest
from mlxr.engine.request import Pooling as Pooling
from mlxr.loading import Model, TextRules, TokenProduct
from mlxr.service.chat import SpecialGuard, refuse_unprotected
from mlxr.tokenizers import Tokenizer

VectorPooling = Literal["mean", "last", "cls"]  # those that make one vector; requests may ask for them
POOLINGS: tuple[VectorPooling, ...] = get_args(VectorPooling)
Vector = NDArray[np.float32]


def scale_vector(vector: Vector, dimensions: int | None = None) -> Vector:
    """Scale the first `dimensions` numbers of `vector` (None: all) to a vector of length 1."""
    cut = vector[:dimensions].astype(np.float32)
    length = float(np.linalg.norm(cut))
    scaled: Vector = cut / np.float32(length) if length else cut
    return scaled


def choose_pooling(stated: str | None, asked: Pooling | None, field: str) -> Pooling:
    """Return the pooling that makes a vector of states: as `asked`, else as the model's files state, else the mean.

    Raises InvalidRequest, naming the `field` with the texts, if the files state a pooling that mlxr does not have.
    """
    if asked is not None:
        return asked
    if stated is None or stated == "none":
        return "mean"
    if stated in POOLINGS:
        return stated
    remedy = f"ask for another `pooling`, one of {', '.join(POOLINGS)}, or take another model"
    if stated == "rank":
        what = "is made to rank pairs of texts, as its files say; send them to /v1/rerank"
        raise InvalidRequest(field, f"this model {what}, {remedy}")
    what = f"makes vectors with {stated}, as its files say, and mlxr does not do that"
    raise InvalidRequest(field, f"this model {what}; {remedy}")


def describe_pooling(stated: str | None, used: Pooling) -> str:
    """Describe the pooling of a vector made with `used`; warns if the model's files state none."""
    unstated = stated is None or stated == "none"
    return f"{used}; the files of this model state none, so it may not be made for embeddings" if unstated else used


Encoding = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
Numbers = NDArray[np.float32 | np.int8 | np.uint8]
_BITS = ("binary", "ubinary")


def quantise_vector(vector: Vector, encoding: Encoding) -> Numbers:
    """Return the numbers of a vector in that encoding; `float` and `base64` leave them unchanged.

    `int8` scales the largest of them to 127 or -127, so cosines stay; `uint8` is 128 more. `ubinary` has a bit for each
    number, 1 above 0, the first in the highest bit of a byte; `binary` is that less 128 (as in Cohere's API).
    """
    if encoding in _BITS:
        packed: NDArray[np.uint8] = np.packbits(vector > 0)
        return packed if encoding == "ubinary" else (packed ^ np.uint8(128)).view(np.int8)
    if encoding in ("int8", "uint8"):
        peak = float(np.abs(vector).max(initial=0.0))
        whole: NDArray[np.int16] = np.rint(vector * np.float32(127 / peak if peak else 0)).astype(np.int16)
        return whole.astype(np.int8) if encoding == "int8" else (whole + np.int16(128)).astype(np.uint8)
    return vector


def spell_vector(vector: Vector, encoding: Encoding, *, packs: bool = False) -> list[float] | str:
    """Return a vector for JSON: numbers, or with `base64` or `packs` their little-endian bytes in base64."""
    numbers = quantise_vector(vector, encoding)
    if packs or encoding == "base64":
        return base64.b64encode(numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()).decode()
    listed: list[float] = numbers.tolist()
    return listed


def check_dimensions(asked: int | None, size: int, encodings: Iterable[str] = (), field: str = "dimensions") -> None:
    """Raise InvalidRequest if a model's vectors have fewer numbers, or the bits would not fill whole bytes."""
    if asked is not None and asked > size:
        raise InvalidRequest(field, f"must be at most {size}, the model's own; got {asked}")
    if (asked or size) % 8 and any(one in _BITS for one in encodings):
        raise InvalidRequest(field, f"must be a multiple of 8 for {' and '.join(_BITS)}; got {asked or size}")


Kind = Literal["dense", "sparse", "multi"]


class TextTokens(list[int]):
    """The token ids of a text; a mean leaves out the first `unpooled`, which are those of its prompt."""

    unpooled = 0


def choose_product(rules: TextRules, kind: Kind, field: str) -> TokenProduct:
    """Return the product that makes a number (`sparse`) or a vector (`multi`) of a token's state; raises InvalidRequest
    if the model has none."""
    found = rules.sparse if kind == "sparse" else rules.multi
    if found is None:
        file = "sparse_linear" if kind == "sparse" else "colbert_linear"
        raise InvalidRequest(
            field, f"{kind} wants {file}.safetensors or {file}.pt in the model's folder, as bge-m3 has it"
        )
    return found


def weigh_tokens(
    product: TokenProduct, states: Vector, token_ids: Sequence[int], ignored: Set[int]
) -> dict[int, float]:
    """Return the greatest weight above 0 of each token not in `ignored`, from a text's states (tokens, hidden)."""
    weights = (states @ product[0].T + product[1])[:, 0]
    found: dict[int, float] = {}
    for token_id, weight in zip(token_ids, weights.tolist(), strict=True):
        if token_id not in ignored and weight > found.get(token_id, 0.0):
            found[token_id] = weight
    return found


def spread_tokens(product: TokenProduct, states: Vector) -> Vector:
    """Return a vector of length 1 for each token but the first, (tokens - 1, n)."""
    made = states[1:] @ product[0].T + product[1]
    lengths = np.linalg.norm(made, axis=1, keepdims=True)
    scaled: Vector = (made / np.maximum(lengths, np.float32(1e-12))).astype(np.float32)
    return scaled


_SAME_PROMPTS = (  # each row: the names of one task in APIs and files
    ("query", "search_query", "retrieval.query", "retrieval_query", "s2p_query", "web_search_query"),
    ("document", "passage", "search_document", "retrieval.passage", "retrieval_document", "corpus"),
    ("text-matching", "semantic_similarity", "sts", "STS"),
    ("clustering", "separation", "Clustering"),
    ("classification", "Classification"),
)


@frozen
class PromptChoice:
    """A request's choice of the prompt before texts: a prompt of the model, by its `name` or by the kind of texts
    (`input_type`), or `text` itself; without any of them the default of the model's files.
    """

    name: str | None = None
    input_type: str | None = None
    text: str | None = None

    @property
    def is_given(self) -> bool:
        """True if the request chooses."""
        return (self.name, self.input_type, self.text) != (None, None, None)


def choose_prompt(rules: TextRules, choice: PromptChoice) -> tuple[str | None, str]:
    """Return the name and the text of the prompt; the name is None if the request brings the text, or there is none.

    An `input_type` for which the model has no prompt adds nothing: models differ in what they are trained with. Raises
    InvalidRequest for a name that the model does not have, an input type that no model has, and two choices at once.
    """
    given = [key for key in ("name", "input_type", "text") if getattr(choice, key) is not None]
    if len(given) > 1:
        fields = {"name": "prompt_name", "text": "prompt"}
        first, second = (fields.get(key, key) for key in given[:2])
        raise InvalidRequest(second, f"cannot hold together with {first}")
    name = choice.name if choice.is_given else rules.default_prompt
    if choice.name is not None and choice.name not in rules.prompts:
        known = ", ".join(rules.prompts) or "none"
        raise InvalidRequest("prompt_name", f"{choice.name!r:.80} is no prompt of this model, which has {known}")
    if choice.input_type is not None:
        name = _find_prompt(rules, choice.input_type)
    text = choice.text if choice.text is not None else rules.prompts[name] if name is not None else ""
    return name, text


def _find_prompt(rules: TextRules, input_type: str) -> str | None:
    if input_type in rules.prompts:
        return input_type
    names = next((names for names in _SAME_PROMPTS if input_type in names), None)
    if names is None:
        known = ", ".join(dict.fromkeys([*rules.prompts, *(names[0] for names in _SAME_PROMPTS)]))
        raise InvalidRequest("input_type", f"{input_type!r:.80} is not known; there are {known}")
    return next((name for name in names if name in rules.prompts), None)


YES, NO = "yes", "no"
QUERY, DOCUMENT, INSTRUCTION = "{query}", "{document}", "{instruction}"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt that the model card of Qwen3-Reranker gives; GGUF files have it with the instruction filled in.
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@frozen(slots=False)
class Ranker:
    """Ranks documents with one model. `template` is the one for ranking in its files, or None."""

    config: Model
    tokenizer: Tokenizer
    guard: SpecialGuard
    context_tokens: int
    template: str | None = None

    @property
    def is_stated(self) -> bool:
        """True if the model's files say that it ranks."""
        return bool(self.config.classifier) or self.template is not None

    @cached_property
    def _label_ids(self) -> tuple[int, ...]:
        """The tokens of yes and no, for a model without a classifier. Raises InvalidRequest."""
        if self.config.classifier:
            return ()
        ids = [self.tokenizer.token_id(word) for word in (YES, NO)]
        found = [token_id for token_id in ids if token_id is not None]
        if not self.config.has_output or len(found) < len(ids):
            raise InvalidRequest("model", "ranks no texts: it has no classifier, and does not say yes or no")
        return tuple(found)

    @cached_property
    def _yes(self) -> int | None:
        """The place of yes among the logits; None if there is only one logit. Raises InvalidRequest."""
        labels = [label.lower() for label in self.config.labels]
        count = self.config.classifier[-1].features if self.config.classifier else len(self._label_ids)
        if count == 1:
            return None
        if not self.config.classifier or (count == len((YES, NO)) and not labels):
            return 0
        if YES not in labels:
            raise InvalidRequest(
                "model", f"tells {count} labels apart ({', '.join(self.config.labels)}), and ranks none"
            )
        return labels.index(YES)

    def prepare(self, query: str, document: str, instruction: str | None = None) -> EngineRequest:
        """Return the engine's request for one pair; a document that is too long is cut. Raises InvalidRequest."""
        _ = self._yes
        if self.config.is_causal:
            token_ids = self._render(query, document, instruction or DEFAULT_INSTRUCTION)
            return EngineRequest(token_ids, pooling="rank", label_ids=self._label_ids)
        if instruction is not None:
            raise InvalidRequest("instruction", "is for models that read one; this is a cross-encoder")
        first, second = (self.tokenizer.encode(text, add_special=False) for text in (query, document))
        token_ids, second_start = self.tokenizer.join_pair(first, second, self.context_tokens)
        return EngineRequest(token_ids, pooling="rank", second_start=second_start)

    def prepare_text(self, text: str) -> EngineRequest:
        """Return the engine's request for the labels of a text, cut if it is too long. Raises InvalidRequest."""
        if not self.config.classifier:
            raise InvalidRequest("model", "tells no labels apart: its files have no classifier")
        return EngineRequest(self.tokenizer.cut(self.tokenizer.encode(text), self.context_tokens), pooling="rank")

    def read_shares(self, logits: Sequence[float], *, apart: bool = False) -> list[float]:
        """Return the probability of each label; they add up to 1, unless there is only one, or each stands `apart`."""
        if apart or len(logits) == 1:
            return [_sigmoid(float(one)) for one in logits]
        peak = max(map(float, logits))
        shares = [math.exp(float(one) - peak) for one in logits]
        total = math.fsum(shares)
        return [share / total for share in shares]

    def _render(self, query: str, document: str, instruction: str) -> list[int]:
        """Return the prompt's tokens; texts of the request are plain characters, and a long document loses its end."""
        before, _, after = (self.template or TEMPLATE).partition(DOCUMENT)
        head, _, middle = before.partition(QUERY)
        head, instructed, rest = head.partition(INSTRUCTION)
        end_ids = self.tokenizer.encode(after, add_special=False, parse_special=True)
        begin = [self.tokenizer.bos_id] if self.tokenizer.add_bos and self.tokenizer.bos_id is not None else []
        given = [instruction if instructed else "", query, document]
        for mark in self.guard.choose_marks(given) or ("",):
            marked = [str(self.guard.put_marks(text, mark)) if mark else text for text in given]
            text = f"{head}{marked[0]}{rest}{marked[1]}{middle}{marked[2]}"
            token_ids = self.tokenizer.encode(text, add_special=False, parse_special=True)
            if mark:
                taken = self.guard.take_marks(token_ids, mark, text.count(mark))
                if taken is None:
                    continue
                token_ids = taken
            room = self.context_tokens - len(begin) - len(end_ids)
            return [*begin, *token_ids[: max(room, 0)], *end_ids]
        raise refuse_unprotected()

    def score(self, logits: Sequence[float]) -> float:
        """Return the score, from 0 to 1, that the model's logits stand for."""
        if self._yes is None:
            return _sigmoid(float(logits[0]))
        return self.read_shares(logits)[self._yes]

    def read_raw(self, logits: Sequence[float]) -> float:
        """Return the logit behind `score`: the only one, or the log-odds of yes."""
        score = self.score(logits)
        if self._yes is None:
            return float(logits[0])
        return math.log(score / (1 - score)) if 0 < score < 1 else math.copysign(100.0, score - 0.5)


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return 1 / (1 + small) if x >= 0 else small / (1 + small)

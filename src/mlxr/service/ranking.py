"""How well documents answer a query: a model reads both together and gives each document a number from 0 to 1.

A cross-encoder has a classifier for the pair. A model that writes text is asked in the words of its template whether
the document answers the query, and the number is how likely it is to say yes rather than no (Qwen3-Reranker). Knows no
HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlxr.core.errors import InvalidRequest
from mlxr.engine.request import EngineRequest as EngineRequest
from mlxr.loading import Model
from mlxr.service.chat import SpecialGuard, refuse_unprotected
from mlxr.tokenizers import Tokenizer

YES, NO = "yes", "no"
QUERY, DOCUMENT, INSTRUCTION = "{query}", "{document}", "{instruction}"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# As the model card of Qwen3-Reranker asks; GGUF files have it with the instruction filled in.
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True)
class Ranker:
    """Ranks documents with one model. `template` is what its files have for that, None where they have none."""

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
        """The tokens of yes and no, of a model without a classifier. Raises InvalidRequest."""
        if self.config.classifier:
            return ()
        ids = [self.tokenizer.token_id(word) for word in (YES, NO)]
        found = [token_id for token_id in ids if token_id is not None]
        if not self.config.has_output or len(found) < len(ids):
            raise InvalidRequest("model", "ranks no texts: it has no classifier, and does not say yes or no")
        return tuple(found)

    @cached_property
    def _yes(self) -> int | None:
        """The place of yes among the logits; None where there is but one number. Raises InvalidRequest."""
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
        """The request for one pair; a document that is too long is cut. Raises InvalidRequest."""
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
        """The request for the labels of one text, which is cut where it is too long. Raises InvalidRequest."""
        if not self.config.classifier:
            raise InvalidRequest("model", "tells no labels apart: its files have no classifier")
        return EngineRequest(self.tokenizer.cut(self.tokenizer.encode(text), self.context_tokens), pooling="rank")

    def read_shares(self, logits: Sequence[float], *, apart: bool = False) -> list[float]:
        """How likely each label is, from 0 to 1: all together 1 unless there is but one, or each is asked `apart`."""
        if apart or len(logits) == 1:
            return [_sigmoid(float(one)) for one in logits]
        peak = max(map(float, logits))
        shares = [math.exp(float(one) - peak) for one in logits]
        total = math.fsum(shares)
        return [share / total for share in shares]

    def _render(self, query: str, document: str, instruction: str) -> list[int]:
        """The template's text as tokens, with what the request says as plain characters; the document's end is cut."""
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
        """The number from 0 to 1 of the logits that the model gave."""
        if self._yes is None:
            return _sigmoid(float(logits[0]))
        return self.read_shares(logits)[self._yes]

    def read_raw(self, logits: Sequence[float]) -> float:
        """The logit that `score` makes the number of: the only one, or how far yes is above no."""
        score = self.score(logits)
        if self._yes is None:
            return float(logits[0])
        return math.log(score / (1 - score)) if 0 < score < 1 else math.copysign(100.0, score - 0.5)


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return 1 / (1 + small) if x >= 0 else small / (1 + small)

"""The cases to measure on a GPU, and the project's targets for them. A case is written SHAPE-TYPE:BATCH[@CONTEXT]
(decode) or SHAPE-TYPE:prefill[BATCH]@TOKENS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from synthetic import SHAPES, Shape

NAMES = {"tinyllama": "tinyllama-1.1b", "llama-8b": "llama-3-8b", "tiny": "tiny-spm"}
NAMES |= {"qwen3-30b-a3b": "qwen3-30b-a3b", "olmoe-1b-7b": "olmoe-1b-7b", "tinymoe": "tiny-moe"}
NAMES |= {"gpt-oss-20b": "gpt-oss-20b", "tinyoss": "tiny-oss"}
NAMES |= {"qwen3.5-0.8b": "qwen3.5-0.8b", "qwen3.6-27b": "qwen3.6-27b", "qwen3.5-35b-a3b": "qwen3.5-35b-a3b"}
NAMES |= {"tinydelta": "tiny-delta"}
TITLES = {"tinyllama": "TinyLlama", "llama-8b": "Llama 3 8B", "tiny": "tiny"}
TITLES |= {"qwen3-30b-a3b": "Qwen 3 30B A3B", "olmoe-1b-7b": "OLMoE 1B 7B", "tinymoe": "tiny experts"}
TITLES |= {"gpt-oss-20b": "gpt-oss 20B", "tinyoss": "tiny gpt-oss"}
TITLES |= {"qwen3.5-0.8b": "Qwen 3.5 0.8B", "qwen3.6-27b": "Qwen 3.6 27B", "qwen3.5-35b-a3b": "Qwen 3.5 35B A3B"}
TITLES |= {"tinydelta": "tiny delta net"}
SHORT_CONTEXT = 32
OURS, MLX_LM, MLX_LM_4BIT, TRANSFORMERS, LLAMA_CPP = "mlxr", "mlx-lm", "mlx-lm 4-bit", "transformers", "llama.cpp"
VLLM, VLLM_4BIT = "vLLM", "vLLM 4-bit"


@dataclass(frozen=True)
class Case:
    """A case: `batch` sequences of `context` tokens are held and all grow by a token with every step (decode), or
    `batch` prompts of `context` tokens get their first token (prefill)."""

    shape: str
    type_name: str
    kind: Literal["decode", "prefill"]
    batch: int
    context: int

    @staticmethod
    def parse(text: str) -> Case:
        """Read a case in the form of the command line."""
        model, _, rest = text.partition(":")
        work, _, context = rest.partition("@")
        shape = next((name for name in NAMES if model.startswith(name + "-")), None)
        batch = work.removeprefix("prefill")
        if shape is None or not (work == "prefill" or batch.isdecimal()) or not (context or "1").isdecimal():
            raise ValueError(f"{text!r} is no SHAPE-TYPE:BATCH[@CONTEXT] of {', '.join(NAMES)}")
        type_name = model.removeprefix(shape + "-")
        if work.startswith("prefill"):
            return Case(shape, type_name, "prefill", int(batch or 1), int(context or 2048))
        return Case(shape, type_name, "decode", int(work), int(context or SHORT_CONTEXT))

    @property
    def name(self) -> str:
        """The case as text, in the form that `parse` reads."""
        work = str(self.batch)
        if self.kind == "prefill":
            work = "prefill" if self.batch == 1 else f"prefill{self.batch}"
        return f"{self.shape}-{self.type_name}:{work}@{self.context}"

    @property
    def title(self) -> str:
        """The case as text for tables and charts."""
        model = f"{TITLES[self.shape]} {self.type_name.upper()}"
        if self.kind == "prefill":
            return f"{model}, prefill of {'' if self.batch == 1 else f'{self.batch} x '}{self.context:,}"
        after = "" if self.context == SHORT_CONTEXT else f" at {self.context:,} tokens"
        return f"{model}, batch {self.batch}{after}"

    @property
    def tokens(self) -> int:
        """The tokens of a step, or of the prompts."""
        return self.batch * self.context if self.kind == "prefill" else self.batch

    @property
    def model(self) -> Shape:
        """The dimensions of the case's model."""
        return SHAPES[NAMES[self.shape]]


@dataclass(frozen=True)
class Target:
    """A target: tokens per second as a multiple of a peer's, and weights' bytes as a `share` of the copy bandwidth."""

    peer: str
    ratio: float
    share: float | None = None


TARGETS = {
    "tinyllama-bf16:1@32": Target(MLX_LM, 1.5),
    "llama-8b-bf16:1@32": Target(MLX_LM, 1.1),
    "llama-8b-bf16:32@32": Target(MLX_LM, 1.3),
    "llama-8b-bf16:128@32": Target(MLX_LM, 1.3),
    "llama-8b-bf16:8@16384": Target(MLX_LM, 1.3),
    "llama-8b-bf16:prefill@2048": Target(MLX_LM, 1.0),
    "llama-8b-q4_k_m:1@32": Target(MLX_LM_4BIT, 2.2, 0.45),
    "llama-8b-q4_k_m:8@32": Target(MLX_LM_4BIT, 6.0),
    "llama-8b-q4_k_m:32@32": Target(MLX_LM_4BIT, 12.0),
    "llama-8b-q4_k_m:prefill@2048": Target(MLX_LM_4BIT, 3.0),
}

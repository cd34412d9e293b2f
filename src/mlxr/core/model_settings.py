"""The settings of a model that runs: the rows that `LLM`, every command that loads a model, and the engine share.

A new one is a row here and the place that uses it. Flags, variables, lines of the settings file, documents and the
keywords of `LLM` follow from the row; `make format` writes it into `model_keywords`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mlxr.core.setting import setting

DRAFT_WORDS = ("auto", "ngram", "mtp", "off")  # values of `draft` that are no model
THINKING_MESSAGE = "That is as long as I may think. I answer with what I have found so far."
DEVICES = ("auto", "cpu", "metal", "cuda", "reference", "mlx-cpu", "emulated")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Resolved values of the rows; None means decided where they are used."""

    device: str = setting("choice", "auto", "Where the model runs.", choices=DEVICES)
    threads: int | None = setting(
        "int", None, "Compute threads; default: the cores this process may use.", minimum=1, maximum=256
    )
    isa: str | None = setting(
        "choice",
        None,
        "Instruction set of the CPU kernels; default: the best this machine has.",
        choices=("portable", "avx2", "avx512"),
    )
    gpus: int = setting("int", 1, "How many GPUs compute a model together, each its share.", minimum=1, maximum=16)
    expert_bytes: int | None = setting(
        "bytes",
        None,
        "Memory for a model's experts; others are read from the file as they are used. Default: all, if there is room.",
    )
    arena_bytes: int | None = setting(
        "bytes", None, "Memory for the KV cache; default: what the context needs, within arena_percent of free memory."
    )
    arena_percent: int = setting(
        "int",
        50,
        "Share of the free memory that the KV cache may take if arena_bytes is not given, in percent.",
        minimum=1,
        maximum=100,
    )
    kv_cache: str = setting(
        "choice",
        "auto",
        "paged: pages that requests share and that are kept; simple: one plain run for each request.",
        choices=("auto", "paged", "simple"),
    )
    page_size: int = setting("int", 32, "Token positions in one page of the KV cache.", minimum=1, maximum=1024)
    kv_type: str | None = setting(
        "choice",
        None,
        "Number format of the KV cache; default: the device's own. q8 takes half the memory.",
        choices=("bf16", "f16", "f32", "q8"),
    )
    snapshot_percent: int = setting(
        "int",
        33,
        "Share of the KV cache for snapshots of recurrent states, from which later requests go on, in percent.",
        minimum=1,
        maximum=90,
    )
    store_bytes: int = setting(
        "bytes", 0, "Disk space for cache pages, which then outlive memory and restarts; 0: none."
    )
    store_folder: str | None = setting(
        "path", None, "Where cache pages are kept on disk; default: in the user's cache folder."
    )
    context_tokens: int | None = setting(
        "int", None, "Longest context of a request; default: what the model was made for.", minimum=1
    )
    max_batch_tokens: int | None = setting(
        "int", None, "Most tokens that one step computes; default: 512, on a GPU 2048.", minimum=1, maximum=2**20
    )
    max_sequences: int | None = setting(
        "int",
        None,
        "Most answers that are computed at the same time; default: 64, on a GPU 128.",
        minimum=1,
        maximum=4096,
    )
    prefill_chunk_tokens: int | None = setting(
        "int",
        None,
        "Most tokens of one prompt that one step computes; default: 512, on a GPU 2048.",
        minimum=1,
        maximum=2**20,
    )
    draft: str = setting(
        "text",
        "auto",
        "Guess the next tokens and check them in one pass. ngram: by what the text had before; mtp: by the layer of "
        "the model's file that drafts as well; the name or file of a small model with the same vocabulary, or of an "
        "EAGLE-3 head: by that as well; auto: where it can pay; off.",
    )
    draft_tokens: int = setting("int", 15, "Most tokens guessed at a time for one answer.", minimum=1, maximum=15)
    thinking_budget_tokens: int | None = setting(
        "int",
        None,
        "Most tokens that a model thinks before it is made to answer, if a request does not say; default: any number.",
        minimum=0,
        maximum=2**31 - 1,
    )
    thinking_message: str = setting(
        "text",
        THINKING_MESSAGE,
        "What a thought ends with, on a line of its own, when its budget is used up.",
    )
    warm_up: str = setting(
        "choice",
        "auto",
        "Have a GPU compile the kernels of steps before the first answer instead of in it. auto: on NVIDIA's those of "
        "all steps, on Apple's those of one answer; on: those of all steps, on an emulated one, too.",
        choices=("auto", "on", "off"),
    )
    chat_template: str | None = setting(
        "path",
        None,
        "Chat template of all models instead of their own: a file, or the name of one that comes with mlxr, such as "
        "chatml, llama2, llama3, gemma, mistral-v3, mistral-v7-tekken, phi3, phi4.",
    )
    chat_template_kwargs: str | None = setting(
        "object",
        None,
        'Further variables of chat templates as JSON, such as {"enable_thinking": false}; requests may bring others.',
    )
    adapter_bytes: int = setting("bytes", 2**30, "Memory for low-rank adapters (LoRA) that are loaded.")
    max_waiting: int = setting(
        "int", 1024, "Most requests that may wait for their turn; more are refused.", minimum=1, maximum=2**20
    )


MODEL_DEFAULTS = ModelSettings()


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much a step computes, under the names of the settings."""

    max_batch_tokens: int
    max_sequences: int
    prefill_chunk_tokens: int


USUAL_SIZES = StepSizes(512, 64, 512)
GPU_SIZES = StepSizes(2048, 128, 2048)  # from where on a GPU's products are bound by arithmetic
SIZES = {"cuda": GPU_SIZES, "metal": StepSizes(512, 16, 512)}  # by device; a Mac's GPU computes a tenth of that


def size_steps(settings: ModelSettings, device: str) -> StepSizes:
    """Take the sizes of a step from the settings; those left open suit `device`, which is not "auto"."""
    usual = SIZES.get(device, USUAL_SIZES)
    given = {row.name: getattr(settings, row.name) for row in fields(StepSizes)}
    return replace(usual, **{name: value for name, value in given.items() if value is not None})

"""The model settings as keywords, which `LLM` takes. Written by tools/write_keywords.py: change the rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict


class ModelKeywords(TypedDict, total=False):
    """A value for each row of `ModelSettings`; None leaves the choice to the environment and the defaults."""

    device: str | None
    """Where the model runs."""

    threads: int | None
    """Compute threads; default: the cores this process may use."""

    isa: str | None
    """Instruction set of the CPU kernels; default: the best this machine has."""

    gpus: int | None
    """How many GPUs compute a model together, each its share."""

    expert_bytes: int | str | None
    """Memory for a model's experts; others are read from the file as they are used. Default: all, if there is room."""

    mmproj: str | Path | None
    """GGUF file of the tower that a model sees by; default: a file mmproj*.gguf beside the model."""

    image_tokens: int | None
    """Most tokens of the context that one picture takes; small text needs more."""

    arena_bytes: int | str | None
    """Memory for the KV cache; default: what the context needs, within arena_percent of free memory."""

    arena_percent: int | None
    """Share of the free memory that the KV cache may take if arena_bytes is not given, in percent."""

    kv_cache: str | None
    """paged: pages that requests share and that are kept; simple: one plain run for each request."""

    page_size: int | None
    """Token positions in one page of the KV cache."""

    kv_type: str | None
    """Number format of the KV cache; default: the device's own. q8 takes half the memory."""

    snapshot_percent: int | None
    """Share of the KV cache for snapshots of recurrent states, from which later requests go on, in percent."""

    store_bytes: int | str | None
    """Disk space for cache pages, which then outlive memory and restarts; 0: none."""

    store_folder: str | Path | None
    """Where cache pages are kept on disk; default: in the user's cache folder."""

    context_tokens: int | None
    """Longest context of a request; default: what the model was made for."""

    max_batch_tokens: int | None
    """Most tokens that one step computes; default: 512 (small encoders on a processor 1024), on an NVIDIA GPU 2048
    (from 60 GiB on 4096, small encoders 16384)."""

    max_sequences: int | None
    """Most answers that are computed at the same time; default: 64, on a GPU 128."""

    prefill_chunk_tokens: int | None
    """Most tokens of one prompt that one step computes; default: 512, on an NVIDIA GPU 2048 (from 60 GiB on 4096, small
    encoders 16384)."""

    draft: str | None
    """Guess the next tokens and check them in one pass. ngram: by what the text had before; mtp: by the layer of the
    model's file that drafts as well; the name or file of a small model with the same vocabulary, or of an EAGLE-3 head:
    by that as well; auto: where it can pay; off."""

    draft_tokens: int | None
    """Most tokens guessed at a time for one answer."""

    thinking_budget_tokens: int | None
    """Most tokens that a model thinks before it is made to answer, if a request does not say; default: any number."""

    thinking_message: str | None
    """What a thought ends with, on a line of its own, when its budget is used up."""

    warm_up: str | None
    """Have a GPU compile the kernels of steps before the first answer instead of in it. auto: on NVIDIA's those of all
    steps, on Apple's those of one answer; on: those of all steps, on an emulated one, too."""

    chat_template: str | Path | None
    """Chat template of all models instead of their own: a file, or the name of one that comes with mlxr, such as
    chatml, llama2, llama3, gemma, mistral-v3, mistral-v7-tekken, phi3, phi4."""

    chat_template_kwargs: str | Mapping[str, object] | None
    """Further variables of chat templates as JSON, such as {"enable_thinking": false}; requests may bring others."""

    adapter_bytes: int | str | None
    """Memory for low-rank adapters (LoRA) that are loaded."""

    max_waiting: int | None
    """Most requests that may wait for their turn; more are refused."""

"""Other engines in a comparison, with the interface of `Ours`: mlx-lm's and transformers' llama with random weights.

mlx-lm runs like its own generation loop: the next step is under way while the last tokens are read. transformers
decodes with a static cache; with CUDA its step is recorded as a CUDA graph.
"""

from __future__ import annotations

import time
from typing import Any

from gpu_comparison.cases import MLX_LM, MLX_LM_4BIT, TRANSFORMERS, Case
from synthetic import Shape

CHUNK_TOKENS = 2048
MAX_FREED_BYTES = 4 << 30
WARM_STEPS = 3  # steps before one is recorded


def _name_sizes(shape: Shape) -> dict[str, Any]:
    """A Llama's sizes under the names of both peers."""
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }


def _make_mlx_model(shape: Shape) -> Any:
    """mlx-lm's llama, or its Qwen 3 for a mixture of experts."""
    if any(layer.recurrence is not None for layer in shape.to_config().layers):
        raise ValueError("recurrent layers are not compared here")
    sizes, mixture = _name_sizes(shape) | {"rope_theta": shape.rope_theta}, shape.mixture
    if mixture is None:
        from mlx_lm.models.llama import Model, ModelArgs

        return Model(ModelArgs(model_type="llama", **sizes))
    from mlx_lm.models.qwen3_moe import Model as MixtureModel
    from mlx_lm.models.qwen3_moe import ModelArgs as MixtureArgs

    more = {
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.rule.used,
        "moe_intermediate_size": mixture.features,
        "norm_topk_prob": mixture.rule.renormalises,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return MixtureModel(MixtureArgs(model_type="qwen3_moe", **sizes, **more))


class MlxLm:
    """mlx-lm in bf16, or with its own 4 bits in groups of 64."""

    note = ""
    warms_itself = False

    def __init__(self, device: str, shape: Shape, quantized: bool) -> None:
        import mlx.core as mx
        import mlx.nn as nn

        self.name = MLX_LM_4BIT if quantized else MLX_LM
        self._mx, self._shape = mx, shape
        mx.set_default_device(mx.cpu if device == "mlx-cpu" else mx.gpu)
        before = mx.get_active_memory()
        self._model = _make_mlx_model(shape)
        self._model.set_dtype(mx.bfloat16)
        if quantized:
            nn.quantize(self._model, group_size=64, bits=4)
        mx.eval(self._model.parameters())
        mx.clear_cache()
        self._weight_bytes = mx.get_active_memory() - before
        table = self._model.model.embed_tokens
        self._step_bytes = self._weight_bytes - sum(part.nbytes for part in table.parameters().values())

    def start(self, case: Case, steps: int) -> None:  # noqa: ARG002 -- its cache grows by itself
        """Begin a case; for decode, compute all contexts."""
        self._case = case
        self._mx.reset_peak_memory()
        if case.kind == "decode":
            kept = self._mx.set_cache_limit(MAX_FREED_BYTES)  # its cache grows by copies; frees their memory
            self._following, self._cache = self._prefill()
            self._mx.set_cache_limit(kept)
            self._advance()

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of each of so many steps."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._advance().tolist()
            times.append(time.perf_counter() - start)
        self._mx.eval(self._following)
        return times

    def prefill(self) -> float:
        """Return the seconds from a prompt to its first token."""
        start = time.perf_counter()
        self._prefill()
        return time.perf_counter() - start

    def measure_bytes(self) -> dict[str, int]:
        """The bytes that one step reads, under the same keys as `Ours.measure_bytes`."""
        case, shape = self._case, self._shape
        row_bytes = 2 * 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)
        return {
            "weight_bytes": self._step_bytes,
            "cache_bytes": row_bytes * case.context * case.batch,
            "arena_bytes": 0,
            "peak_bytes": self._mx.get_peak_memory(),
        }

    def stop(self) -> None:
        """Free the case's memory."""
        self._cache = self._following = None
        self._mx.clear_cache()

    def _advance(self) -> Any:
        """Start the next step, and return the tokens of the one under way."""
        mx, ids = self._mx, self._following
        self._following = mx.argmax(self._model(ids[:, None], cache=self._cache)[:, -1], axis=-1)
        mx.async_eval(self._following)
        return ids

    def _prefill(self) -> tuple[Any, Any]:
        from mlx_lm.models.cache import make_prompt_cache

        mx, case = self._mx, self._case
        tokens = mx.random.randint(3, self._shape.vocab_size, (case.batch, max(2, case.context)))
        cache = make_prompt_cache(self._model)
        last, step = tokens.shape[1] - 1, max(1, CHUNK_TOKENS // case.batch)
        for first in range(0, last, step):
            self._model(tokens[:, first : min(first + step, last)], cache=cache)
            mx.eval([layer.state for layer in cache])
        ids = mx.argmax(self._model(tokens[:, -1:], cache=cache)[:, -1], axis=-1)
        mx.eval(ids)
        return ids, cache


class Transformers:
    """The transformers library as a peer: bf16 weights, a static cache and a CUDA graph."""

    name = TRANSFORMERS
    warms_itself = False

    def __init__(self, device: str, shape: Shape) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self._torch, self._shape = torch, shape
        self._device = "cuda" if device == "cuda" else "mps" if device == "metal" else "cpu"
        self.note = ""
        self._config = LlamaConfig(
            **_name_sizes(shape),
            max_position_embeddings=shape.context_length,
        )
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self._device):
                self._model = LlamaForCausalLM(self._config).eval()
        finally:
            torch.set_default_dtype(kept)
        weights = list(self._model.parameters())
        self._weight_bytes = sum(part.nbytes for part in weights)
        self._step_bytes = self._weight_bytes - self._model.get_input_embeddings().weight.nbytes

    def start(self, case: Case, steps: int) -> None:
        """Make a static cache; for decode, compute all contexts and record the step."""
        from transformers import StaticCache

        torch, self._case = self._torch, case
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        room = case.context + steps + 2 * WARM_STEPS + 2
        self._cache = StaticCache(config=self._config, max_cache_len=room)
        self._graph = None
        if case.kind == "prefill":
            return
        with torch.inference_mode():
            self._ids = self._prefill()
            if self._device == "cuda":
                self._record()

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of each of so many steps."""
        times = []
        with self._torch.inference_mode():
            for _ in range(steps):
                start = time.perf_counter()
                if self._graph is None:
                    self._step()
                else:
                    self._graph.replay()
                self._ids.tolist()
                times.append(time.perf_counter() - start)
        return times

    def prefill(self) -> float:
        """Return the seconds from a prompt to its first token."""
        with self._torch.inference_mode():
            self._cache.reset()
            self._wait()
            start = time.perf_counter()
            self._prefill().tolist()
            return time.perf_counter() - start

    def measure_bytes(self) -> dict[str, int]:
        """The same as for `Ours`; the cache is read to the end of its room."""
        case, shape = self._case, self._shape
        row_bytes = 2 * 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)
        on_cuda = self._device == "cuda"
        return {
            "weight_bytes": self._step_bytes,
            "cache_bytes": row_bytes * case.context * case.batch,
            "arena_bytes": 0,
            "peak_bytes": self._torch.cuda.max_memory_allocated() if on_cuda else self._weight_bytes,
        }

    def stop(self) -> None:
        """Free the case's memory."""
        self._graph = self._cache = self._ids = None
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def _prefill(self) -> Any:
        torch, case = self._torch, self._case
        tokens = torch.randint(3, self._shape.vocab_size, (case.batch, max(2, case.context)), device=self._device)
        step = max(1, CHUNK_TOKENS // case.batch)
        for first in range(0, tokens.shape[1], step):
            part = tokens[:, first : first + step]
            logits = self._model(part, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def _step(self) -> None:
        logits = self._model(self._ids, past_key_values=self._cache, use_cache=True).logits
        self._ids.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def _record(self) -> None:
        """Record the step as a CUDA graph; plain steps, and a note, if that fails."""
        torch = self._torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except RuntimeError as error:
            self.note = f"no CUDA graph: {str(error).splitlines()[0][:100]}"
            torch.cuda.synchronize()
        else:
            self._graph = graph

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

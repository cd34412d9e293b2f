"""The weights of transformer layers, read out of their tensors and prepared for the operators.

How a layer runs is the matter of `mlxr.kernels.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from mlxr.core.errors import ModelError
from mlxr.kernels.context import Context
from mlxr.kernels.layers import (
    AttentionBlock,
    BothBlock,
    FeedForwardBlock,
    InputBlock,
    InputsBlock,
    Layer,
    MixerBlock,
    MixtureBlock,
    NormWeight,
    RecurrentBlock,
    make_attention,
    make_beside,
    make_both,
    make_feed_forward,
    make_input,
    make_inputs,
    make_mixture,
)
from mlxr.kernels.linear import LinearWeight, leave, prepare
from mlxr.kernels.moe import make_experts, make_router
from mlxr.kernels.sources import as_float32, take_halves
from mlxr.kernels.split_heads import HeadNorms
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers, read_vector
from mlxr.models.layer_tensors import (
    ATTENTION_GATE,
    CHOICE_BIAS,
    DENSE_POST_NORM,
    EXPERT_SCALES,
    EXPERTS_NORM,
    EXPERTS_POST_NORM,
    INPUT_GATE,
    INPUT_NORM,
    INPUT_PROJECTION,
    INPUTS_NORM,
    INPUTS_OF_STREAM,
    MIXER_NORMS,
    OUTPUT_SCALE,
    PROJECTIONS,
    ROUTER,
    ROUTER_SCALE,
    SHARED,
    SHARED_GATE,
    SINKS,
    TABLE,
    describe_shared,
    name_expert,
    name_feed_forward,
    name_norms,
)
from mlxr.models.recurrent import read_recurrent
from mlxr.models.residency import ExpertBudget
from mlxr.models.specs import (
    Attention,
    Beside,
    Both,
    FeedForward,
    LayerInputs,
    LayerSpec,
    Mixture,
    Norms,
    Recurrence,
)


class LayerReader:
    """Reads the weights of the layers of one model, one after another.

    With an `expert_budget` some experts of each layer are in memory at a time, else all of them. What the weights named
    in `summed` make are parts of sums over all ranks.
    """

    def __init__(
        self,
        ctx: Context,
        tensors: Mapping[str, TensorSource],
        expert_budget: ExpertBudget | None = None,
        summed: Collection[str] = (),
    ) -> None:
        self._ctx, self._tensors, self._expert_budget = ctx, tensors, expert_budget
        self._summed = summed

    def read(self, spec: LayerSpec, index: int, *, rope: int, group: int) -> Layer:
        """Prepare the weights of layer `index`; the sources are released one after another.

        `rope` and `group` are the numbers of its rotation table and of its group in the cache.
        """
        prefix = f"blk.{index}."
        block = self._read_mixer(prefix, spec, rope, group)
        other = self._read_second(prefix, spec, index)
        scale = self._read_scale(prefix + OUTPUT_SCALE) if spec.scales_output else 1.0
        own = None if spec.inputs is None else self._read_input(prefix, spec.inputs, spec.norms, index)
        inputs = None if spec.inputs is None or index else self._read_inputs(spec.inputs)
        return Layer(block, other, spec.is_parallel, spec.residual_scale, scale, own, inputs)

    def _read_mixer(self, prefix: str, spec: LayerSpec, rope: int, group: int) -> MixerBlock | None:
        norm, post_norm = self._read_norms(prefix, spec, MIXER_NORMS)
        match spec.mixer:
            case None:
                return None
            case Attention() as mixer:
                return self._read_attention(prefix, mixer, spec.norms, norm, post_norm, rope, group)
            case Beside(mixer, recurrence):
                assert post_norm is None, "no family norms what two mixers add"
                attention = self._read_attention(prefix, mixer, spec.norms, norm, None, rope, group)
                return make_beside(attention, self._read_recurrent(prefix, recurrence, spec.norms, None, None))
            case recurrence:
                return self._read_recurrent(prefix, recurrence, spec.norms, norm, post_norm)

    def _read_recurrent(
        self, prefix: str, mixer: Recurrence, norms: Norms, norm: NormWeight | None, post_norm: NormWeight | None
    ) -> RecurrentBlock:
        return read_recurrent(self._prepare, self._numbers, prefix, mixer, norms, norm, post_norm)

    def _read_second(
        self, prefix: str, spec: LayerSpec, index: int
    ) -> FeedForwardBlock | MixtureBlock | BothBlock | None:
        norm, post_norm = self._read_norms(prefix, spec, name_feed_forward(spec))
        match spec.feed_forward:
            case None:
                return None
            case Both() as block:
                assert post_norm is not None, "the sum of both is normed"
                return self._read_both(prefix, block, spec.norms, norm, post_norm, index)
            case Mixture() as block:
                assert post_norm is None, "no family norms what its experts add"
                return self._read_mixture(prefix, block, norm, index)
            case block:
                return self._read_feed_forward(prefix, block, norm, post_norm)

    def _read_attention(
        self,
        prefix: str,
        attention: Attention,
        norms: Norms,
        norm: NormWeight | None,
        post_norm: NormWeight | None,
        rope: int,
        group: int,
    ) -> AttentionBlock:
        gate = None
        names = PROJECTIONS[attention.projected]
        if attention.gated:  # files have of each head the rows of its query, then those of its gate
            query, own = take_halves(self._tensors[f"{prefix}attn_q.weight"], attention.heads)
            gate = prepare(self._ctx, [own], None, (prefix + ATTENTION_GATE,))
            own_names = tuple(f"{prefix}{name}.weight" for name in names)
            qkv = prepare(self._ctx, [query, *(self._tensors[name] for name in own_names[1:])], None, own_names)
        else:
            qkv = self._prepare(prefix, *names)
        return make_attention(
            norm,
            qkv,
            self._prepare(prefix, "attn_output"),
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            head_norms=self._read_head_norms(prefix, attention, norms),
            post_norm=post_norm,
            projected=attention.projected,
            sliding_window=attention.window,
            softcap=attention.softcap,
            sinks=self._vector(prefix + SINKS) if attention.sinks else None,
            rope=rope,
            group=group,
            gate=gate,
        )

    def _read_feed_forward(
        self,
        prefix: str,
        block: FeedForward,
        norm: NormWeight | None = None,
        post_norm: NormWeight | None = None,
        suffix: str = "",
    ) -> FeedForwardBlock:
        up = self._prepare(prefix, *(name + suffix for name in block.projections))
        down = self._prepare(prefix, f"ffn_down{suffix}")
        return make_feed_forward(norm, up, down, block.activation, post_norm)

    def _read_both(
        self, prefix: str, block: Both, norms: Norms, norm: NormWeight | None, post_norm: NormWeight, index: int
    ) -> BothBlock:
        """A block and the experts beside it; what the router's input is divided by is in the weight of its norm."""
        dense_post, before, after = (
            self.read_norm(prefix + name, norms) for name in (DENSE_POST_NORM, EXPERTS_NORM, EXPERTS_POST_NORM)
        )
        scale = self._vector(prefix + ROUTER_SCALE)
        scale = scale * len(scale) ** -0.5
        router_norm = NormWeight(scale, norms.eps)
        dense = self._read_feed_forward(prefix, block.dense, norm, dense_post)
        mixture = self._read_mixture(prefix, block.mixture, before, index)
        return make_both(dense, mixture, router_norm, after, post_norm)

    def _read_mixture(self, prefix: str, mixture: Mixture, norm: NormWeight | None, index: int) -> MixtureBlock:
        """Expert after expert, so that one of them is in memory twice at most."""
        ctx, tensors = self._ctx, self._tensors
        experts = range(mixture.experts)
        choice_bias = self._vector(prefix + CHOICE_BIAS) if mixture.choice_bias else None
        scales = self._vector(prefix + EXPERT_SCALES) if mixture.expert_scales else None
        router_bias = [self._vector(f"{prefix}{ROUTER}.bias")] if mixture.router_bias else None
        made = [
            [self._prepare_expert(prefix, names, expert) for names in (mixture.projections, ("ffn_down",))]
            for expert in experts
        ]
        slots = None
        if self._expert_budget is not None:
            largest = max(up.nbytes + down.nbytes for up, down in made)
            slots = self._expert_budget.count_slots(index, largest, mixture.experts)
        shared = mixture.shared_features
        return make_mixture(
            norm,
            prepare(ctx, [as_float32(tensors[f"{prefix}{ROUTER}.weight"])], router_bias, (f"{prefix}{ROUTER}.weight",)),
            make_router(mixture.experts, mixture.rule, choice_bias, scales),
            make_experts(ctx, [up for up, _ in made], [down for _, down in made], mixture.activation, slots),
            self._read_feed_forward(prefix, describe_shared(mixture), suffix=SHARED) if shared else None,
            prepare(ctx, [as_float32(tensors[prefix + SHARED_GATE])], None, (prefix + SHARED_GATE,))
            if mixture.shared_gate
            else None,
        )

    def _prepare_expert(self, prefix: str, names: tuple[str, ...], expert: int) -> LinearWeight:
        weights = [self._tensors[f"{prefix}{name}_exps.weight"].take_matrix(expert) for name in names]
        biases = [self._tensors.get(f"{prefix}{name}_exps.bias") for name in names]
        vectors = [None if bias is None else read_vector(bias.take_matrix(expert)) for bias in biases]
        own_names = tuple(name_expert(prefix + name, expert) for name in names)
        return (prepare if self._expert_budget is None else leave)(self._ctx, weights, vectors, own_names)

    def read_norm(self, name: str, norms: Norms) -> NormWeight:
        """The norm of that name."""
        bias = self._vector(f"{name}.bias") if norms.bias else None
        return NormWeight(self._vector(f"{name}.weight"), norms.eps, norms.kind, bias)

    def _read_input(self, prefix: str, spec: LayerInputs, norms: Norms, index: int) -> InputBlock:
        """What a layer does with its own input."""
        return make_input(
            self._prepare(prefix, INPUT_GATE),
            self._prepare(prefix, INPUT_PROJECTION),
            spec.activation,
            index * spec.features,
            self.read_norm(prefix + INPUT_NORM, norms),
        )

    def _read_inputs(self, spec: LayerInputs) -> InputsBlock:
        """Read what makes the inputs of all layers. The table stays in its file."""
        return make_inputs(
            self._tensors[TABLE],
            self._prepare("", INPUTS_OF_STREAM),
            NormWeight(self._vector(f"{INPUTS_NORM}.weight"), spec.eps),
            table_scale=spec.table_scale,
            scale=spec.scale,
        )

    def _read_norms(
        self, prefix: str, spec: LayerSpec, names: tuple[str, str]
    ) -> tuple[NormWeight | None, NormWeight | None]:
        before, after = (
            None if name is None else self.read_norm(prefix + name, spec.norms) for name in name_norms(spec, names)
        )
        return before, after

    def _read_head_norms(self, prefix: str, attention: Attention, norms: Norms) -> HeadNorms | None:
        if attention.head_norms is None:
            return None
        read = self._matrix if attention.head_norms == "layer" else self._vector
        q = read(f"{prefix}attn_q_norm.weight")
        k = q if attention.projected == "q" else read(f"{prefix}attn_k_norm.weight")
        return HeadNorms(q, k, norms.eps, attention.norms_values, attention.head_norms)

    def _read_scale(self, name: str) -> float:
        scale = float(self._vector(name)[0])
        if not math.isfinite(scale):
            raise ModelError(f"tensor {name} holds {scale}, expected a finite number")
        return scale

    def _prepare(self, prefix: str, *names: str) -> LinearWeight:
        biases = [self._tensors.get(f"{prefix}{name}.bias") for name in names]
        full_names = tuple(f"{prefix}{name}.weight" for name in names)
        weight = prepare(
            self._ctx,
            [self._tensors[name] for name in full_names],
            [None if bias is None else read_vector(bias) for bias in biases],
            full_names,
        )
        return replace(weight, is_share=True) if full_names[0] in self._summed else weight

    def _vector(self, name: str) -> FloatArray:
        return read_vector(self._tensors[name])

    def _matrix(self, name: str) -> FloatArray:
        """The numbers of a small matrix, row after row."""
        tensor = self._tensors[name]
        values: FloatArray = tensor.to_float32().reshape(-1)
        tensor.release()
        return values

    def _numbers(self, name: str) -> FloatArray:
        """A small tensor of any shape as numbers."""
        return read_numbers(self._tensors[name])

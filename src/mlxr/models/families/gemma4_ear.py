"""The ears of Gemma 4: a conformer of E2B and E4B over a log-mel spectrogram, and one product of 12B over its samples.

The conformer (arXiv:2005.08100) makes a row of 40 ms: two convolutions halve time and bands, then each layer has half a
feed-forward block, attention to the frame and those before it, a convolution over time and half a block again. Scores
of attention are capped, and have a part that depends on the distance of a key behind its query (arXiv:1901.02860,
appendix B). Products clamp their inputs and results to ranges of the file. (transformers, models/gemma4 and
gemma4_unified; llama.cpp, conversion/gemma.py and tools/mtmd/models/gemma4a.cpp)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.activate import activate
from mlxr.kernels.attend import allocate_pools, attend
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import add, gate_heads, scale
from mlxr.kernels.layers.operators import NormWeight
from mlxr.kernels.layers.reference import norm
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.patches import (
    batch_parts,
    convolve_columns,
    cut_taps,
    fill_pool,
    join_rows,
    make_waves,
    narrow_heads,
    split_columns,
    widen_heads,
)
from mlxr.kernels.sources import Decoded, make_vector, round_float
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers
from mlxr.models.components.weights import LayerWeights, Tensors, list_product
from mlxr.models.fields import Fields
from mlxr.models.hearing import MOST_SAMPLES, EarFamily, EarSpec, SoundRule
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.tower import Multiply, NormRows, Rows, Run, TowerNames, Words, bound_product

_EPS, _PAGE, _BLOCK, _MOST_WINDOW = round_float(1e-6), 32, 128, 64
_WORDS = Words("<|audio>", "<|audio|>", "<audio|>")
_A = "clip.audio."


@frozen
class Halve:
    """A convolution 3 x 3 over every second frame and band, a norm and ReLU.

    Frames (N, bands * inputs) become (N / 2, bands / 2 * outputs), both halves rounded up, with a band's channels side
    by side.
    """

    name: str
    bands: int
    inputs: int
    outputs: int

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        yield f"{self.name}.weight", (self.outputs, self.inputs * 9)
        yield f"{self.name}_norm.weight", (self.outputs,)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        weight = w.exact_product(self.name)
        after = NormWeight(w.vector(f"{self.name}_norm.weight"), _EPS, "layer", None)
        return lambda ctx, x: self._run(ctx, x, weight, after)

    def _run(self, ctx: Context, x: Rows, weight: LinearWeight, after: NormWeight) -> Rows:
        bands, parts = -(-self.bands // 2), list[Rows]()
        for columns in cut_taps(x, self.bands, self.inputs, _BLOCK):  # to take little memory
            normed, _ = norm(ctx, linear(ctx, columns, weight), after)
            parts.append(activate(ctx, normed, "relu", gated=False).reshape(len(columns) // bands, -1))
        return join_rows(ctx, parts)


@frozen
class HalfBlock:
    """A feed-forward block, normed before and after; half of its result is added to the rows."""

    name: str
    columns: int
    features: int

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        yield f"{self.name}_norm.weight", (self.columns,)
        yield from list_product(f"{self.name}_up", self.features, self.columns)
        yield from list_product(f"{self.name}_down", self.columns, self.features)
        yield f"{self.name}_post_norm.weight", (self.columns,)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        before, after = (_load_norm(w, f"{self.name}_{place}") for place in ("norm", "post_norm"))
        up, down = (bound_product(w, f"{self.name}_{part}") for part in ("up", "down"))

        def run(ctx: Context, x: Rows) -> Rows:
            made = up(ctx, norm(ctx, x, before)[0])
            made = down(ctx, activate(ctx, made, "silu", gated=False))
            return add(ctx, x, scale(ctx, norm(ctx, made, after)[0], 0.5))

        return run


def _load_norm(w: LayerWeights, name: str) -> NormWeight:
    return NormWeight(w.vector(f"{name}.weight"), _EPS, "rms", None)


@frozen
class NearAttention:
    """Attention of each row to itself and the rows before it, `window` of them in all, which is added to the rows.

    A score is capped. It is the product of query and key, plus that of the query and a vector for the distance between
    the two.
    """

    name: str
    columns: int
    heads: int
    window: int
    cap: float

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        for place in ("norm", "post_norm"):
            yield f"{self.name}_{place}.weight", (self.columns,)
        for part in ("q", "k", "v", "output", "distance"):
            yield from list_product(f"{self.name}_{part}", self.columns, self.columns)
        yield f"{self.name}_scale.weight", (self.columns // self.heads,)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        dim = self.columns // self.heads
        before, after = (_load_norm(w, f"{self.name}_{place}") for place in ("norm", "post_norm"))
        q, k, v, output = (bound_product(w, f"{self.name}_{part}") for part in ("q", "k", "v", "output"))
        factors = w.vector(f"{self.name}_scale.weight") * (dim**-0.5 / math.log(2))
        key_factor = math.log(1 + math.e) / math.log(2)
        distances = self._load_distances(w)

        def run(ctx: Context, x: Rows) -> Rows:
            normed, _ = norm(ctx, x, before)
            queries = q(ctx, normed).reshape(len(x), self.heads, dim) * factors
            keys, values = k(ctx, normed) * key_factor, v(ctx, normed)
            seen = self._attend(ctx, queries, keys.reshape(queries.shape), values.reshape(queries.shape), distances)
            return add(ctx, x, norm(ctx, output(ctx, seen), after)[0])

        return run

    def _load_distances(self, w: LayerWeights) -> list[LinearWeight]:
        """Return for each head a weight; its row d gives the part of a query's score for keys d rows before it."""
        name = f"{self.name}_distance"
        made = linear(w.ctx, make_waves(self.window, self.columns), w.exact_product(name))
        return [w.prepare([Decoded(name, part)], name) for part in split_columns(made, self.heads)]

    def _attend(
        self, ctx: Context, queries: FloatArray, keys: FloatArray, values: FloatArray, distances: list[LinearWeight]
    ) -> Rows:
        """Run ordinary attention: further numbers in queries and keys make the scores of distances."""
        count, heads, dim = queries.shape
        parts = split_columns(queries.reshape(count, heads * dim), heads)
        scores = [linear(ctx, part, weight) for part, weight in zip(parts, distances, strict=True)]
        wide, *kept = widen_heads(queries, keys, values, scores)
        pools = allocate_pools(ctx, -(-count // _PAGE), heads, _PAGE, wide.shape[2], "f32")
        for pool, part in zip(pools, kept, strict=True):
            fill_pool(pool, part)
        batch = batch_parts([count], _PAGE)
        made = attend(ctx, wide, *pools, batch, scale=1.0, sliding_window=self.window, softcap=self.cap)
        return narrow_heads(made, heads, dim)


@frozen
class Convolve:
    """A gated product, each column's convolution over the last `kernel` rows, and a product are added to the rows."""

    name: str
    columns: int
    kernel: int

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        for place in ("norm", "post_norm"):
            yield f"{self.name}_{place}.weight", (self.columns,)
        yield from list_product(f"{self.name}_start", 2 * self.columns, self.columns)
        yield f"{self.name}_taps.weight", (self.columns, self.kernel)
        yield from list_product(f"{self.name}_end", self.columns, self.columns)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        before, after = (_load_norm(w, f"{self.name}_{place}") for place in ("norm", "post_norm"))
        start, end = (bound_product(w, f"{self.name}_{part}") for part in ("start", "end"))
        taps = w.numbers(f"{self.name}_taps.weight")

        def run(ctx: Context, x: Rows) -> Rows:
            both = start(ctx, norm(ctx, x, before)[0])
            total = convolve_columns(gate_heads(ctx, *split_columns(both, 2)), taps)
            made = activate(ctx, norm(ctx, total, after)[0], "silu", gated=False)
            return add(ctx, x, end(ctx, made))

        return run


@frozen
class Conformer:
    """One layer: its parts, and the norm of their result."""

    name: str
    columns: int
    heads: int
    features: int
    kernel: int
    window: int
    cap: float

    @property
    def parts(self) -> tuple[HalfBlock | NearAttention | Convolve | NormRows, ...]:
        """The parts of the layer, in order."""
        return (
            HalfBlock(f"{self.name}.first", self.columns, self.features),
            NearAttention(f"{self.name}.attn", self.columns, self.heads, self.window, self.cap),
            Convolve(f"{self.name}.conv", self.columns, self.kernel),
            HalfBlock(f"{self.name}.second", self.columns, self.features),
            NormRows(f"{self.name}.norm", self.columns, _EPS, "rms"),
        )

    def tensors(self) -> Tensors:
        """List the tensors of the layer."""
        for part in self.parts:
            yield from part.tensors()

    def load(self, w: LayerWeights) -> Run:
        """Return the layer with its weights."""
        loaded = [part.load(w) for part in self.parts]

        def run(ctx: Context, x: Rows) -> Rows:
            for part in loaded:
                x = part(ctx, x)
            return x

        return run


def _make_spec(
    sizes: Mapping[str, int], channels: tuple[int, int], *, kernel: int = 5, window: int = 12, cap: float = 50.0
) -> EarSpec:
    hidden, bands, given = sizes["hidden"], sizes["bands"], sizes["given"]
    if hidden % sizes["heads"] or hidden // sizes["heads"] % 4:
        raise ModelError(f"the ear has {sizes['heads']} heads of {hidden} columns, expected heads of 4, 8, 12 …")
    fewer = -(-bands // 2)
    joined = -(-fewer // 2) * channels[1]
    rule: SoundRule = {
        "kind": "mel",
        "bands": bands,
        "frame": 320,
        "step": 160,
        "fft": 512,
        "floor": 1e-3,
        "most": MOST_SAMPLES,
    }
    return EarSpec(
        columns=sizes["columns"],
        numbers=bands,
        shrink=4,
        words=_WORDS,
        rule=rule,
        begin=(
            Halve("halve.0", bands, 1, channels[0]),
            Halve("halve.1", fewer, channels[0], channels[1]),
            Multiply("enter", hidden, joined, bias=False),
        ),
        layers=tuple(
            Conformer(f"blk.{index}", hidden, sizes["heads"], sizes["features"], kernel, window, cap)
            for index in range(sizes["layers"])
        ),
        end=(
            Multiply("leave", given, hidden),
            NormRows("", given, _EPS, "rms"),
            Multiply("project", sizes["columns"], given, bias=False),
        ),
    )


def _read_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> EarSpec:
    channels, given, kernel = [], 0, 0
    for name in ("a.conv1d.0", "a.conv1d.1", "a.pre_encode.out", "a.blk.0.conv_dw"):
        tensor = tensors.get(f"{name}.weight")
        if tensor is None:
            raise ModelError(f"tensor {name}.weight is missing")
        channels.append(tensor.shape[0])
        kernel = tensor.shape[-1]
    given = channels[2]
    sizes = {
        "hidden": fields.integer(_A + "embedding_length", 4, MAX_WIDTH),
        "layers": fields.integer(_A + "block_count", 1, MAX_LAYERS),
        "heads": fields.integer(_A + "attention.head_count", 1, MAX_HEADS),
        "features": fields.integer(_A + "feed_forward_length", 1, MAX_WIDTH),
        "bands": fields.integer(_A + "num_mel_bins", 4, 512),
        "columns": fields.integer(_A + "projection_dim", 1, MAX_WIDTH),
        "given": given,
    }
    return _make_spec(sizes, (channels[0], channels[1]), kernel=kernel)


def _read_folder(whole: Fields, ear: Fields) -> EarSpec:
    for name, value in (("hidden_act", "silu"), ("residual_weight", 0.5), ("attention_context_right", 0)):
        ear.refuse_unless((name,), (value,), f"only {value} is supported in an ear")
    hidden, channels = ear.integer("hidden_size", 4, MAX_WIDTH, default=1024), (128, 32)
    if ear.get("subsampling_conv_channels") is not None:
        first, second = ear.integers("subsampling_conv_channels", 2, 1, MAX_WIDTH)
        channels = first, second
    sight = ear.integer("attention_context_left", 2, _MOST_WINDOW, default=13) - 1
    if ear.integer("attention_chunk_size", 1, _MOST_WINDOW, default=12) < sight:
        ear.refuse("attention_chunk_size", f"at least {sight}, as far as a row sees")
    sizes = {
        "hidden": hidden,
        "layers": ear.integer("num_hidden_layers", 1, MAX_LAYERS, default=12),
        "heads": ear.integer("num_attention_heads", 1, MAX_HEADS, default=8),
        "features": 4 * hidden,
        "bands": channels[0],  # as the product behind the convolutions has it
        "columns": (whole.mapping("text_config") or Fields({})).integer("hidden_size", 1, MAX_WIDTH),
        "given": ear.integer("output_proj_dims", 1, MAX_WIDTH, default=1536),
    }
    kernel = ear.integer("conv_kernel_size", 1, _MOST_WINDOW, default=5)
    cap = ear.number("attention_logit_cap", 1e-3, 1e9, default=50.0)
    return _make_spec(sizes, channels, kernel=kernel, window=sight, cap=cap)


def _with_linear(modules: Mapping[str, str]) -> dict[str, str]:
    """Add the names of modules whose weight is that of a module below the one that has the ranges."""
    return {f"{module}{end}": name for module, name in modules.items() for end in ("", ".linear")}


_NAMES = TowerNames(
    ("model.audio_tower.", "audio_tower.", "model.embed_audio.", "embed_audio."),
    "layers.",
    _with_linear(
        {
            f"feed_forward{n}.ffw_layer_{m}": f"{half}_{part}"
            for n, half in ((1, "first"), (2, "second"))
            for m, part in ((1, "up"), (2, "down"))
        }
        | {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
        | {"self_attn.post": "attn_output", "lconv1d.linear_start": "conv_start", "lconv1d.linear_end": "conv_end"}
    )
    | {
        f"feed_forward{n}.{place}_layer_norm": f"{half}_{own}"
        for n, half in ((1, "first"), (2, "second"))
        for place, own in (("pre", "norm"), ("post", "post_norm"))
    }
    | {
        "self_attn.relative_k_proj": "attn_distance",
        "self_attn": "attn",  # of per_dim_scale, which is no module
        "norm_pre_attn": "attn_norm",
        "norm_post_attn": "attn_post_norm",
        "norm_out": "norm",
        "lconv1d.depthwise_conv1d": "conv_taps",
        "lconv1d.pre_layer_norm": "conv_norm",
        "lconv1d.conv_norm": "conv_post_norm",
    },
    {
        f"subsample_conv_projection.layer{n}.{part}": f"halve.{n}{end}"
        for n in (0, 1)
        for part, end in (("conv", ""), ("norm", "_norm"))
    }
    | {
        "subsample_conv_projection.input_proj_linear": "enter",
        "output_proj": "leave",
        "embedding_projection": "project",
    },
)
_GGUF_NAMES = TowerNames(
    ("a.",),
    "blk.",
    {
        f"ffn_{part}{end}": f"{half}_{part}"
        for end, half in (("", "first"), ("_1", "second"))
        for part in ("up", "down", "norm", "post_norm")
    }
    | {
        "attn_q": "attn_q",
        "attn_out": "attn_output",
        "attn_k_rel": "attn_distance",
        "per_dim_scale": "attn_scale",
        "attn_pre_norm": "attn_norm",
        "attn_post_norm": "attn_post_norm",
        "ln2": "norm",
        "conv_pw1": "conv_start",
        "conv_pw2": "conv_end",
        "conv_dw": "conv_taps",
        "conv_norm": "conv_norm",  # files have the names of these two exchanged
        "norm_conv": "conv_post_norm",
    },
    {f"conv1d.{n}{end}": f"halve.{n}{own}" for n in (0, 1) for end, own in (("", ""), (".norm", "_norm"))}
    | {"input_projection": "enter", "pre_encode.out": "leave"},
)
_SCALE = re.compile(r"blk\.\d+\.attn\.per_dim_scale")


def _name_folder(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _NAMES.rename(tensors)
    for name in [one for one in named if _SCALE.fullmatch(one)]:
        stated = read_numbers(named.pop(name)).reshape(-1).tolist()
        factors = [math.log1p(math.exp(-abs(one))) + max(one, 0.0) for one in stated]
        whole = f"{name.removesuffix('.per_dim_scale')}_scale.weight"
        named[whole] = make_vector(whole, factors)
    return dict(_flatten(named))


def _name_gguf(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    named = _GGUF_NAMES.rename(tensors)
    projection = tensors.get("mm.a.input_projection.weight")
    return dict(_flatten(named)) | ({} if projection is None else {"project.weight": projection})


def _flatten(named: Mapping[str, TensorSource]) -> Iterator[tuple[str, TensorSource]]:
    """Return the tensors, with those of convolutions as matrices."""
    for name, tensor in named.items():
        flat = len(tensor.shape) > 2 or name.endswith("conv_taps.weight")
        yield name, Decoded(name, read_numbers(tensor).reshape(tensor.shape[0], -1)) if flat else tensor


def _make_plain(numbers: int, columns: int, eps: float) -> EarSpec:
    return EarSpec(
        columns=columns,
        numbers=numbers,
        shrink=1,
        words=_WORDS,
        rule={"kind": "samples", "frame": numbers, "most": MOST_SAMPLES},
        layers=(NormRows("", numbers, eps, "rms"),),
        end=(Multiply("project", columns, numbers, bias=False),),
    )


def _read_plain_gguf(fields: Fields, tensors: Mapping[str, TensorSource]) -> EarSpec:
    tensor = tensors.get("mm.a.input_projection.weight")
    if tensor is None or len(tensor.shape) != 2 or not 1 <= tensor.shape[1] <= MAX_WIDTH:
        raise ModelError("tensor mm.a.input_projection.weight is missing, or no matrix")
    return _make_plain(tensor.shape[1], fields.integer(_A + "projection_dim", 1, MAX_WIDTH), _EPS)


def _read_plain_folder(whole: Fields, ear: Fields) -> EarSpec:
    columns = (whole.mapping("text_config") or Fields({})).integer("hidden_size", 1, MAX_WIDTH)
    eps = round_float(ear.number("rms_norm_eps", 1e-12, 1e-2, default=1e-6))
    return _make_plain(ear.integer("audio_embed_dim", 1, MAX_WIDTH, default=640), columns, eps)


def make_ears(name: str) -> tuple[EarFamily, EarFamily]:
    """Return the two kinds of ears; folders of the first have the type `name`."""
    plain = f"{name}ua", (f"{name}_unified",)
    return (
        EarFamily(f"{name}a", (name,), _read_gguf, _read_folder, _name_gguf, _name_folder),
        EarFamily(*plain, _read_plain_gguf, _read_plain_folder, _name_gguf, _name_folder),
    )

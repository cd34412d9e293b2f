"""The part of a model that sees: pictures in, rows out that stand in the place of embeddings.

A tower is an encoder of the same components as a text's layers, whose tokens are patches of one picture. What comes
with which files is read here: a GGUF file of its own (`mmproj`, https://github.com/ggml-org/llama.cpp, tools/mtmd), or
the tensors of a Hugging Face folder beside those of its text. Towers that run are Qwen3-VL's, which Qwen3.5 has, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from mlxr.core.errors import ModelError
from mlxr.kernels.activate import activate
from mlxr.kernels.arrays import join_columns
from mlxr.kernels.attend import allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import add
from mlxr.kernels.layers import StepInput, prepare_layers, run_layers
from mlxr.kernels.layers.operators import NormWeight
from mlxr.kernels.layers.reference import norm
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.patches import (
    Pixels,
    blend_positions,
    cut_patches,
    make_shades,
    order_patches,
    sum_slices,
    whole_batch,
)
from mlxr.kernels.rope import build_plane_table
from mlxr.kernels.sources import cut_vector, round_float
from mlxr.kernels.tensor import FloatArray, TensorSource, read_numbers
from mlxr.models.components import Attention, FeedForward, Layer, Norms, Rope, Weights
from mlxr.models.components.weights import LayerWeights, Tensors, list_product
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.model import Model

PROJECTORS = ("qwen3vl_merger",)  # of GGUF files
_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # of folders, some with _vision behind
_PAGE_SIZE, _THETA, _EPS = 32, 10000.0, round_float(1e-6)
_MAX_PATCH, _MAX_MERGE, _MAX_SIDE, _MAX_PIXELS = 64, 4, 1024, 1 << 28
_CHANNELS = 3


def takes_pictures(model: Model) -> bool:
    """Whether the text of a model has places for pictures, which a tower that fits would fill."""
    rope = None if model.attention is None else model.attention.rope
    return rope is not None and rope.sections is not None


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """The sizes of a tower. Raises ModelError for such as contradict each other."""

    hidden: int
    layers: int
    heads: int
    features: int  # of the feed-forward blocks
    patch: int  # pixels of a patch's side
    merge: int  # a row is made of so many patches to each side
    positions: int  # to each side of the square of learned positions
    columns: int  # of the text's stream
    taps: tuple[int, ...]  # layers whose output is added behind the text's first layers, in their order
    least_pixels: int
    most_pixels: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of each colour, 0 to 1
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    eps: float = _EPS

    def __post_init__(self) -> None:
        if self.hidden % self.heads or (self.hidden // self.heads) % 4:
            raise ModelError(f"the tower has {self.heads} heads of {self.hidden} columns, expected heads of 4, 8, 12 …")
        if any(not 0 <= tap < self.layers for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ModelError(f"the tower has taps {self.taps}, expected ascending numbers of its {self.layers} layers")
        if not 0 < self.least_pixels <= self.most_pixels:
            raise ModelError(f"the tower takes {self.least_pixels} to {self.most_pixels} pixels, expected a range")

    @property
    def factor(self) -> int:
        """Both sides of a picture are multiples of so many pixels, which make one row of the text."""
        return self.patch * self.merge

    @property
    def row_numbers(self) -> int:
        """Numbers of an encoded row: what enters the text's first layer, and what is added behind others."""
        return self.columns * (1 + len(self.taps))

    def fit(self, model: Model) -> None:
        """Raise ModelError unless the text of `model` takes this tower's rows."""
        if self.columns != model.hidden or len(self.taps) != model.picture_layers:
            raise ModelError(
                f"its rows are {self.columns} wide with {len(self.taps)} more, those of the model {model.hidden} with "
                f"{model.picture_layers} more; take the tower of the same model"
            )
        if not takes_pictures(model):
            raise ModelError("the model does not say by which axes pictures turn (rope.dimension_sections)")

    @property
    def layer(self) -> Layer:
        """One of its layers."""
        head_dim = self.hidden // self.heads
        attention = Attention(
            self.heads,
            self.heads,
            head_dim,
            1.0 / math.sqrt(head_dim),
            Rope(_THETA, head_dim, interleaved=False, has_factors=False),
            is_causal=False,
            qkv_bias=True,
            output_bias=True,
        )
        feed_forward = FeedForward(self.features, "gelu_tanh", bias=True, gated=False)
        return Layer(attention, feed_forward, Norms(self.eps, kind="layer", bias=True))

    def end_tensors(self) -> Tensors:
        """List the tensors outside the layers."""
        yield "patch_embd.weight", (self.hidden, _CHANNELS * self.patch**2)
        yield "patch_embd.bias", (self.hidden,)
        yield "position_embd.weight", (self.positions**2, self.hidden)
        joined = self.hidden * self.merge**2
        for name, normed in (("merge", self.hidden), *((f"deep.{tap}", joined) for tap in range(len(self.taps)))):
            for end in ("weight", "bias"):
                yield f"{name}.norm.{end}", (normed,)
            yield from list_product(f"{name}.fc1", joined, joined, bias=True)
            yield from list_product(f"{name}.fc2", self.columns, joined, bias=True)


def read_gguf_spec(metadata: Mapping[str, object]) -> TowerSpec:
    """Return the sizes that an `mmproj` file states. Raises ModelError, naming the key."""
    fields = Fields(metadata)
    fields.refuse_unless(
        ("general.architecture",), ("clip",), "expected a file with a tower, whose architecture is clip"
    )
    own = fields.get("clip.vision.projector_type")
    kind = fields.text("clip.projector_type" if own is None else "clip.vision.projector_type")
    if kind not in PROJECTORS:
        raise ModelError(
            f"clip.projector_type is {kind!r}, which does not run yet; those that do: {', '.join(PROJECTORS)}"
        )
    if not fields.flag("clip.use_gelu", False):
        raise ModelError("clip.use_gelu is not true, expected a tower with gelu")
    v = "clip.vision."
    layers = fields.integer(v + "block_count", 1, MAX_LAYERS)
    patch = fields.integer(v + "patch_size", 1, _MAX_PATCH)
    flags = fields.flags(v + "is_deepstack_layers", layers) or ()
    side = fields.integer(v + "image_size", patch, _MAX_SIDE * _MAX_PATCH)
    merge = fields.integer(v + "spatial_merge_size", 1, _MAX_MERGE, default=2)
    least, most = _usual_pixels(patch * merge)
    return TowerSpec(
        hidden=fields.integer(v + "embedding_length", 4, MAX_WIDTH),
        layers=layers,
        heads=fields.integer(v + "attention.head_count", 1, MAX_HEADS),
        features=fields.integer(v + "feed_forward_length", 1, MAX_WIDTH),
        patch=patch,
        merge=merge,
        positions=side // patch,
        columns=fields.integer(v + "projection_dim", 1, MAX_WIDTH),
        taps=tuple(index for index, is_tap in enumerate(flags) if is_tap),
        least_pixels=fields.integer(v + "image_min_pixels", 1, _MAX_PIXELS, default=least),
        most_pixels=fields.integer(v + "image_max_pixels", 1, _MAX_PIXELS, default=most),
        mean=_read_colours(fields, v + "image_mean"),
        deviation=_read_colours(fields, v + "image_std", 1e-3),
        eps=round_float(fields.number(v + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=_EPS)),
    )


def read_folder_spec(config: Mapping[str, object], preprocessor: Mapping[str, object]) -> TowerSpec | None:
    """Return the sizes in a folder's `config.json` and `preprocessor_config.json`; None without a tower.

    Raises ModelError, naming the key.
    """
    tower, prepares = Fields(config).mapping("vision_config"), Fields(preprocessor)
    if tower is None:
        return None
    kind = tower.text("model_type", default="")
    if kind.removesuffix("_vision") not in _TYPES:
        raise ModelError(
            f"{tower.key('model_type')} is {kind!r}, a tower that does not run yet; those that do: {', '.join(_TYPES)}"
        )
    tower.refuse_unless(("hidden_act",), ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is supported in a tower")
    tower.refuse_unless(("in_channels",), (_CHANNELS,), "only pictures of three colours are supported")
    patch = tower.integer("patch_size", 1, _MAX_PATCH, default=16)
    merge = tower.integer("spatial_merge_size", 1, _MAX_MERGE, default=2)
    count = tower.integer("num_position_embeddings", 1, _MAX_SIDE**2, default=2304)
    taps, layers = tower.get("deepstack_visual_indexes"), tower.integer("depth", 1, MAX_LAYERS)
    least, most = _usual_pixels(patch * merge)
    size = prepares.mapping("size") or Fields({})
    return TowerSpec(
        hidden=tower.integer("hidden_size", 4, MAX_WIDTH),
        layers=layers,
        heads=tower.integer("num_heads", 1, MAX_HEADS),
        features=tower.integer("intermediate_size", 1, MAX_WIDTH),
        patch=patch,
        merge=merge,
        positions=math.isqrt(count),
        columns=tower.integer("out_hidden_size", 1, MAX_WIDTH),
        taps=tower.integers("deepstack_visual_indexes", len(taps), 0, layers - 1) if isinstance(taps, list) else (),
        least_pixels=size.integer("shortest_edge", 1, _MAX_PIXELS, default=least),
        most_pixels=size.integer("longest_edge", 1, _MAX_PIXELS, default=most),
        mean=_read_colours(prepares, "image_mean"),
        deviation=_read_colours(prepares, "image_std", 1e-3),
    )


def _usual_pixels(factor: int) -> tuple[int, int]:
    """The fewest and the most pixels of a picture where files do not say: 64 to 16,384 rows."""
    return 64 * factor**2, 16384 * factor**2


def _read_colours(fields: Fields, name: str, low: float = 0.0) -> tuple[float, ...]:
    numbers = (0.5,) * _CHANNELS if fields.get(name) is None else fields.numbers(name, low, 1.0, _CHANNELS)
    return tuple(map(round_float, numbers))  # as GGUF has them


_GGUF_BLOCK = {"attn_out": "attn_output", "ln1": "attn_norm", "ln2": "ffn_norm"}
_GGUF_ENDS = {"v.post_ln": "merge.norm", "mm.0": "merge.fc1", "mm.2": "merge.fc2"}
_FOLDER_BLOCK = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_output",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_FOLDER_ENDS = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_FOLDER_PREFIXES = ("model.visual.", "visual.")


def name_gguf_tensors(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of an `mmproj` file by the names used here."""
    named: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        parts = stem.split(".")
        if name.startswith("v.blk.") and len(parts) == 4:
            named[f"blk.{parts[2]}.{_GGUF_BLOCK.get(parts[3], parts[3])}.{end}"] = tensor
        elif name.startswith("v.deepstack.") and parts[2].isdecimal() and int(parts[2]) in spec.taps:
            named[f"deep.{spec.taps.index(int(parts[2]))}.{parts[3]}.{end}"] = tensor
        elif stem in _GGUF_ENDS:
            named[f"{_GGUF_ENDS[stem]}.{end}"] = tensor
        elif name in ("v.position_embd.weight", "v.patch_embd.bias"):
            named[name.removeprefix("v.")] = tensor
    slices = [tensors[name] for name in ("v.patch_embd.weight", "v.patch_embd.weight.1") if name in tensors]
    return named | _join_slices(spec, [read_numbers(part) for part in slices])


def name_folder_tensors(spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tower's tensors of a folder by the names used here."""
    named: dict[str, TensorSource] = {}
    for full_name, tensor in tensors.items():
        name = next((full_name.removeprefix(one) for one in _FOLDER_PREFIXES if full_name.startswith(one)), None)
        if name is None:
            continue
        stem, _, end = name.rpartition(".")
        parts = stem.split(".", 2)
        if parts[0] == "blocks" and len(parts) == 3 and parts[2] in _FOLDER_BLOCK:
            named[f"blk.{parts[1]}.{_FOLDER_BLOCK[parts[2]]}.{end}"] = tensor
        elif parts[0] == "merger" and parts[-1] in _FOLDER_ENDS:
            named[f"merge.{_FOLDER_ENDS[parts[-1]]}.{end}"] = tensor
        elif parts[0] == "deepstack_merger_list" and parts[-1] in _FOLDER_ENDS:
            named[f"deep.{parts[1]}.{_FOLDER_ENDS[parts[-1]]}.{end}"] = tensor
        elif name == "pos_embed.weight":
            named["position_embd.weight"] = tensor
        elif name == "patch_embed.proj.bias":
            named["patch_embd.bias"] = tensor
        elif name == "patch_embed.proj.weight":
            whole = read_numbers(tensor)
            slices = [whole[:, :, part] for part in range(whole.shape[2])] if whole.ndim == 5 else []
            named |= _join_slices(spec, slices)
    return named


def _join_slices(spec: TowerSpec, slices: Sequence[FloatArray]) -> dict[str, TensorSource]:
    """One matrix of the slices in time: a picture that stands still is seen by all of them."""
    shape = (spec.hidden, _CHANNELS, spec.patch, spec.patch)
    if not slices or any(part.shape != shape for part in slices):
        found = [part.shape for part in slices] or "missing"
        raise ModelError(f"the tower's tensor of patches is {found}, expected slices {shape}")
    return {"patch_embd.weight": sum_slices("patch_embd.weight", slices)}


@dataclass(frozen=True, slots=True)
class _Merger:
    """Makes one row of the patches of a square: normed each, or together."""

    norm: NormWeight
    first: LinearWeight
    second: LinearWeight

    def run(self, ctx: Context, x: FloatArray, joined: int) -> FloatArray:
        """Rows (N / merge², columns) of patches (N, hidden), of which neighbours make a square."""
        columns = x.shape[0] * x.shape[1] // joined
        if len(self.norm.weight) == joined:
            x = norm(ctx, x.reshape(columns, joined), self.norm)[0]
        else:
            x = norm(ctx, x, self.norm)[0].reshape(columns, joined)
        return linear(ctx, activate(ctx, linear(ctx, x, self.first), "gelu_erf", gated=False), self.second)


class Tower:
    """A tower with the sizes of `spec` ready to run on the CPU.

    `rename` gives the tensors the names used here (`name_gguf_tensors`, `name_folder_tensors`). Raises ModelError for
    tensors that do not fit the sizes.
    """

    def __init__(
        self,
        ctx: Context,
        spec: TowerSpec,
        tensors: Mapping[str, TensorSource],
        rename: Callable[[TowerSpec, Mapping[str, TensorSource]], dict[str, TensorSource]],
    ) -> None:
        self.ctx, self.spec = ctx, spec
        named = rename(spec, tensors)
        layer, norms = spec.layer, spec.layer.norms
        for index in range(spec.layers):
            _split(named, f"blk.{index}.", spec.hidden)
        weights = Weights(ctx, named)
        weights.check("", spec.end_tensors())
        self._layers = [prepare_layers(ctx, [layer.load(weights, index, spec.hidden)]) for index in range(spec.layers)]
        ends = weights.of_model(norms)
        self._patches = ends.exact_product("patch_embd", bias=True)
        self._positions = ends.numbers("position_embd.weight")
        self._merger = _load_merger(ends, "merge")
        self._deep = {tap: _load_merger(ends, f"deep.{number}") for number, tap in enumerate(spec.taps)}
        self._shades = make_shades(spec.mean, spec.deviation)

    def encode(self, pixels: Pixels) -> Generator[None, None, FloatArray]:
        """Compute the rows (rows, `row_numbers`) of a picture whose sides are multiples of the spec's factor.

        It may be stopped after each layer, where nothing is given out but the chance to. The bits are the same whatever
        is done meanwhile, and on any number of threads.
        """
        spec, ctx = self.spec, self.ctx
        head_dim, joined = spec.hidden // spec.heads, spec.hidden * spec.merge**2
        grid = pixels.shape[0] // spec.patch, pixels.shape[1] // spec.patch
        rows, columns = order_patches(grid, spec.merge)
        x = linear(ctx, cut_patches(pixels, self._shades, spec.patch, spec.merge), self._patches)
        x = add(ctx, x, blend_positions(self._positions, grid, rows, columns))
        batch = whole_batch(x.shape[0], _PAGE_SIZE)
        k, v = allocate_pools(ctx, batch.page_table.shape[1], spec.heads, _PAGE_SIZE, head_dim, "f32")
        step = StepInput(batch, [build_plane_table(rows, columns, head_dim, _THETA)], [k], [v])
        deep = []
        for index, layer in enumerate(self._layers):
            x, delta = run_layers(ctx, x, layer, step)
            x = x if delta is None else add(ctx, x, delta)
            if index in self._deep:
                deep.append(self._deep[index].run(ctx, x, joined))
            yield
        made = self._merger.run(ctx, x, joined)
        for more in deep:
            made = join_columns(ctx, made, more)
        return made


def _load_merger(w: LayerWeights, name: str) -> _Merger:
    return _Merger(w.norm(f"{name}.norm"), w.product(f"{name}.fc1"), w.product(f"{name}.fc2"))


def _split(tensors: dict[str, TensorSource], prefix: str, rows: int) -> None:
    """Part queries, keys and values where a file has them as one. Raises ModelError for another shape."""
    for end in ("weight", "bias"):
        joined = tensors.pop(f"{prefix}attn_qkv.{end}", None)
        if joined is None:
            continue
        if joined.shape[0] != 3 * rows:
            raise ModelError(f"tensor {joined.name} has {joined.shape[0]} rows, expected {3 * rows}")
        for number, part in enumerate(("q", "k", "v")):
            first, last = number * rows, (number + 1) * rows
            cut = cut_vector(joined, first, last) if end == "bias" else joined.take_rows(first, last)
            tensors[f"{prefix}attn_{part}.{end}"] = cut

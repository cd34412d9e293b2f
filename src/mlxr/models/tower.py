"""The part of a model that sees: pictures in, rows out that take the place of embeddings.

A tower is an encoder of the same components as a text's layers, whose tokens are patches of one picture. The parts
before and behind its layers are lists of steps. A family's file states its towers (`TowerFamily`): their sizes in files
`mmproj` (https://github.com/ggml-org/llama.cpp, tools/mtmd) and in folders of Hugging Face, and the names of tensors in
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

from mlxr.core.errors import ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.activate import Activation, activate
from mlxr.kernels.arrays import fetch_rows, finish, join_columns, place_rows
from mlxr.kernels.attend import KVType, allocate_pools
from mlxr.kernels.context import Context
from mlxr.kernels.elementwise import add, scale
from mlxr.kernels.layers import StepInput, prepare_layers, run_layers
from mlxr.kernels.layers.operators import Activate, Attend, MatMul, NormKind, NormWeight, Operator, Scale
from mlxr.kernels.layers.operators import Layer as PreparedLayer
from mlxr.kernels.layers.reference import Registers, norm, run_layer, take
from mlxr.kernels.linear import LinearWeight, linear
from mlxr.kernels.patches import (
    Pixels,
    Ranges,
    add_token,
    batch_parts,
    blend_positions,
    cut_batch,
    cut_patches,
    join_arrays,
    join_neighbours,
    join_rows,
    make_ones,
    make_shades,
    move_squares,
    order_patches,
    order_windows,
    pick_positions,
    resize_positions,
    restore_squares,
    sample_positions,
    shift_columns,
    sum_axes,
    sum_neighbours,
    sum_slices,
)
from mlxr.kernels.ragged import RaggedBatch
from mlxr.kernels.rope import RopeTable, build_plane_table
from mlxr.kernels.sources import cut_vector, round_float
from mlxr.kernels.tensor import FloatArray, IntArray, TensorSource, read_numbers
from mlxr.models.components import Attention, FeedForward, Layer, Norms, Rope, Weights
from mlxr.models.components.attention import NO_ROPE
from mlxr.models.components.weights import LayerWeights, NormPlaces, Tensors, list_product
from mlxr.models.fields import Fields
from mlxr.models.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from mlxr.models.model import Model

_PAGE_SIZE = 32
PIECE_ROWS = 512  # patches that are computed between two chances to stop
MAX_PATCH, MAX_MERGE, MAX_SIDE, MAX_PIXELS = 64, 8, 1024, 1 << 28
CHANNELS = 3
Grid = tuple[int, int]  # rows and columns
Rows = FloatArray
Run = Callable[[Context, Rows], Rows]


class Step(Protocol):
    """A step behind the layers of a tower."""

    def tensors(self) -> Tensors:
        """List the tensors of the step."""

    def load(self, w: LayerWeights) -> Run:
        """Return a function that runs the step on rows."""


@frozen
class Join:
    """Make one row of so many neighbours: (N, columns) to (N / count, count * columns)."""

    count: int
    by_columns: bool = False  # the first column of all of them comes first, then the second one of all

    def tensors(self) -> Tensors:
        """List no tensors, as it has none."""
        yield from ()

    def load(self, w: LayerWeights) -> Run:  # noqa: ARG002 -- as all steps
        """Return the step with its weights."""
        return lambda ctx, x: join_neighbours(ctx, x, self.count, by_columns=self.by_columns)


@frozen
class Average:
    """Make one row of so many neighbours, `factor` times their mean: (N, columns) to (N / count, columns)."""

    count: int
    factor: float = 1.0

    def tensors(self) -> Tensors:
        """List no tensors, as it has none."""
        yield from ()

    def load(self, w: LayerWeights) -> Run:  # noqa: ARG002 -- as all steps
        """Return the step with its weights."""
        return self._run

    def _run(self, ctx: Context, x: Rows) -> Rows:
        return scale(ctx, sum_neighbours(ctx, x, self.count), self.factor / self.count)


@frozen
class Shift:
    """Subtract a bias from each row, then multiply it by a weight, column by column."""

    name: str
    columns: int

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        yield f"{self.name}.weight", (self.columns,)
        yield f"{self.name}.bias", (self.columns,)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        weight, bias = w.vector(f"{self.name}.weight"), w.vector(f"{self.name}.bias")
        return lambda ctx, x: shift_columns(ctx, x, weight, bias)


@frozen
class NormRows:
    """Norm each row by itself; without a `name` the norm has no weight."""

    name: str
    columns: int
    eps: float
    kind: NormKind = "layer"

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        if self.name:
            yield f"{self.name}.weight", (self.columns,)
        if self.kind == "layer":
            yield f"{self.name}.bias", (self.columns,)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        bias = w.vector(f"{self.name}.bias") if self.kind == "layer" else None
        own = w.vector(f"{self.name}.weight") if self.name else make_ones(self.columns)
        weight = NormWeight(own, self.eps, self.kind, bias)
        return lambda ctx, x: norm(ctx, x, weight)[0]


@frozen
class Multiply:
    """Multiply each row by a weight, and apply an activation to the result."""

    name: str
    rows: int
    columns: int
    bias: bool = True
    activation: Activation | None = None

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        yield from list_product(self.name, self.rows, self.columns, bias=self.bias)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        weight, kind = w.product(self.name), self.activation
        if kind is None:
            return lambda ctx, x: linear(ctx, x, weight)
        return lambda ctx, x: activate(ctx, linear(ctx, x, weight), kind, gated=False)


@frozen
class ActivateRows:
    """Apply an activation to each number."""

    activation: Activation

    def tensors(self) -> Tensors:
        """List no tensors, as it has none."""
        yield from ()

    def load(self, w: LayerWeights) -> Run:  # noqa: ARG002 -- as all steps
        """Return the step with its weights."""
        return lambda ctx, x: activate(ctx, x, self.activation, gated=False)


@frozen
class GateRows:
    """A feed-forward block with a gate: (N, columns) to (N, columns), by so many `features`."""

    name: str
    columns: int
    features: int
    activation: Activation

    def tensors(self) -> Tensors:
        """List the tensors of the step."""
        for part in ("gate", "up"):
            yield from list_product(f"{self.name}.{part}", self.features, self.columns)
        yield from list_product(f"{self.name}.down", self.columns, self.features)

    def load(self, w: LayerWeights) -> Run:
        """Return the step with its weights."""
        both, down = w.product(f"{self.name}.gate", f"{self.name}.up"), w.product(f"{self.name}.down")
        return lambda ctx, x: linear(ctx, activate(ctx, linear(ctx, x, both), self.activation, gated=True), down)


@frozen
class Words:
    """The texts around a picture in a prompt; `place` is a token that becomes as many as there are rows."""

    open: str
    place: str
    close: str
    alone: str = ""  # before the rows of a picture that is not cut
    tile: str = ""  # before those of a tile, with {row} and {column} from 1 on
    line: str = ""  # behind a line of tiles
    whole: str = ""  # before those of all of a picture, behind its tiles
    row_break: str = ""  # behind each line of rows but the last; each line then has a place of its own

    def spell(self, grid: tuple[int, int], tiles: int, lines: int) -> str:
        """Return the words of one picture whose `tiles` stand in a `grid`, the last of them with `lines` lines of
        rows."""
        rows = self.row_break.join([self.place] * (lines if self.row_break else 1))
        if tiles == 1:
            return self.open + self.alone + rows + self.close
        cut = ""
        for row in range(grid[0]):
            cut += "".join(self.tile.format(row=row + 1, column=at + 1) + self.place for at in range(grid[1]))
            cut += self.line
        return self.open + cut + (self.whole + rows if tiles > grid[0] * grid[1] else "") + self.close

    @property
    def tokens(self) -> tuple[str, ...]:
        """The control tokens without which a vocabulary has no words for pictures."""
        return tuple(word for word in (self.open.strip(), self.place, self.row_break, self.close.strip()) if word)


PixelRule = Mapping[str, int | str]  # settings of sizes for `mlxr.pictures.worker`
# Learned positions: a square of them is blended for other grids, either between its corners or as a picture is resized,
# or sampled by cubic curves; or it fits the only grid; or each row and each column has one; or there are none.
Positions = Literal["blended", "resized", "sampled", "own", "axes", "none"]


@frozen
class TowerSpec:
    """The sizes of a tower, and its parts. Raises ModelError for sizes that contradict each other."""

    hidden: int
    layers: int
    heads: int
    features: int  # of the feed-forward blocks
    patch: int  # pixels of a patch's side
    merge: int  # a row is made of a square of so many patches to each side
    side: int  # of the square of learned positions, or the number of rows and columns that have one
    columns: int  # of the text's stream
    words: Words
    end: tuple[Step, ...]  # behind the last layer
    eps: float
    positions: Positions = "own"
    theta: float | None = None  # base by which queries and keys turn, half by their row and half by their column
    lies_between: bool = False  # columns turn by frequencies between those of rows, else by the same
    patch_bias: bool = True
    norm: NormKind = "layer"  # of the layers
    bias: bool = True  # of their products
    activation: Activation = "gelu_tanh"
    gated: bool = False
    first: tuple[Step, ...] = ()  # on the pixels of patches, before the product
    begin: tuple[Step, ...] = ()  # on patches, before they get positions
    taps: tuple[int, ...] = ()  # layers whose output is added behind the text's first layers, in their order
    tap_ends: tuple[tuple[Step, ...], ...] = ()  # on these outputs
    least_pixels: int = 1
    most_pixels: int = MAX_PIXELS
    resample: int = 3  # Pillow's number of the filter that resizes pictures
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of each colour, 0 to 1
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    grows: bool = False  # a picture with a side shorter than a row's counts as if enlarged to it
    is_whole: bool = False  # the text's tokens of a picture see all of it
    turns: bool = False  # they stand on the axes of time, rows and columns
    window: int = 0  # patches see those in a square of so many rows of the text to each side; 0: all of the picture
    whole_layers: tuple[int, ...] = ()  # with a window: layers in which patches see all of a picture
    slope: float = 1.0  # silu's input is multiplied by this, and its result divided by it
    has_class: bool = False  # a token stands beside the patches, and results of the layers' products are scaled
    norms_heads: bool = False  # heads of queries and keys are normed
    norms_all: bool = False  # blocks' results and heads are normed, too, and scores are not scaled
    budgets: tuple[int, ...] = ()  # rows, ascending: a picture fills one of these as far as its shape allows
    tile: int = 0  # pixels of a tile's side if large pictures are cut, and others keep their shape
    most_tiles: int = 0
    longest: int = 0  # pixels of a picture's longer side if it is cut into tiles, or only made smaller; else 0

    def __post_init__(self) -> None:
        if self.hidden % self.heads or (self.hidden // self.heads) % 4:
            raise ModelError(f"the tower has {self.heads} heads of {self.hidden} columns, expected heads of 4, 8, 12 …")
        if any(not 0 <= tap < self.layers for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ModelError(f"the tower has taps {self.taps}, expected ascending numbers of its {self.layers} layers")
        if not 0 < self.least_pixels <= self.most_pixels:
            raise ModelError(f"the tower takes {self.least_pixels} to {self.most_pixels} pixels, expected a range")
        if self.positions == "axes" and (not self.budgets or self.side < self.budgets[-1] * self.merge):
            raise ModelError(f"the tower has {self.side} positions of each axis, expected as many as patches")
        if self.side % self.merge and self.positions == "own":
            raise ModelError(f"the tower has {self.side} patches to each side, expected a multiple of {self.merge}")

    @property
    def factor(self) -> int:
        """Pixels that a row of the text has to each side; both sides of a picture are multiples of it."""
        return self.patch * self.merge

    def find_grid(self, pixels: Pixels) -> tuple[int, int]:
        """Return rows and columns of the rows that a picture, or a tile of one, becomes."""
        return pixels.shape[0] // self.factor, pixels.shape[1] // self.factor

    @property
    def row_numbers(self) -> int:
        """Numbers of an encoded row: the input of the text's first layer, and the additions behind others."""
        return self.columns * (1 + len(self.taps))

    def fit(self, model: Model) -> None:
        """Raise ModelError unless the text of `model` takes this tower's rows."""
        if self.columns != model.hidden or len(self.taps) != model.picture_layers:
            raise ModelError(
                f"its rows are {self.columns} wide with {len(self.taps)} more, those of the model {model.hidden} with "
                f"{model.picture_layers} more; take the tower of the same model"
            )
        if self.turns and not model.turns_pictures:
            raise ModelError("the model does not say by which axes pictures turn (rope.dimension_sections)")
        if self.is_whole and not model.sees_whole_pictures:
            raise ModelError("the model does not see pictures as a whole, as this tower's does")

    def choose_rule(self, tokens: int) -> PixelRule:
        """Return the settings for resizing a picture, so that it has at most so many tokens."""
        if self.positions == "own":
            pixels, rows = self.side * self.patch, (self.side // self.merge) ** 2
            if self.longest:
                return {"kind": "tiles", "tile": pixels, "longest": self.longest, "most": max(1, tokens // rows)}
            if self.most_tiles:
                return {"kind": "grid", "tile": pixels, "most_tiles": min(self.most_tiles, tokens // rows - 1)}
            return {"kind": "square", "side": pixels, "resample": self.resample}
        if self.tile:
            rows = (self.tile // self.factor) ** 2
            bounds = {"least": self.least_pixels, "most": min(self.most_pixels, tokens * self.factor**2)}
            tiles = min(self.most_tiles, (tokens - self.most_pixels // self.factor**2) // rows)
            return {"kind": "spread", "factor": self.factor, **bounds, "tile": self.tile, "most_tiles": tiles}
        if self.budgets:
            budget = max((one for one in self.budgets if one <= tokens), default=tokens)
            return {"kind": "budget", "factor": self.factor, "most": budget}
        if self.longest:
            return {"kind": "within", "factor": self.factor, "longest": self.longest, "most": tokens}
        most = min(self.most_pixels, tokens * self.factor**2)
        grows = {"grows": 1} if self.grows else {}
        return {"kind": "near", "factor": self.factor, "least": min(self.least_pixels, most), "most": most, **grows}

    @property
    def layer(self) -> Layer:
        """One of its layers."""
        head_dim = self.hidden // self.heads
        attention = Attention(
            self.heads,
            self.heads,
            head_dim,
            1.0 if self.norms_all else 1.0 / math.sqrt(head_dim),
            Rope(self.theta, head_dim, interleaved=False, has_factors=False) if self.theta else NO_ROPE,
            is_causal=False,
            qkv_bias=self.bias,
            output_bias=self.bias,
            head_norms="each" if self.norms_all or self.norms_heads else None,
            norms_values=self.norms_all,
        )
        feed_forward = FeedForward(self.features, self.activation, bias=self.bias, gated=self.gated)
        places: NormPlaces = "both" if self.norms_all else "before"
        return Layer(attention, feed_forward, Norms(self.eps, self.norm, self.norm == "layer", places))

    def end_tensors(self) -> Tensors:
        """List the tensors outside the layers."""
        yield "patch_embd.weight", (self.hidden, CHANNELS * self.patch**2)
        if self.patch_bias:
            yield "patch_embd.bias", (self.hidden,)
        if self.has_class:
            yield "class.weight", (self.hidden,)
        if self.positions != "none":
            rows = 2 * self.side if self.positions == "axes" else self.side**2
            yield "position_embd.weight", (rows, self.hidden)
        for steps in (self.first, self.begin, self.end, *self.tap_ends):
            for step in steps:
                yield from step.tensors()


@frozen
class TowerNames:
    """The names of a tower's tensors in files.

    A name is a prefix, the module and `.weight` or `.bias`; modules of layers are numbered behind `block`.
    """

    prefixes: tuple[str, ...]
    block: str
    modules: Mapping[str, str]  # of layers; those that are missing have the names used here
    ends: Mapping[str, str]  # of other modules, and whole names

    def rename(self, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return the tensors of a tower by the names used here, from all tensors of a file."""
        named: dict[str, TensorSource] = {}
        for full_name, tensor in tensors.items():
            name = next((full_name.removeprefix(one) for one in self.prefixes if full_name.startswith(one)), None)
            if name is None:
                continue
            stem, _, end = name.rpartition(".")
            number, _, module = stem.removeprefix(self.block).partition(".")
            if name in self.ends:
                named[self.ends[name]] = tensor
            elif stem in self.ends:
                named[f"{self.ends[stem]}.{end}"] = tensor
            elif stem.startswith(self.block) and number.isdecimal():
                named[f"blk.{number}.{self.modules.get(module, module)}.{end}"] = tensor
        return named


GGUF_BLOCK = {"attn_out": "attn_output", "ln1": "attn_norm", "ln2": "ffn_norm"}
Renaming = Callable[[TowerSpec, Mapping[str, TensorSource]], dict[str, TensorSource]]


@frozen
class TowerFamily:
    """Towers of one kind."""

    projector: str  # `clip.projector_type` of their GGUF files
    model_types: tuple[str, ...]  # `model_type` of folders that have one
    read_gguf: Callable[[Fields, Mapping[str, TensorSource]], TowerSpec]  # from the keys of a file, and its tensors
    read_folder: Callable[[Fields, Fields, Fields], TowerSpec]  # `config.json`, its `vision_config`, the preprocessor's
    name_gguf: Renaming
    name_folder: Renaming


V = "clip.vision."  # keys of GGUF files


def read_gguf_sizes(fields: Fields) -> dict[str, Any]:
    """Return the sizes that all `mmproj` files state, by their names in `TowerSpec`."""
    patch = fields.integer(V + "patch_size", 1, MAX_PATCH)
    return {
        "hidden": fields.integer(V + "embedding_length", 4, MAX_WIDTH),
        "layers": fields.integer(V + "block_count", 1, MAX_LAYERS),
        "heads": fields.integer(V + "attention.head_count", 1, MAX_HEADS),
        "features": fields.integer(V + "feed_forward_length", 1, MAX_WIDTH),
        "patch": patch,
        "side": fields.integer(V + "image_size", patch, MAX_SIDE * MAX_PATCH) // patch,
        "columns": fields.integer(V + "projection_dim", 1, MAX_WIDTH),
    }


def read_colours(
    fields: Fields, name: str, low: float = 0.0, default: tuple[float, ...] = (0.5,) * CHANNELS
) -> tuple[float, ...]:
    """Return a number for each colour."""
    numbers = default if fields.get(name) is None else fields.numbers(name, low, 1.0, CHANNELS)
    return tuple(map(round_float, numbers))  # as GGUF has them


def join_slices(spec: TowerSpec, slices: Sequence[FloatArray]) -> dict[str, TensorSource]:
    """Return the matrix of patches from its slices in time: all of them see the same still picture."""
    shape = (spec.hidden, CHANNELS, spec.patch, spec.patch)
    if not slices or any(part.shape != shape for part in slices):
        found = [part.shape for part in slices] or "missing"
        raise ModelError(f"the tower's tensor of patches is {found}, expected slices {shape}")
    return {"patch_embd.weight": sum_slices("patch_embd.weight", slices)}


@frozen(eq=False)
class Layout:
    """The places of patches, which follow from the grids of pictures: the order of their windows, the batch in which
    layers see all of a picture and that in which they see windows, rotations, and the learned positions."""

    orders: Sequence[IntArray]
    whole: RaggedBatch
    windows: RaggedBatch
    table: RopeTable
    positions: FloatArray | None

    @property
    def pages(self) -> int:
        """The number of pages that keys and values take."""
        return 1 + max(int(one.page_table.max()) for one in (self.whole, self.windows))


class Tower:
    """A tower with the sizes of `spec` ready to run, from `tensors` by the names used here.

    Raises ModelError for tensors that do not fit the sizes, DeviceError for weights that a GPU has no kernels for.
    """

    def __init__(self, ctx: Context, spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> None:
        with ctx.compute_wide():
            self._load(ctx, spec, tensors)
        self._laid_out: tuple[Sequence[Grid], Layout] | None = None  # of the last pictures, as others are often alike

    def _load(self, ctx: Context, spec: TowerSpec, tensors: Mapping[str, TensorSource]) -> None:
        self.ctx, self.spec = ctx, spec
        named, layer = dict(tensors), spec.layer
        for index in range(spec.layers):
            _split(named, f"blk.{index}.", spec.hidden)
            _turn_around(named, f"blk.{index}.", (spec.features, spec.hidden))
        weights = Weights(ctx, named)
        weights.check("", spec.end_tensors())
        loaded = [layer.load(weights, index, spec.hidden) for index in range(spec.layers)]
        self._layers = [_prepare(ctx, weights, one, spec.slope) for one in loaded]
        ends = weights.of_model(layer.norms)
        self._patches = ends.exact_product("patch_embd", bias=spec.patch_bias)
        self._positions = None if spec.positions == "none" else ends.numbers("position_embd.weight")
        self._class = ends.vector("class.weight") if spec.has_class else None
        self._first, self._begin, self._end = (
            [step.load(ends) for step in steps] for steps in (spec.first, spec.begin, spec.end)
        )
        deep = [[step.load(ends) for step in steps] for steps in spec.tap_ends]
        self._deep = dict(zip(spec.taps, deep, strict=True))
        self._shades = make_shades(spec.mean, spec.deviation)

    def encode(self, *pictures: Pixels) -> Generator[None, None, FloatArray]:
        """Compute the rows (rows, `row_numbers`) of pictures, one after another; sides are multiples of the spec's
        factor.

        It yields, without a value, after each layer, so that it may be stopped there; on a CPU, with many patches,
        after each operator over PIECE_ROWS of them. There the bits are the same whatever is done meanwhile, whichever
        pictures are computed together, and on any number of threads. On a GPU the work begun is done before it yields.
        """
        running = self._run(pictures)
        while True:
            with self.ctx.compute_wide():
                try:
                    next(running)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]
            yield

    def _run(self, pictures: Sequence[Pixels]) -> Generator[None, None, FloatArray]:
        spec, ctx, squares = self.spec, self.ctx, self.spec.merge**2
        layout = self._lay_out([spec.find_grid(one) for one in pictures])
        parts = [cut_patches(ctx, one, self._shades, spec.patch, spec.merge) for one in pictures]
        if spec.window:
            parts = [move_squares(ctx, *one, spec.merge) for one in zip(parts, layout.orders, strict=True)]
        x = self._finish(linear(ctx, self._finish(join_rows(ctx, parts), self._first), self._patches), self._begin)
        x, deep = finish(ctx, x if layout.positions is None else add(ctx, x, layout.positions)), []
        ends = list(accumulate(len(order) * squares for order in layout.orders))
        spans = list(pairwise([0, *ends]))
        if self._class is not None:
            x = join_rows(ctx, [add_token(ctx, x[start:stop], self._class) for start, stop in spans])
        kind: KVType = "f32" if ctx.gpu is None else "f16"  # the type that matrix units read
        k, v = allocate_pools(ctx, layout.pages, spec.heads, _PAGE_SIZE, spec.hidden // spec.heads, kind)
        for index, layer in enumerate(self._layers):
            batch = layout.whole if index in spec.whole_layers else layout.windows
            x = yield from layer(x, StepInput(batch, [layout.table], [k], [v]))
            if index in self._deep:
                deep.append((yield from self._finish_pieces(x, self._deep[index])))
        if self._class is not None:
            x = join_rows(ctx, [x[start + at : stop + at] for at, (start, stop) in enumerate(spans)])
        made = yield from self._finish_pieces(x, self._end)
        for more in deep:
            made = join_columns(ctx, made, more)
        rows = fetch_rows(ctx, made)
        if not spec.window:
            return rows
        cuts = [rows[start // squares : stop // squares] for start, stop in spans]
        return join_arrays([restore_squares(*one) for one in zip(cuts, layout.orders, strict=True)])

    def _lay_out(self, grids: Sequence[Grid]) -> Layout:
        """Lay out pictures that become rows in these grids."""
        if self._laid_out is not None and self._laid_out[0] == grids:
            return self._laid_out[1]
        spec, ctx, squares = self.spec, self.ctx, self.spec.merge**2
        orders, sizes, axes, positions = list[IntArray](), list[int](), list[tuple[IntArray, IntArray]](), []
        for sides in grids:
            grid = sides[0] * spec.merge, sides[1] * spec.merge
            rows, columns = order_patches(grid, spec.merge)
            order, counts = order_windows(sides, spec.window or max(sides))
            if spec.window:
                rows, columns = (move_squares(ctx, axis, order, spec.merge) for axis in (rows, columns))
            if self._positions is not None:
                positions.append(self._place(self._positions, grid, rows, columns))
            if spec.has_class:  # it has no place of its own
                rows, columns = (join_arrays([axis, axis[:1]]) for axis in (rows, columns))
            axes.append((rows, columns))
            orders.append(order)
            sizes += [count * squares for count in counts]
        whole = batch_parts([len(rows) for rows, _ in axes], _PAGE_SIZE)
        windows = batch_parts(sizes, _PAGE_SIZE) if spec.window else whole
        dim, theta = (spec.hidden // spec.heads, spec.theta) if spec.theta else (0, 1.0)
        rows, columns = map(join_arrays, zip(*axes, strict=True))
        table = build_plane_table(rows, columns, dim, theta, lies_between=spec.lies_between)
        placed = place_rows(ctx, join_arrays(positions)) if positions else None
        layout = Layout(orders, whole, windows, table, placed)
        self._laid_out = grids, layout
        return layout

    def _place(self, table: FloatArray, grid: Grid, rows: IntArray, columns: IntArray) -> FloatArray:
        match self.spec.positions:
            case "own":
                return pick_positions(table, rows, columns)
            case "axes":
                return sum_axes(table, rows, columns)
            case "sampled":
                return sample_positions(table, grid, rows, columns)
            case "resized":
                return resize_positions(table, grid, rows, columns)
            case _:
                return blend_positions(table, grid, rows, columns)

    def _finish_pieces(self, x: FloatArray, steps: Sequence[Run]) -> Generator[None, None, FloatArray]:
        """Run steps that see no more than the neighbours that become one row, piece by piece; return their result."""
        squares, parts = self.spec.merge**2, list[FloatArray]()
        size = x.shape[0] if self.ctx.gpu is not None else max(1, PIECE_ROWS // squares) * squares
        for at in range(0, x.shape[0], size):
            parts.append(finish(self.ctx, self._finish(x[at : at + size], steps)))
            yield
        return join_rows(self.ctx, parts)

    def _finish(self, x: FloatArray, steps: Sequence[Run]) -> FloatArray:
        for step in steps:
            x = step(self.ctx, x)
        return x


RunLayer = Callable[[FloatArray, StepInput], Generator[None, None, FloatArray]]


def _prepare(ctx: Context, weights: Weights, layer: PreparedLayer, slope: float) -> RunLayer:
    """Return a function that runs a layer: in one call for few patches and on a GPU, else operator by operator over
    some of them at a time.

    Products with ranges or scales, which no operator knows, also run operator by operator, and so do activations whose
    input is multiplied by a `slope` and whose result is divided by it.
    """
    products = [one.weight for one in layer.program if isinstance(one, MatMul)]
    ranges = {one.names: _read_ranges(weights.tensors, one) for one in products if _has_ranges(weights.tensors, one)}
    prepared = None if ranges or slope != 1 else prepare_layers(ctx, [layer])
    first = next(at for at, one in enumerate(layer.program) if isinstance(one, Attend))  # needs the keys of all pieces

    def run(registers: Registers, one: Operator, step: StepInput) -> None:
        if isinstance(one, MatMul) and one.weight.names in ranges:
            registers[one.target] = ranges[one.weight.names].multiply(ctx, take(registers, one.source), one.weight)
        elif isinstance(one, Activate) and slope != 1:
            run_layer(ctx, registers, (Scale(slope, "x"), one, Scale(1 / slope, "x")), step, 0)
        else:
            run_layer(ctx, registers, (one,), step, 0)

    def run_pieces(x: FloatArray, step: StepInput) -> Generator[None, None, FloatArray]:
        size = PIECE_ROWS if ctx.gpu is None else x.shape[0]
        if prepared is not None and x.shape[0] <= size:
            x, delta = run_layers(ctx, x, prepared, step)
            x = finish(ctx, x if delta is None else add(ctx, x, delta))
            yield
            return x
        pieces: list[tuple[Registers, StepInput]] = []
        for at in range(0, x.shape[0], size):
            rows = x[at : at + size]
            batch = step.batch if rows.shape == x.shape else cut_batch(step.batch, at, at + rows.shape[0])
            pieces.append(({"stream": rows, "delta": None}, replace(step, batch=batch)))
        for operators in (layer.program[:first], layer.program[first:]):
            for registers, own in pieces:
                for one in operators:
                    run(registers, one, own)
                    if ctx.gpu is None:
                        yield
        deltas = [(take(registers, "stream"), registers["delta"]) for registers, _ in pieces]
        x = finish(ctx, join_rows(ctx, [one if delta is None else add(ctx, one, delta) for one, delta in deltas]))
        yield
        return x

    return run_pieces


def bound_product(w: LayerWeights, name: str) -> Run:
    """Return a product that clamps its input and result to the ranges that the file has beside its weight, if any."""
    weight, tensors = w.product(name), w.model.tensors
    if not _has_ranges(tensors, weight):
        return lambda ctx, x: linear(ctx, x, weight)
    ranges = _read_ranges(tensors, weight)
    return lambda ctx, x: ranges.multiply(ctx, x, weight)


def _has_ranges(tensors: Mapping[str, TensorSource], weight: LinearWeight) -> bool:
    return any(_name_beside(name, end) in tensors for name in weight.names for end in ("input_min", "scale"))


def _name_beside(weight: str, end: str) -> str:
    return f"{weight.removesuffix('weight')}{end}"


def _read_ranges(tensors: Mapping[str, TensorSource], weight: LinearWeight) -> Ranges:
    """Return the ranges of the parts of a product, or its scale. Raises ModelError for empty ranges and for NaN."""

    def read(name: str, end: str, default: float) -> float:
        tensor = tensors.get(_name_beside(name, end))
        numbers = [default] if tensor is None else read_numbers(tensor).reshape(-1).tolist()
        if len(numbers) != 1:
            raise ModelError(f"tensor {_name_beside(name, end)} has {len(numbers)} numbers, expected one")
        return float(numbers[0])

    pairs = [
        [(read(name, f"{end}_min", -math.inf), read(name, f"{end}_max", math.inf)) for name in weight.names]
        for end in ("input", "output")
    ]
    if any(not low <= high for low, high in (*pairs[0], *pairs[1])):  # also with NaN
        raise ModelError(f"tensor {weight.names[0]} has a range of {pairs}, expected one from low to high")
    scale = tensors.get(_name_beside(weight.names[0], "scale"))
    if scale is not None and scale.shape != (weight.out_features,):
        raise ModelError(f"tensor {scale.name} has shape {scale.shape}, expected ({weight.out_features},)")
    own = None if scale is None else read_numbers(scale)
    return Ranges.of(pairs[0], pairs[1], weight.splits, own)


def _split(tensors: dict[str, TensorSource], prefix: str, rows: int) -> None:
    """Cut queries, keys and values apart if a file has them as one. Raises ModelError for another shape."""
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


def _turn_around(tensors: dict[str, TensorSource], prefix: str, up_shape: tuple[int, int]) -> None:
    """Exchange up and down if a file has named each as the other one, as older converters did."""
    down = tensors.get(f"{prefix}ffn_down.weight")
    if down is not None and down.shape == up_shape and up_shape[0] != up_shape[1]:
        for end in ("weight", "bias"):
            names = f"{prefix}ffn_up.{end}", f"{prefix}ffn_down.{end}"
            if names[0] in tensors and names[1] in tensors:
                tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

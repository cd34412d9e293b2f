"""Estimated times on Apple GPUs, where nothing here has ever run: counts operations and bytes of a step of Llama 3.1
8B in Q4_K_M, launch by launch as the kernels plan it, and divides them by rates that others measured on the chips.

    python tools/apple_times.py          # writes the tables of lab/gpu-figures.md

A launch takes as long as its bytes or its arithmetic, whichever is longer, and a gap. Arithmetic is that of the matrix
units plus that of everything else, as if these never overlapped. The share of a core's multiply-adds that its matrix
units reach is not published: it is solved from speeds that llama.cpp published, counted in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxr.kernels.attend.pages import SQUARE_ROWS
from mlxr.kernels.linear.gpu import MIN_SQUARED
from mlxr.kernels.linear.parts import LAYOUTS
from mlxr.kernels.linear.squares import choose_squares

DOCS = Path(__file__).resolve().parents[1] / "lab" / "gpu-figures.md"
MARKS = ("<!-- apple times: tools/apple_times.py -->", "<!-- end of apple times -->")
LANES, SLOW = 128, 4  # of a core; cycles of a shift, a conversion or a product of integers (metal-benchmarks)
GAP_S = 2e-6  # between launches of which one waits for the other: a guess
RUN = 32


@dataclass(frozen=True, slots=True)
class Chip:
    """The known figures of a GPU; `teraflops` of f32, which give its clock, and `neural` times as many for matrices."""

    name: str
    cores: int
    teraflops: float
    gigabytes_s: float
    anchor: str  # the published speed from which the share of its matrix units is solved
    neural: float = 1.0

    @property
    def lane_cycles_s(self) -> float:
        """The cycles of all lanes together in a second."""
        return self.teraflops * 1e12 / 2


CHIPS = (
    Chip("M1", 8, 2.6, 68, "M1 Max"),
    Chip("M4", 10, 4.3, 120, "M4"),
    Chip("M4 Max", 40, 17.0, 546, "M4"),
    Chip("M5", 10, 4.3, 153, "M4", neural=4.0),
)
# Prompts of 512 tokens of this very model by llama.cpp: normiebench, issues 3 and 40.
ANCHORS = {"M4": (CHIPS[1], 224.8), "M1 Max": (Chip("M1 Max", 32, 10.4, 400, "M1 Max"), 500.0)}
PEER_TOKENS, PEER_CYCLES = 32, 7.9  # of a tile of its kernel_mul_mm, and of its dequantize_q4_K for a weight


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one launch or several: bytes of memory, multiply-adds of matrix units, cycles of a lane."""

    nbytes: float = 0.0
    squared: float = 0.0
    cycles: float = 0.0

    def time_s(self, chip: Chip, share: float) -> float:
        """The longer of memory and arithmetic; matrix units reach `share` of a core's multiply-adds."""
        matrix_s = self.squared / (chip.lane_cycles_s * share)
        return max(self.nbytes / (chip.gigabytes_s * 1e9), matrix_s + self.cycles / chip.lane_cycles_s)


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Operations for a run of 32 weights, counted in k_blocks.h and metal.h: slow and other ones for the words, of
    which every thread has its own part, and for scales and offsets."""

    words: tuple[int, int]
    terms: tuple[int, int]

    @property
    def cycles(self) -> float:
        """Cycles of a lane for one weight."""
        return sum(SLOW * slow + other for slow, other in (self.words, self.terms, PLACING)) / RUN


PLACING = (8, 64)  # eight words by place_halves
UNPACKING = {"q4_k": Unpacking((4, 8), (19, 33)), "q6_k": Unpacking((12, 24), (6, 12))}
ADDRESSES = 16 / RUN


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of a model: its rows, columns and type."""

    type_name: str
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """The number of values."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> float:
        """Bytes in a file, and on the device."""
        layout = LAYOUTS[self.type_name]
        return self.count / layout.block_size * layout.block_bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel by its name, and its work."""

    kernel: str
    work: Work = field(default_factory=Work)


HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 4096, 14336, 32, 8, 128, 32, 128256


def list_weights(layer: int) -> tuple[list[Weight], ...]:
    """The weights of a layer by launches: queries, keys and values; output; gate and up; down. Values and down have
    more bits if llama.cpp's use_more_bits returns true."""
    eighth = LAYERS // 8
    more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    high, keys = "q6_k" if more else "q4_k", KEY_HEADS * HEAD_DIM
    return (
        [Weight("q4_k", HIDDEN + keys, HIDDEN), Weight(high, keys, HIDDEN)],
        [Weight("q4_k", HIDDEN, HIDDEN)],
        [Weight("q4_k", 2 * INNER, HIDDEN)],
        [Weight(high, HIDDEN, INNER)],
    )


OUTPUT = Weight("q6_k", VOCABULARY, HIDDEN)


def multiply(weights: list[Weight], tokens: int) -> Launch:
    """A product with the kernel that `linear` chooses."""
    nbytes, x_bytes = sum(weight.nbytes for weight in weights), 4.0 * tokens * weights[0].columns
    made_bytes = 4.0 * tokens * sum(weight.rows for weight in weights)
    if tokens < MIN_SQUARED:
        # one row at a time also needs the sums of x, for four rows of the weight together
        each = sum(weight.count * (UNPACKING[weight.type_name].cycles + ADDRESSES + 0.4 + tokens) for weight in weights)
        return Launch("linear_rows", Work(nbytes + x_bytes + made_bytes, 0.0, each))
    plan = choose_squares(tokens)
    tiles = -(-tokens // plan.tokens)
    # a multiply-add to scale each weight and half an operation to pack it; x comes in quads, a load and a store each
    each = sum(weight.count * (UNPACKING[weight.type_name].cycles + ADDRESSES + 1.5) for weight in weights)
    brought = sum(tiles * plan.tokens * weight.columns / 4 * 4 * -(-weight.rows // plan.rows) for weight in weights)
    squared = sum(float(weight.count) * tiles * plan.tokens for weight in weights)
    return Launch("linear_squares", Work(nbytes + x_bytes + made_bytes, squared, each * tiles + brought))


def attend(tokens: int, positions: int, is_prompt: bool) -> Launch:
    """Attention of one layer: of a prompt, or of `tokens` answers with `positions` positions each."""
    page_bytes = 2 * 2.0 * KEY_HEADS * HEAD_DIM * positions
    if not is_prompt:
        pairs = float(tokens) * positions * HEADS
        return Launch("attend_decode", Work(tokens * page_bytes, 0.0, pairs * (3 * HEAD_DIM + 40)))
    group = HEADS // KEY_HEADS
    pairs = float(tokens) * (positions / 2 + SQUARE_ROWS // group) * HEADS
    return Launch("attend_squares", Work(page_bytes, pairs * 2 * HEAD_DIM, pairs * 20))


def list_launches(tokens: int, positions: int = 0) -> list[Launch]:
    """A step of `tokens` answers with `positions` each, or, without positions, of a prompt and its last token."""
    launches = [Launch("linear_expand")]
    is_prompt, norm = not positions, [Launch("rms_norm", Work(12.0 * tokens * HIDDEN))]
    norms = norm if tokens >= MIN_SQUARED else []
    for layer in range(LAYERS):
        queries, output, up, down = (multiply(weights, tokens) for weights in list_weights(layer))
        written = Launch("rope_and_write_kv", Work(8.0 * tokens * (HIDDEN + 2 * KEY_HEADS * HEAD_DIM)))
        launches += [*norms, queries, written, attend(tokens, positions or tokens, is_prompt), output]
        launches += [*norms, up, down]
    rows = 1 if is_prompt else tokens
    return [*launches, *(norm if rows >= MIN_SQUARED or is_prompt else []), multiply([OUTPUT], rows), Launch("draw")]


def list_expanded(tokens: int) -> list[Launch]:
    """The products of a step in an older way: each weight expanded to bf16, then MLX's product."""
    launches = []
    for weights in [*(group for layer in range(LAYERS) for group in list_weights(layer)), [OUTPUT]]:
        count, nbytes = sum(weight.count for weight in weights), sum(weight.nbytes for weight in weights)
        cycles = sum(weight.count * (UNPACKING[weight.type_name].cycles + ADDRESSES + 1.5) for weight in weights)
        padded = -(-tokens // 32) * 32
        launches += [Launch("linear_fill", Work(nbytes + 2.0 * count, 0.0, cycles))]
        launches += [Launch("matmul bf16", Work(2.0 * count, float(count) * padded))]
    return launches


def add_up(launches: Iterable[Launch]) -> Work:
    """The work of all launches together."""
    works = [launch.work for launch in launches]
    return Work(*(sum(getattr(work, name) for work in works) for name in ("nbytes", "squared", "cycles")))


def solve_share(anchor: str) -> float:
    """The share of a core's multiply-adds that matrix units reach: from llama.cpp's time, less that for unpacking
    weights for each tile."""
    chip, tokens_s = ANCHORS[anchor]
    tokens, count = 512, sum(weight.count for layer in range(LAYERS) for each in list_weights(layer) for weight in each)
    attention = add_up(attend(tokens, tokens, is_prompt=True) for _ in range(LAYERS))
    left_s = tokens / tokens_s - (count * tokens / PEER_TOKENS * PEER_CYCLES + attention.cycles) / chip.lane_cycles_s
    return (float(count) * tokens + attention.squared) / left_s / chip.lane_cycles_s


def time_s(launches: list[Launch], chip: Chip) -> float:
    """Seconds of a step."""
    share = solve_share(chip.anchor)
    return sum(launch.work.time_s(chip, share) + GAP_S for launch in launches)


def time_prompt_s(chip: Chip, tokens: int) -> float:
    """Seconds of a prompt; with neural accelerators by MLX's product, which has them."""
    if chip.neural == 1.0:
        return time_s(list_launches(tokens), chip)
    share = solve_share(chip.anchor)
    products = [
        launch.work if launch.kernel == "linear_fill" else Work(launch.work.nbytes, launch.work.squared / chip.neural)
        for launch in list_expanded(tokens)[:-2]
    ]
    others = [launch.work for launch in list_launches(tokens) if launch.kernel != "linear_squares"]
    return sum(work.time_s(chip, share) + GAP_S for work in [*products, *others])


COUNTED = ("step", "launches", "GB of memory", "G multiply-adds of matrices", "G cycles of lanes")
TIMED = ("chip", "cores, TFLOP/s, GB/s", "share of matrix units", "one answer", "of the memory's floor", "8 answers")
TIMED += ("16 answers", "against expanding", "prompt of 512", "against llama.cpp")


def render() -> str:
    """The tables."""
    steps = {"one answer": (1, 100), "8 answers": (8, 100), "16 answers": (16, 100), "prompt of 512": (512, 0)}
    counted = [_count(name, list_launches(*shape)) for name, shape in steps.items()]
    counted.append(_count("16 answers, expanded as before", list_expanded(16)))
    timed = [_tabulate(chip) for chip in CHIPS]
    return f"{_draw(COUNTED, counted)}\n\n{_draw(TIMED, timed)}"


def _count(name: str, launches: list[Launch]) -> list[str]:
    work = add_up(launches)
    counts = f"{work.nbytes / 1e9:.2f}", f"{work.squared / 1e9:,.0f}", f"{work.cycles / 1e9:,.0f}"
    return [name, str(len(launches)), *counts]


def _tabulate(chip: Chip) -> list[str]:
    one, eight, many = (time_s(list_launches(tokens, 100), chip) for tokens in (1, 8, 16))
    floor_s = add_up(list_launches(1, 100)).nbytes / (chip.gigabytes_s * 1e9)
    prompt_s, (anchor, speed) = time_prompt_s(chip, 512), ANCHORS[chip.anchor]
    return [
        chip.name,
        f"{chip.cores}, {chip.teraflops:g}, {chip.gigabytes_s:g}",
        f"{solve_share(chip.anchor):.2f}",
        f"{1 / one:.1f} tokens/s",
        f"{floor_s / one:.2f}",
        f"{8 / eight:.0f}",
        f"{16 / many:.0f}",
        f"{time_s(list_expanded(16), chip) / many:.1f} x",
        f"{512 / prompt_s:.0f} tokens/s",
        f"{512 / prompt_s / speed:.2f} x" if anchor is chip else "",
    ]


def _draw(heads: Sequence[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def write_docs(text: str) -> str:
    """`text` with the tables between its marks."""
    pattern = re.compile(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", re.DOTALL)
    return pattern.sub(lambda _: f"{MARKS[0]}\n{render()}\n{MARKS[1]}", text)


if __name__ == "__main__":
    DOCS.write_text(write_docs(DOCS.read_text(encoding="utf-8")), encoding="utf-8")

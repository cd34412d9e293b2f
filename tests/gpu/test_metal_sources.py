"""Every kernel that a Mac would launch, checked as Metal's compiler would: over families, types of weights, and the
engine's own path. `msl` says how; nothing here needs a Mac, and nothing here checks a result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import amounts
import numpy as np
import pytest
from gpu_cases import QUANTISED, Scene, make_tensor, play
from mixer_cases import make_batch, make_delta, make_space
from moe_cases import make as make_experts_of

pytest.importorskip("clang.cindex", reason="libclang is not installed (pip install libclang)")
pytest.importorskip("mlx.core", reason="mlx is not installed")

from msl.checker import MOST_SHARED_BYTES, Checker, compile_by_apple
from msl.stand_in import Source, StandIn, stand_in

from mlxr import LLM, SamplingParams
from mlxr.core.errors import DeviceError
from mlxr.core.model_settings import ModelSettings
from mlxr.core.types import DraftOptions, Grammar
from mlxr.engine.engine import Engine
from mlxr.engine.request import EngineRequest
from mlxr.kernels.context import Context, _explain_cpu, choose_device
from mlxr.kernels.elementwise import hadamard, make_hadamard
from mlxr.kernels.gpu.deferred import settle
from mlxr.kernels.gpu.device import Gpu
from mlxr.kernels.gpu.graph import CompiledStep
from mlxr.kernels.gpu.mlx import load_mlx
from mlxr.kernels.linear import linear, prepare
from mlxr.kernels.linear.blocks import TILES, multiply_rows
from mlxr.kernels.linear.gpu import _list_weights
from mlxr.kernels.linear.parts import GATES, Extras
from mlxr.kernels.lora import AdapterRows, LoraPart, add_lora
from mlxr.kernels.lora import prepare as prepare_adapter
from mlxr.kernels.moe import mix
from mlxr.loading import list_kernel_sources

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from tiny_models import CASES, TinyRun, build_hf, read_golden

import apple_times

# Together these have all operators that a GPU has, and experts of which one token takes fewer than eight.
SAMPLE = ("gpt-oss", "granite4h-moe", "lfm2", "mixtral", "olmo2", "qwen35moe")
# The others have residual streams, chunks of attention or gates that no GPU supports.
CPU_ALONE = ("falcon-mamba", "gemma3n", "glm5-next", "jamba", "laguna", "llama4", "mamba", "qwen4exp")
FAMILIES = [case for case in CASES if case not in CPU_ALONE] if amounts.is_thorough else SAMPLE
WEIGHTS = (("q8_0", "bf16"), ("bf16", "f16"), ("f16", "f32"))
TYPES = (*QUANTISED, "f16", "bf16", "f32")
PARAMS = SamplingParams(max_tokens=30, temperature=0.0)
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n#define SHARED threadgroup\n"
SIGNATURE = (
    "[[kernel]] void kernel_of_test(const device float *x [[buffer(0)]], device float *out [[buffer(1)]],\n"
    "  uint3 thread_position_in_grid [[thread_position_in_grid]]) {\n"
)
GOOD = (
    "inline float f(const device float *p, thread float *q, threadgroup float *s) {\n"
    "  q[0] = p[0]; s[0] = q[0];\n  return simd_sum(q[0]) + precise::exp(p[1]);\n}\n",
    "SHARED float s[32]; float a[2]; bfloat b = bfloat(f(x, a, s)); threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "out[thread_position_in_grid.x] = float(b) + float(as_type<half>(ushort(3)));",
)
BAD = {
    "a variable named half": ("", "int half = 2; out[0] = float(half);"),
    "a parameter named half": ("inline int f(int half) { return half; }\n", "out[0] = float(f(2));"),
    "a variable named thread": ("", "int thread = 2; out[0] = float(thread);"),
    "a function that metal has": (
        "inline float divide(float a, float b) { return a / b; }\n", "out[0] = divide(x[0], 2.0f);",
    ),
    "another such function": ("inline float fmax(float a, float b) { return a; }\n", "out[0] = fmax(x[0], 1.0f);"),
    "threadgroup memory for a device pointer": (
        "inline float f(const device float *p) { return p[0]; }\n", "SHARED float s[32]; out[0] = f(s);",
    ),
    "a cast into another address space": (
        "", "SHARED float s[32]; out[0] = reinterpret_cast<device float *>(s)[0];",
    ),
    "a pointer without an address space": (
        "inline float f(float *p) { return p[0]; }\n", "float a[2] = {1.0f, 2.0f}; out[0] = f(a);",
    ),
    "a double": ("", "double d = 1; out[0] = float(d);"),
    "a literal that is double": ("", "out[0] = x[0] * 1.5;"),
    "a float for a bfloat": ("", "bfloat b = x[0]; out[0] = float(b);"),
    "a variable of the file": ("float table[2] = {1.0f, 2.0f};\n", "out[0] = table[0];"),
    "a constant of a class": ("struct A { static constexpr int V = 3; };\n", "out[0] = float(A::V);"),
    "new": ("", "thread float *p = new float[2]; out[0] = p[0];"),
    "goto": ("", "goto end; end: out[0] = x[0];"),
    "a lambda": ("", "auto f = [](float v) { return v; }; out[0] = f(x[0]);"),
    "a virtual function": ("struct A { virtual float f() { return 1.0f; } };\n", "A a; out[0] = a.f();"),
    "an array of any length": ("", "int n = int(x[0]); float a[n]; out[0] = a[0];"),
    "threadgroup memory of a helper": ("inline float f() { SHARED float s[32]; return s[0]; }\n", "out[0] = f();"),
    "40 KiB of threadgroup memory": ("", "SHARED float s[10240]; s[0] = 1.0f; out[0] = s[0];"),
    "a function of C": ("", "out[0] = expf(x[0]);"),
    "max of int and uint": ("", "uint a = 1; int b = 2; out[0] = float(max(a, b));"),
    "a method of a device object": (
        "struct A { float v; float f() const { return v; } };\n",
        "const device A *a = reinterpret_cast<const device A *>(x); out[0] = a->f();",
    ),
    "a long long": ("", "long long a = 1; out[0] = float(a);"),
    "a letter beyond ASCII": ("// ½\n", "out[0] = x[0];"),
}  # fmt: skip


@pytest.fixture(scope="module")
def mx() -> Iterator[StandIn]:
    with stand_in() as made:
        yield made


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Checker:
    return Checker(tmp_path_factory.mktemp("msl"))


def make_source(header: str, body: str) -> Source:
    constants = (("int", "N", "1"), ("typename", "T", "float"))
    return Source("test", "kernel_of_test", PRELUDE + header, constants, SIGNATURE, body, 2, 256)


def test_a_sound_kernel_passes(checker: Checker) -> None:
    assert checker.check(make_source(*GOOD)) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_kernels_are_refused(checker: Checker, name: str) -> None:
    assert checker.check(make_source(*BAD[name]))


def test_launches_have_bounds(checker: Checker) -> None:
    sound = make_source(*GOOD)
    assert checker.check(replace(sound, threads=2048)) == ["2048 threads, of which there are 1024"]
    assert checker.check(replace(sound, buffers=32)) == ["32 buffers, of which there are 31"]


def launch_family(case: str, weights: str, pages: str) -> None:
    """A prompt, single tokens, two prompts at once, and a token of each of three, which are more than one tile has."""
    config, seed, tokens, _ = read_golden(case)
    run = TinyRun(build_hf(Context("metal"), config, seed, weights), kv_type=pages, sequences=3)  # type: ignore[arg-type]
    for chunks in ({0: tokens[:5]}, {0: tokens[5:6]}, {1: tokens[:3], 2: tokens[:4]}):
        run.step(chunks)
    run.step({0: tokens[6:7], 1: tokens[3:4], 2: tokens[4:5]})


def launch_types() -> None:
    """Products of every type of weight with one row and with 32; in a thorough run with more in between, and
    with all that a product may end in for one of these numbers of rows, another for each type."""
    gpu = (ctx := Context("metal")).gpu
    mx, columns = gpu.mx, 512
    for index, name in enumerate(TYPES):
        weight = prepare(ctx, [make_tensor(name, columns, columns)])
        kind = {"f16": mx.float16, "bf16": mx.bfloat16}.get(name, mx.float32)
        parts = weight.payload[0]
        numbers = (1, 2, 4, 5, 8) if amounts.is_exhaustive else (1, 4, 8) if amounts.is_thorough else (1,)
        for tokens in numbers:
            x, norm, bias = mx.zeros((tokens, columns), kind), (mx.zeros((columns,)), 1e-5), mx.zeros((columns,))
            every = [Extras(1, None, norm, None)]
            if amounts.is_exhaustive or (amounts.is_thorough and tokens == numbers[index % len(numbers)]):
                gates = [Extras(gate, bias, None, None) for gate in GATES.values()]
                every += [*gates, Extras(0, bias, norm, None), Extras(0, None, None, mx.zeros((tokens, columns)))]
            for extras in every if parts[0].raw is not None else ():
                multiply_rows(gpu, x, _list_weights(parts), extras, kind)
        for tokens in (8, 16, 32, 64, 65) if amounts.is_thorough else (32,):
            settle(linear(ctx, mx.zeros((tokens, columns), kind), weight))


def launch_others() -> None:
    """Launch what models of few tokens do not: adapters, rotated weights, contexts in shares, many outputs, copies."""
    ctx = Context("metal")
    mx = ctx.gpu.mx
    play(ctx, Scene(4, 2, 64, 8, (600,), (1,), softcap=0.7, sunk=True))
    for head_dim in (80, 96, 128, 256, 512):
        play(ctx, Scene(8, 2, head_dim, 16, (40,), (1,)))
    tensors = [make_tensor("q4_k", 4096, 256), make_tensor("q6_k", 4096, 256)]
    weight = prepare(ctx, tensors)
    for tokens in (1, 3, 8):
        settle(linear(ctx, mx.zeros((tokens, 256)), weight))
    part = LoraPart(0, np.zeros((3, 256), np.float32), np.zeros((4096, 3), np.float32), 0.5)
    rows = AdapterRows(np.zeros(1, np.int32), prepare_adapter(ctx, {weight: [part]}))
    settle(hadamard(ctx, mx.zeros((3, 256)), make_hadamard(256, 128)))
    settle(add_lora(ctx, mx.zeros((1, 256)), mx.zeros((1, 8192)), weight, [rows]))
    for mixer in (make_delta(1, 2, 128, 64), make_delta(1, 2, 64, 64, channels=True), make_space(2, 64, 1, 128)):
        states, batch = (
            ctx.gpu.allocate_pool((8, 4 + -(-mixer.floats // 4) * 4), "f32"),
            make_batch([1, 1], [4, -1], [1, 0]),
        )
        settle(mixer.run(ctx, [mx.array(array) for array in mixer.inputs(2)], batch, states, 4))
        states.copy_page(0, 1)


def launch_many() -> None:
    """Launch what only many rows need: experts with enough pairs, and expanded weights if MLX has better products."""
    ctx = Context("metal")
    mx = ctx.gpu.mx
    for tokens in (16, 60, 120):
        experts = make_experts_of(ctx, "q4_k", 4, (256, 256))
        chosen, shares = mx.zeros((tokens, 2), mx.int32), mx.zeros((tokens, 2))
        settle(mix(ctx, mx.zeros((tokens, 256)), chosen, shares, experts))
    mx.architecture = "applegpu_g17g"
    weight = prepare(ctx := Context("metal"), [make_tensor("q4_k", 256, 256)])
    settle(linear(ctx, mx.zeros((65, 256)), weight))
    mx.architecture = "applegpu_g16g"


def find_problems(checker: Checker, mx: StandIn) -> dict[str, list[str]]:
    """Return the problems of the launched sources by name: of all, or in everyday runs of one of each sort."""
    first: dict[object, Source] = {}
    for source in mx.sources.values():
        first.setdefault(source.name if amounts.is_thorough else describe(source), source)
    found = {source.name: checker.check(source) for source in first.values()}
    return {name: problems for name, problems in found.items() if problems}


def describe(source: Source) -> tuple[object, ...]:
    """Return a kernel's sort: its arrays and their address spaces, the type of weights, and the kinds of its memory."""
    chosen = [constant for constant in source.constants if constant[1] in ("TYPE_A", "T", "D")]
    return source.kernel, source.signature.replace(source.name, ""), *chosen


def name_launch(mx: StandIn, name: str) -> str:
    """Return our name of a launched kernel."""
    kernel, known = mx.sources[name].kernel, sorted(list_kernel_sources("metal"), key=len)
    return next(one for one in reversed(known) if kernel.startswith(f"{one}_"))


@pytest.mark.smoke
@pytest.mark.slow
def test_the_engine_of_a_mac_runs(mx: StandIn, checker: Checker) -> None:
    """Prompts, compiled steps of one answer and of several, drawn and largest tokens, guesses, a schema, embeddings;
    and that the guide to GPUs has how many launches and bytes a step takes."""
    asked = [{"role": "user", "content": "True or not?"}]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar, same = Grammar("json_schema", json.dumps(schema)), [0] * 40  # which stand-ins for logits go on with
    with LLM("demo", device="metal", draft="ngram", warm_up="off", arena_bytes=2**26) as llm:

        def answer(prompts: list[list[int]], tokens: int, temperature: float = 0.0, guesses: int = 0) -> None:
            params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
            made = llm.generate(prompts, params, drafts=DraftOptions(tokens=guesses))
            assert [one.usage.completion_tokens for one in made] == [tokens] * len(prompts)

        works: dict[str, Callable[[], object]] = {
            "a prompt of 40 tokens, and the first token": lambda: answer([same], 1),
            "one answer": lambda: answer([same], 3),
            "5 answers": lambda: answer([[number] * 40 for number in range(5)], 3),
            "2 answers, drawn": lambda: answer([same] * 2, 3, 0.7),
            "one answer under a JSON schema": lambda: json.loads(llm.chat(asked, PARAMS, grammar=grammar).text)["a"],
            "one answer with 4 guesses": lambda: answer([same], 12, 0.0, 4),
            "an embedding of 41 tokens": lambda: llm.embed("import os\n" * 8),
        }
        rows = []
        for name, work in works.items():
            first = len(mx.launches)
            work()
            names = [name_launch(mx, launched) for launched in mx.launches[first:]]
            last = len(names) - names[::-1].index("linear_expand") - 1  # the table's rows begin a step
            draws = names[last:].count("draw")  # MLX traces a step with the first token drawn from it
            kept = [at for at, kind in enumerate(names) if at >= last and kind != "draw"]
            moved = [(0 if at == last else mx.moved[first + at][0]) + mx.moved[first + at][1] for at in kept]
            rows.append(f"| {name} | {len(kept) + (draws > 0)} | {sum(moved) / 1e6:.1f} |")
    text = apple_times.DOCS.read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == []
    assert find_problems(checker, mx) == {}


@pytest.mark.parametrize("case", FAMILIES)
def test_families_have_sound_kernels(mx: StandIn, checker: Checker, case: str) -> None:
    first = FAMILIES.index(case) % len(WEIGHTS) if amounts.is_thorough else 0
    for weights, pages in WEIGHTS if amounts.is_exhaustive else WEIGHTS[first : first + 1]:
        launch_family(case, weights, pages)
    assert find_problems(checker, mx) == {}


def test_all_types_of_weights_have_sound_kernels(mx: StandIn, checker: Checker) -> None:
    launch_types()
    assert find_problems(checker, mx) == {}


def test_what_is_printed_for_metal_is_what_it_launches(mx: StandIn, checker: Checker) -> None:
    launch_others()
    launch_many()
    for case in SAMPLE:
        launch_family(case, "q8_0", "bf16")
    launch_family("lfm2", "bf16", "bf16")
    launch_family("deepseek3", "q8_0", "bf16")
    with LLM("demo", device="metal", draft="off", arena_bytes=2**26) as llm:
        llm.generate(["import os\n"], SamplingParams(max_tokens=1, temperature=0.7))
    assert find_problems(checker, mx) == {}
    printed = sorted(list_kernel_sources("metal"))
    launched = [source.kernel for source in mx.sources.values()]
    assert {next(one for one in reversed(printed) if name.startswith(f"{one}_")) for name in launched} == {*printed}


def test_a_kernel_for_cuda_alone_is_not_launched() -> None:
    with stand_in():
        launcher = Context("metal").gpu.launcher
        with pytest.raises(TypeError, match="linear_tiles is only launched on CUDA"):
            launcher.launch(TILES, [], groups=(1, 1, 1), threads=32, outputs=[])


@pytest.fixture(scope="module")
def rows(mx: StandIn) -> Source:
    """A product with Q6_K that is gated, of four rows."""
    ctx = Context("metal")
    parts = prepare(ctx, [make_tensor("q6_k", 512, 512)]).payload[0]
    multiply_rows(ctx.gpu, mx.zeros((5, 512)), _list_weights(parts), Extras(1, None, None, None), mx.float32)
    return mx.sources[mx.launches[-1]]


@pytest.mark.smoke
@pytest.mark.parametrize(("own", "word"), [("which_half", "half"), ("quotient_of", "divide"), ("quarter", "thread")])
def test_words_of_metal_bring_the_error_back(rows: Source, checker: Checker, own: str, word: str) -> None:
    assert checker.check(rows) == []
    renamed = re.sub(rf"\b{own}\b", word, rows.header)
    assert renamed != rows.header
    assert checker.check(replace(rows, header=renamed))


def test_a_threadgroup_has_no_room_for_eight_rows(rows: Source, checker: Checker) -> None:
    assert ("int", "T", "4") in rows.constants
    constants = tuple(("int", "T", "8") if name == "T" else (kind, name, value) for kind, name, value in rows.constants)
    assert checker.check(replace(rows, constants=constants)) == [
        f"33024 bytes of threadgroup memory, of which there are {MOST_SHARED_BYTES}"
    ]


def test_pages_are_written_after_all_that_was_started(mx: StandIn) -> None:
    pool = Context("metal").gpu.allocate_pool((4, 2, 32, 64), "bf16")
    for number, touch in enumerate((lambda: pool.copy_page(0, 1), lambda: pool.write_page(1, pool.read_page(0))), 1):
        before = mx.waits
        touch()
        assert mx.waits == before + number


def test_what_follows_a_step_that_ran_ahead_waits_for_its_writes(mx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX does not know of writes into a pool, so later launches, of a prompt or another step, could overtake one."""
    events: list[str] = []

    def note(name: str, owner: type) -> None:
        known = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *own, **named: (events.append(name), known(*own, **named))[1])

    config, seed, tokens, _ = read_golden("llama-gqa-64")
    ctx = Context("metal")
    settings = ModelSettings(page_size=16, kv_type="f32", draft="off", max_sequences=2)
    engine = Engine(build_hf(ctx, config, seed), ctx, settings, eos_ids=(), pages=12)
    first, _ = (
        engine.submit(EngineRequest(tokens[start : start + 4].tolist(), SamplingParams(max_tokens=19, ignore_eos=True)))
        for start in (0, 4)
    )
    for _ in range(4):
        engine.step()
    for name, owner in (("finish", CompiledStep), ("start", CompiledStep), ("submit", Gpu)):
        note(name, owner)
    engine.step()
    assert events == ["start", "submit"]  # ahead, on what was drawn
    engine.cancel(first)  # so it computes unwanted tokens
    engine.submit(EngineRequest(tokens[8:12].tolist(), SamplingParams(max_tokens=3, ignore_eos=True)))
    engine.step()
    assert events[2:4] == ["finish", "submit"]
    del events[:]
    engine.step()
    assert events[:2] == ["finish", "start"]


@pytest.mark.smoke
def test_auto_takes_the_processor_and_says_why(mx: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    _explain_cpu.cache_clear()
    assert [choose_device(word) for word in ("auto", "auto", "metal")] == ["cpu", "cpu", "metal"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not been run on Apple hardware yet" in line
    assert "--device metal" in line
    assert "mlxr check-gpu" in line


def test_an_mlx_that_is_too_old_is_refused(mx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, is_old in (("0.32.0", True), ("0.31.9", True), ("0.32.1", False), ("0.40.0.dev20261101", False)):
        monkeypatch.setattr("mlxr.kernels.gpu.mlx.version", lambda _, found=found: found)
        if is_old:
            with pytest.raises(DeviceError, match=rf"mlx {found} is too old; pip install 'mlx>=0\.32\.1'"):
                load_mlx("metal")
        else:
            assert load_mlx("metal") is mx


def test_mlx_is_told_what_suits_a_mac(mx: StandIn, rows: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of commands hold more than two products, weights stay in memory, and sources are short."""
    own = {"MLX_MAX_OPS_PER_BUFFER": "7"}
    monkeypatch.setattr("os.environ", own)
    load_mlx("metal")
    assert own == {"MLX_MAX_OPS_PER_BUFFER": "7", "MLX_MAX_MB_PER_BUFFER": "400"}
    mx.wired = 0
    Context("metal")
    assert mx.wired == mx.device_info()["max_recommended_working_set_size"] > 0
    assert "//" not in rows.header + rows.body
    assert max(len(source.header + source.body) for source in mx.sources.values()) < 64_000
    assert len(rows.header + rows.body) < 18_000


def test_metal_moves_four_numbers_at_once_and_counts_in_32_bits(rows: Source) -> None:
    """Shared memory is aligned for that, and no address within a weight is a product of 64 bits."""
    assert "#define SHARED alignas(16) threadgroup" in rows.header
    assert "*reinterpret_cast<GROUP float4 *>(p) =" in rows.header
    assert "uint64_t" not in rows.header
    assert "fast::divide(a, b)" in rows.header


def test_one_thread_launches_whoever_asks(mx: StandIn) -> None:
    """MLX's compiled steps belong to a thread, and every other thread that launches would compile them again."""
    with LLM("demo", device="metal", draft="off", arena_bytes=2**26) as llm:
        mx.threads.clear()
        asking = [threading.Thread(target=llm.generate, args=(["import os\n"], PARAMS)) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    assert mx.threads == {"mlxr-engine"}


def test_a_mac_rehearses_one_answer(mx: StandIn) -> None:
    config, seed, _, _ = read_golden("llama-gqa-64")
    ctx = Context("metal")
    settings = ModelSettings(page_size=16, kv_type="f32", draft="off", prefill_chunk_tokens=4, max_sequences=2)
    warm_up = Engine(build_hf(ctx, config, seed), ctx, settings, eos_ids=(), pages=12).warm_up
    assert warm_up.run(is_brief=True) == 2
    assert warm_up.run() == 2 + 2 + 3 + 1


def test_the_times_on_paper_are_those_of_the_docs() -> None:
    text = apple_times.DOCS.read_text(encoding="utf-8")
    assert apple_times.write_docs(text) == text
    assert "never run on a Mac" in text


def test_on_paper_an_m4_is_as_fast_as_it_has_to_be() -> None:
    """8B in Q4_K_M: one answer by the memory, 16 against expanding weights, and a prompt against llama.cpp's speed."""
    chip = apple_times.CHIPS[1]
    one, many, prompt = (apple_times.list_launches(*shape) for shape in ((1, 100), (16, 100), (512, 0)))
    floor_s = apple_times.add_up(one).nbytes / (chip.gigabytes_s * 1e9)
    assert floor_s / apple_times.time_s(one, chip) >= 0.95
    assert apple_times.time_s(apple_times.list_expanded(16), chip) / apple_times.time_s(many, chip) >= 2.5
    assert 512 / apple_times.time_s(prompt, chip) >= 1.1 * 224.8


def test_what_is_counted_on_paper_is_what_is_launched(mx: StandIn) -> None:
    """The kernels of a layer without biases, for one row, 16 rows and a prompt."""
    config, seed, tokens, _ = read_golden("llama-gqa-64")
    run = TinyRun(build_hf(Context("metal"), config, seed, "q8_0"), kv_type="bf16", sequences=16)  # type: ignore[arg-type]
    prompt = np.resize(tokens, 20)
    steps = [({0: prompt}, (20, 0)), ({0: tokens[:1]}, (1, 21))]
    steps += [(dict.fromkeys(range(16), tokens[:1]), (16, 22))]
    for chunks, shape in steps:
        before = len(mx.launches)
        run.step(chunks)
        launched = [name_launch(mx, name) for name in mx.launches[before:]]
        counted = [launch.kernel for launch in apple_times.list_launches(*shape)]
        start = launched.index("rope_and_write_kv")
        assert launched[start : start + 9] == counted[(first := counted.index("rope_and_write_kv")) : first + 9]


@pytest.mark.slow
@pytest.mark.parametrize("standard", ["metal3.1", "metal4.0"])
def test_apples_own_compiler_takes_what_was_launched(mx: StandIn, standard: str) -> None:
    """It compiles all that the tests before this one launched, on a Mac whose Xcode knows the standard."""
    include = Path(mx._real.__file__).parent / "include"
    if shutil.which("xcrun") is None or compile_by_apple("", standard, include):
        pytest.skip(f"there is no xcrun metal that knows {standard}")
    launch_types()
    sources = [*mx.sources.values()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = pool.map(lambda source: compile_by_apple(source.text, standard, include), sources)
        assert [f"{source.name}: {words}" for source, words in zip(sources, told, strict=True) if words] == []

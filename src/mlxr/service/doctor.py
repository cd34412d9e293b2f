"""Checks the machine and the installation, part by part, says what helps, and checks a GPU closely."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from mlxr import __version__
from mlxr.core.errors import DeviceError, MlxrError, name_install
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings
from mlxr.engine.gpu_checks import Finding, describe_gpu, find_gpu, list_checks, run_check, summarise_parts
from mlxr.engine.memory_plan import read_room_bytes
from mlxr.loading import make_context, make_random_tensor
from mlxr.registry.library import PLACES
from mlxr.service.catalogue import choose_default, find_models_folder, open_registry
from mlxr.service.machine_limits import measure_machine

__all__ = ["Check", "Finding", "GpuReport", "check_gpu", "examine"]

Verdict = Literal["ok", "note", "problem"]
HUB_TIMEOUT_S = 5.0
KEY_WANTED = "a valid API key is needed"  # our server's refusal of requests without one
NO_GPU = "mlx finds no GPU here, so there is nothing to check (pip install 'mlx[cuda13]' for NVIDIA, a Mac has it)"
PACKAGES = ("mlx", "mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "numpy")
FUNCTIONS = (  # which the demo model was taught; used as questions
    "len print sorted enumerate zip map isinstance open range sum str.split str.join str.strip str.replace list.append "
    "dict.get os.path.join os.path.exists os.listdir os.makedirs os.getcwd os.remove json.dumps json.loads json.load "
    "re.sub re.match re.findall re.compile math.sqrt math.gcd itertools.product collections.Counter "
    "functools.lru_cache functools.reduce pathlib.Path.mkdir pathlib.Path.exists datetime.datetime.now time.sleep "
    "random.choice random.randint random.shuffle subprocess.run shutil.copy shutil.rmtree copy.deepcopy "
    "logging.getLogger glob.glob textwrap.dedent heapq.heappush"
)
FEW_BYTES = 4 << 30  # of memory or disk, which hold one small model


@frozen
class Check:
    """The finding about one part; `remedy` is "" if nothing needs to be done."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(settings: Settings, *, asks_hub: bool = True) -> list[Check]:
    """Run all checks; measuring the memory's speed takes a second, an unreachable hub five."""
    looks = [_look_at_versions, _look_at_processor, _look_at_memory, _look_at_gpu, _look_at_models, _look_at_port]
    looks.append(_look_at_pictures)
    looks += [_look_at_others, _look_at_hub] if asks_hub else [_look_at_others]
    return [check for look in looks for check in _collect(look, settings)]


def _in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _collect(look: Callable[[Settings], Iterator[Check]], settings: Settings) -> list[Check]:
    """Return the findings of `look`; an error of ours is a finding, too."""
    found: list[Check] = []
    try:
        found.extend(look(settings))
    except MlxrError as error:
        found.append(Check(look.__name__.removeprefix("_look_at_"), "problem", str(error)))
    return found


def _look_at_versions(_: Settings) -> Iterator[Check]:
    python = platform.python_version()
    yield Check("versions", "ok", f"mlxr {__version__}, Python {python}, {platform.platform(terse=True)}")
    if sys.platform not in ("linux", "darwin"):
        yield Check("system", "note", f"mlxr was never run on {sys.platform}")


def _look_at_processor(settings: Settings) -> Iterator[Check]:
    ctx = make_context("cpu", settings.threads)
    slow = ctx.isa == "portable" and platform.machine() in ("x86_64", "AMD64")
    remedy = "this processor lacks AVX2, so models run several times slower than on newer ones" if slow else ""
    found = f"{platform.processor() or platform.machine()}: {ctx.isa} kernels, {ctx.threads} threads"
    yield Check("processor", "note" if slow else "ok", found, remedy)
    limits = measure_machine(settings)
    rate = limits.read_bytes_per_s
    tokens = rate / 4.9e9
    most = f"{tokens:.0f}" if tokens >= 1 else "less than 1"
    words = f"{rate / 1e9:.1f} GB/s, so an 8B model in 4 bits makes at most {most} tokens/s"
    if os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
        remedy = "other programs compute now, so this is too low: ask again when they rest"
        yield Check("memory speed", "note", words, remedy)
    else:
        yield Check("memory speed", "ok", words)


def _look_at_memory(settings: Settings) -> Iterator[Check]:
    room_bytes = read_room_bytes("cpu")
    if room_bytes is None:
        yield Check("memory", "note", "the system does not say how much is free")
        return
    few = room_bytes < FEW_BYTES
    remedy = "close other programs, or take a model of 1B or less" if few else ""
    yield Check("memory", "note" if few else "ok", f"{_in_gib(room_bytes)} free", remedy)
    if settings.models_memory_bytes and settings.models_memory_bytes > room_bytes:
        text = f"models may take {_in_gib(settings.models_memory_bytes)}, more than is free"
        yield Check("models_memory_bytes", "problem", text, "lower the setting, or leave it out")


def _look_at_gpu(settings: Settings) -> Iterator[Check]:
    device = make_context(settings.device).device
    if device not in ("cpu", "reference"):
        free_bytes = read_room_bytes(device)
        free = "" if free_bytes is None else f", {_in_gib(free_bytes)} free"
        yield Check("gpu", "ok", f"models run on {device}{free}")
    elif shutil.which("nvidia-smi") is not None:
        remedy = f"install mlx for it: {name_install('cuda')}"
        yield Check("gpu", "note", "there is an NVIDIA driver, but models run on the processor", remedy)
    else:
        yield Check("gpu", "ok", "none that mlxr uses; models run on the processor")


def _look_at_pictures(settings: Settings) -> Iterator[Check]:
    names = [record.short_name for record in open_registry(settings).list() if "vision" in record.capabilities]
    missing = [package for module, package in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    found = f"{len(names)} {'model sees' if len(names) == 1 else 'models see'}"
    if missing:
        remedy = f"pip install {' '.join(missing)}, to show models pictures and PDFs"
        yield Check("pictures", "problem" if names and "pillow" in missing else "note", found, remedy)
    else:
        yield Check("pictures", "ok", found)


_EXTRAS = {"PIL": "pillow", "pypdfium2": "pypdfium2"}


def _look_at_models(settings: Settings) -> Iterator[Check]:
    folder = find_models_folder(settings)
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free_bytes = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        yield Check("models folder", "problem", f"{folder} cannot be written", "set models_folder to one that can")
    else:
        few = free_bytes < FEW_BYTES
        remedy = "remove models (`mlxr rm`), or set models_folder to another disk" if few else ""
        yield Check("models folder", "note" if few else "ok", f"{folder}, {_in_gib(free_bytes)} free", remedy)
    registry = open_registry(settings)
    records = [record for record in registry.list() if record.files]
    yield Check(
        "models", "ok", f"{len(records)} here; without a name answers {choose_default(registry, settings).name}"
    )
    for record in records:
        if record.problem is not None:
            yield Check(
                record.short_name,
                "problem",
                record.problem,
                f"pull or import it again, or `mlxr rm {record.short_name}`",
            )


def _look_at_port(settings: Settings) -> Iterator[Check]:
    address = f"{settings.host}:{settings.port}"
    if settings.unix_socket is not None:
        return
    with socket.socket() as probe:
        probe.settimeout(1)
        taken = probe.connect_ex(("127.0.0.1" if settings.host == "0.0.0.0" else settings.host, settings.port)) == 0
    if not taken:
        yield Check("port", "ok", f"{address} is free for `mlxr serve`")
        return
    if _is_ours(f"http://{address}"):
        yield Check("port", "ok", f"an mlxr server answers at http://{address}")
    else:
        remedy = "wait if it is a busy mlxr server; else stop it, or `mlxr serve --port 11435`"
        yield Check("port", "note", f"another program has {address}, or does not answer in time", remedy)


def _is_ours(url: str) -> bool:
    """Return True if the server at `url` describes itself as mlxr's does."""
    import httpx

    try:
        reply = httpx.get(f"{url}/openapi.json", timeout=HUB_TIMEOUT_S)
        return "mlxr" in reply.text or (reply.status_code == 401 and KEY_WANTED in reply.text)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _look_at_others(_: Settings) -> Iterator[Check]:
    for source, find in PLACES.items():
        models = find()
        if models:
            size = _in_gib(sum(model.size_bytes for model in models))
            remedy = f"`mlxr import --from {source}` names them here; nothing is copied"
            yield Check(source, "ok", f"{len(models)} models on this disk, {size}", remedy)


def _look_at_hub(settings: Settings) -> Iterator[Check]:
    import httpx
    from huggingface_hub import get_token

    token = "with your token" if get_token() else "without a token; gated models need `hf auth login` or HF_TOKEN"
    try:
        status = httpx.get(settings.hub_url, timeout=HUB_TIMEOUT_S, follow_redirects=True).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "pulls need it: check the network (HTTPS_PROXY names a proxy) and the setting hub_url"
        yield Check("hub", "note", f"{settings.hub_url} cannot be reached: {error}", remedy)
        return
    yield Check("hub", "ok" if status < 500 else "note", f"{settings.hub_url} answers {status}, {token}")


@frozen
class GpuReport:
    """The findings of a GPU's checks, and the machine."""

    device: str
    machine: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True if every check that has a verdict passed."""
        return all(one.passed is not False for one in self.findings)

    def describe(self) -> dict[str, object]:
        """Return the report as fields for JSON."""
        return {"device": self.device, "passed": self.passed, "machine": self.machine} | {
            "findings": [asdict(one) for one in self.findings]
        }

    def write_page(self) -> str:
        """Return a page of text: the machine, how much passed, the speeds, and the text of each check that failed."""
        lines = [f"mlxr check-gpu: {self.device}, {'all well' if self.passed else 'NOT ALL WELL'}", ""]
        lines += [f"{name}: {value}" for name, value in self.machine.items()]
        lines += ["", *(f"{part}: {count} passed" for part, count in summarise_parts(self.findings).items()), ""]
        lines += [f"{one.name}: {one.text}" for one in self.findings if one.passed is None or one.part == "answers"]
        for one in self.findings:
            if one.passed is False:
                lines += ["", f"FAILED {one.part} {one.name}: {one.text[:MAX_WORDS]}"]
        return "\n".join(lines) + "\n"


MAX_WORDS = 1200  # characters of a compiler's text on the page; JSON has all
Answer = Callable[[str, Sequence[str]], tuple[list[str], str]]  # device, questions: greedy answers, and how fast


def check_gpu(
    device: str | None, answer: Answer, *, is_brief: bool = False, tell: Callable[[Finding], None] | None = None
) -> GpuReport:
    """Check each kernel of a GPU, writes into pages, speeds, and the demo's answers against the processor's.

    `device` None is the GPU that mlx finds. If it `is_brief`, it makes few checks and one answer. Each finding goes to
    `tell` at once, and no failure stops the checks. Raises DeviceError only if there is no GPU.
    """
    device = device or find_gpu()
    if device is None:
        raise DeviceError(NO_GPU)
    findings: list[Finding] = []
    for part, name, check in list_checks(device, make_random_tensor, is_brief=is_brief):
        findings.append(run_check(part, name, check))
        if tell is not None:
            tell(findings[-1])
    questions = [f"What does {name} do?" for name in FUNCTIONS.split()[: 1 if is_brief else None]]
    findings.append(run_check("answers", "demo", lambda: _compare_answers(device, questions, answer)))
    if tell is not None:
        tell(findings[-1])
    return GpuReport(device, _describe_machine(device), tuple(findings))


def _compare_answers(device: str, questions: Sequence[str], answer: Answer) -> tuple[bool, str]:
    (own, speed), (wanted, _) = answer(device, questions), answer("cpu", questions)
    other = [at for at, pair in enumerate(zip(own, wanted, strict=True)) if pair[0] != pair[1]]
    words = f"{len(own) - len(other)} of {len(own)} greedy answers as on the processor, {speed}"
    if other:
        words += f"; to {questions[other[0]]!r} {own[other[0]]!r} instead of {wanted[other[0]]!r}"
    return not other, words


def _describe_machine(device: str) -> dict[str, str]:
    found: dict[str, str] = {
        "mlxr": str(__version__),
        "Python": platform.python_version(),
        "system": platform.platform(),
    }
    found["processor"] = platform.processor() or platform.machine()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | describe_gpu(device)

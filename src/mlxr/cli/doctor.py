"""`mlxr doctor` and `mlxr check-gpu`: checks of the machine, the installation and a GPU, with remedies."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxr.cli.flags import Json, ServerSettings
from mlxr.cli.terminal import make_printable, print_json, print_note
from mlxr.core.types import SamplingParams

if TYPE_CHECKING:
    from mlxr.service.doctor import Finding

MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
Offline = Annotated[bool, typer.Option("--offline", help="Do not ask the hub.")]


def doctor(settings: ServerSettings, offline: Offline = False, json: Json = False) -> None:
    """Look at processor, memory, GPU, disk, port, hub and models. Exit code 1 when something keeps mlxr from working.

    Measures how fast memory is, which takes a second.
    """
    from mlxr.service.doctor import examine

    checks = examine(settings, asks_hub=not offline)
    if json:
        print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{MARKS[check.verdict]}  {check.name.ljust(width)}  {make_printable(check.found)}")
            if check.remedy:
                print(f"{' ' * (len(MARKS['ok']) + width + 4)}{check.remedy}")
    problems = sum(check.verdict == "problem" for check in checks)
    if problems:
        if not json:
            print_note(f"{problems} {'problem keeps' if problems == 1 else 'problems keep'} mlxr from working fully")
        raise typer.Exit(1)


GpuName = Annotated[
    str | None, typer.Argument(help="cuda, metal, emulated or mlx-cpu; left out, the GPU that mlx finds here.")
]
Report = Annotated[Path | None, typer.Option("--report", help="Write the page and all as JSON into this file.")]
Brief = Annotated[bool, typer.Option("--brief", help="Few checks, one answer and no speeds.")]
MOST_TOKENS = 200


def check_gpu(gpu: GpuName = None, report: Report = None, brief: Brief = False, json: Json = False) -> None:
    """Check a GPU's kernels and speeds, and write a report. Takes some minutes, and no network.

    Each kernel is compared with NumPy, pages are written in random orders, and the
    demo answers questions as it does on the processor.

    Prints a page to paste into an issue. The checks go on after a failure; the exit
    code is then 1, and also without a GPU.
    """
    from mlxr.service.doctor import check_gpu as check

    found = check(gpu, answer_questions, is_brief=brief, tell=print_finding)
    page, fields = found.write_page(), found.describe()
    if json:
        print_json(fields)
    else:
        print(page, end="")
    if report is not None:
        text = json_format.dumps(fields, indent=1, allow_nan=False)
        report.write_text(f"```\n{page}```\n\n<details><summary>JSON</summary>\n\n```json\n{text}\n```\n</details>\n")
        print_note(f"wrote {report}")
    if not found.passed:
        raise typer.Exit(1)


def print_finding(finding: Finding) -> None:
    """Print a finding on stderr, in one line."""
    mark = {True: "ok", False: "FAILED", None: "-"}[finding.passed]
    print_note(f"{mark:6}  {finding.seconds:5.1f} s  {finding.name}: {make_printable(finding.text)[:160]}")


def answer_questions(device: str, questions: Sequence[str]) -> tuple[list[str], str]:
    """Return the demo's greedy answers, one after another, and their speed."""
    from mlxr.llm import LLM

    params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0.0)
    with LLM("demo", device=device) as llm:
        start_s = time.perf_counter()
        replies = [llm.chat([{"role": "user", "content": question}], params) for question in questions]
        tokens = sum(reply.usage.completion_tokens for reply in replies)
        return [reply.text for reply in replies], f"{tokens / (time.perf_counter() - start_s):.0f} tokens/s one by one"

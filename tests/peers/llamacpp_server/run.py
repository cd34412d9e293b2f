"""llama.cpp's own server tests, run against `mlxr serve`.

    python tests/peers/llamacpp_server/run.py --source FOLDER [--work FOLDER] [pytest arguments]

FOLDER holds the unpacked source package of llama-cpp-python, or is where it is downloaded to. The tests are copied from
there, what names llama.cpp's binary or the text of its test model is replaced (`adapted.py`), its server process
becomes `mlxr serve` with a small random model (`plugin.py`), and what cannot apply is left out (`not_applicable.txt`
says why).
Ends with status 1 unless at least 95 % of the others pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from adapted import adapt

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parents[2] / "pyproject.toml").read_text())["project"]
PACKAGE = next(name for name in PROJECT["optional-dependencies"]["peers"] if name.startswith("llama-cpp-python"))
SHARE = 0.95
MODULES = (
    "test_basic",
    "test_completion",
    "test_chat_completion",
    "test_compat_anthropic",
    "test_compat_oai_responses",
    "test_embedding",
    "test_infill",
    "test_security",
    "test_stream",
    "test_tokenize",
    "test_template",
    "test_ctx_shift",
)


def main() -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=Path("build/llamacpp-source"))
    parser.add_argument("--work", type=Path, default=Path("build/llamacpp-tests"))
    options, rest = parser.parse_known_args()
    source, work = find_source(options.source.resolve()), options.work.resolve()
    tests = copy_tests(source, work)
    report = work / "report.xml"
    chosen = [argument for argument in rest if not argument.startswith("-")]
    paths = chosen or [f"unit/{module}.py" for module in MODULES]
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-c", "pytest.ini"]
    command += [
        "--rootdir=.",
        "-q",
        "--tb=short",
        "--show-capture=no",
        f"--junitxml={report}",
        *(rest if chosen else [*rest, *paths]),
    ]
    path = os.pathsep.join(filter(None, (str(HERE), str(tests), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "LLAMACPP_SOURCE": str(source), "LLAMACPP_TESTS": str(work)}
    subprocess.run(command, cwd=tests, env=environment, check=False)
    return count(report)


def find_source(folder: Path) -> Path:
    """Return llama.cpp's source below `folder`; download and unpack it there first if need be."""
    found = [*folder.glob("*/vendor/llama.cpp")]
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "-d", str(folder), PACKAGE], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as package:
            package.extractall(folder, filter="data")
        found = [*folder.glob("*/vendor/llama.cpp")]
    return found[0]


def copy_tests(source: Path, work: Path) -> Path:
    """Copy the tests into a tree like llama.cpp's, as they look for chat templates beside them; return their folder."""
    shutil.rmtree(work / "tools", ignore_errors=True)
    tests = work / "tools" / "server" / "tests"
    shutil.copytree(source / "tools" / "server" / "tests" / "unit", tests / "unit")
    for name in ("utils.py", "pytest.ini"):
        shutil.copy(source / "tools" / "server" / "tests" / name, tests)
    for path in (tests / "unit").glob("*.py"):
        path.write_text(adapt(path.name, path.read_text()))
    templates = work / "models" / "templates"
    if not templates.exists():
        shutil.copytree(source / "models" / "templates", templates)
    return tests


def count(report: Path) -> int:
    """Print how many passed in each module; return 1 if their share of all that apply is too small."""
    outcomes: dict[str, Counter[str]] = {}
    failed: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        module = case.get("classname", "").rpartition(".")[2]
        outcomes.setdefault(module, Counter())[outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{module}.py::{case.get('name')}")
    print(f"\n{'module':28}{'passed':>8}{'failed':>8}{'left out':>10}")
    for module, counts in outcomes.items():
        wrong = counts["failure"] + counts["error"]
        print(f"{module:28}{counts['passed']:8}{wrong:8}{counts['skipped']:10}")
    passed = sum(counts["passed"] for counts in outcomes.values())
    applicable = passed + len(failed)
    print(f"{passed} of {applicable} applicable tests pass: {passed / max(applicable, 1):.1%}")
    print("".join(f"  failed: {name}\n" for name in failed), end="")
    return 0 if applicable and passed >= SHARE * applicable else 1


if __name__ == "__main__":
    sys.exit(main())

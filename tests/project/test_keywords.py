"""A setting of a model is said once: all else follows from its row."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from mlxr.core import model_keywords

ROOT = Path(__file__).parents[2]
TOOL = "tools/write_keywords.py"
ROW = '    new_tokens: int | None = setting("int", 7, "Something new.", minimum=3)\n'
LAST = "\n\nMODEL_DEFAULTS ="
LOOK = """
import json, inspect
from mlxr.cli.flags import describe_setting, expand_flags
from mlxr.core.model_keywords import ModelKeywords
from mlxr.core.settings import BY_NAME, Settings, explain, resolve
from mlxr.llm import LLM

def command(settings: Settings) -> None:
    print(json.dumps(found | {"flag": settings.new_tokens}))

def refuse() -> str:
    try:
        LLM("demo", new_tokens=2)
    except Exception as error:
        return str(error)

found = {
    "default": Settings().new_tokens,
    "variable": resolve({}, {"MLXR_NEW_TOKENS": "8"}).new_tokens,
    "shown": describe_setting(BY_NAME["new_tokens"], explain({}, {})["new_tokens"])["value"],
    "keyword": str(inspect.signature(LLM).parameters["new_tokens"]),
    "typed": str(ModelKeywords.__annotations__["new_tokens"]),
    "refused": refuse(),
}
expanded = expand_flags(command)
given = dict.fromkeys(inspect.signature(expanded).parameters) | {"new_tokens": "9"}
expanded(**given)
"""


def test_the_keywords_are_those_of_the_rows() -> None:
    tool = runpy.run_path(str(ROOT / TOOL))
    wanted = tool["render"](tool["list_rows"](tool["ModelSettings"]))
    assert Path(model_keywords.__file__).read_text(encoding="utf-8") == wanted, "run `make format`"


def test_one_more_row_is_one_more_setting(tmp_path: Path) -> None:
    """In a copy of the package, which is found in place of the installed one."""
    package = tmp_path / "src" / "mlxr"
    shutil.copytree(ROOT / "src" / "mlxr", package, ignore=shutil.ignore_patterns("assets", "__pycache__", "page"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=lambda folder, names: set(names) - {Path(TOOL).name})
    rows = package / "core" / "model_settings.py"
    rows.write_text(rows.read_text(encoding="utf-8").replace(LAST, ROW + LAST), encoding="utf-8")
    libraries = sysconfig.get_paths()["purelib"]

    def run(source: str) -> str:
        begin = f"import sys, runpy; sys.path[:0] = [{str(tmp_path / 'src')!r}, {libraries!r}]\n"
        command = [sys.executable, "-S", "-c", begin + source]
        return subprocess.run(command, env={}, capture_output=True, text=True, check=True).stdout

    run(f"runpy.run_path({str(tmp_path / TOOL)!r}, run_name='__main__')")
    assert json.loads(run(LOOK)) == {
        "default": 7,
        "variable": 8,
        "shown": 7,
        "keyword": "new_tokens: int | None = None",
        "typed": "int | None",
        "refused": f"new_tokens: must be from 3 to {2**62}; got 2",
        "flag": 9,
    }

"""docs/server.md names every setting, route and metric of the server; the service files fit the settings."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
from pathlib import Path

import pytest

from mlxr.cli.main import COMMANDS
from mlxr.core.settings import BY_NAME, FILE_VARIABLE, SETTINGS, Settings
from mlxr.server.app import DIALECTS
from mlxr.server.listen import LAST_EVENTS_S
from mlxr.server.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "server.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", TEXT))


def plain(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.scope != "model"])
def test_every_setting_has_its_row(name: str) -> None:
    assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", TEXT, re.MULTILINE)


def test_every_route_is_named() -> None:
    routes = {plain(row.path) for dialect in DIALECTS for row in dialect.router.rows}
    assert routes <= {plain(name) for name in NAMED}


def test_every_metric_is_named() -> None:
    text = Metrics().render(0, 0, []).decode()
    names = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 20
    assert names <= NAMED
    assert {name for name in NAMED if name.startswith("mlxr_")} <= names
    records = re.findall(r"record: (\S+)", (DOCS / "grafana" / "mlxr-names.rules.yml").read_text())
    others = {re.sub("_(bucket|sum|count)$", "", record) for record in records}
    assert {name for name in NAMED if name.startswith(("vllm:", "llamacpp:", "gen_ai_server"))} <= others


def test_the_grafana_dashboard_asks_for_what_there_is() -> None:
    families = {family.name: family for family in Metrics().collect([])}
    board = json.loads((DOCS / "grafana" / "mlxr.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [row["definition"] for row in board["templating"]["list"] if row["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"mlxr_\w+", query)}
    assert len(asked) > 20
    for name in asked:
        family = re.sub("_(total|bucket|sum|count)$", "", name)
        assert family in families, name
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
        assert name.removeprefix(family) in suffixes[families[family].type], name


def test_the_settings_file_in_the_text_is_one() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    keys = re.findall(r"^(\w+) =", example, re.MULTILINE)
    assert keys
    assert all(key in BY_NAME for key in keys)


def test_the_systemd_unit() -> None:
    text = (DOCS / "service" / "mlxr.service").read_text()
    variables = set(re.findall(r"^Environment=(MLXR_\w+)=", text, re.MULTILINE))
    assert variables - {FILE_VARIABLE} <= {setting.environment_variable for setting in SETTINGS}
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(text)
    service = parser["Service"]
    check_command(service["ExecStart"].split())
    assert int(service["TimeoutStopSec"]) > Settings().drain_s + LAST_EVENTS_S


def test_the_launchd_plist() -> None:
    agent = plistlib.loads((DOCS / "service" / "mlxr.plist").read_bytes())
    check_command(agent["ProgramArguments"])
    assert agent["ExitTimeOut"] > Settings().drain_s + LAST_EVENTS_S


def check_command(words: list[str]) -> None:
    assert Path(words[0]).name == "mlxr"
    assert words[1] in {row.name for row in COMMANDS}
    flags = [word for word in words[2:] if word.startswith("--")]
    assert set(flags) <= {setting.flag for setting in SETTINGS}

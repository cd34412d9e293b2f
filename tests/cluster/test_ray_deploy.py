"""The files of deploy/ name commands, flags and functions that exist, and no request path is unknown to the server."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from mlxr.cli import cluster as command
from mlxr.cluster.front import GENERATING, is_refused, join_metrics
from mlxr.core.errors import SettingError
from mlxr.server import generation
from mlxr.server.app import DIALECTS

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_routes_that_start_answers_are_planned() -> None:
    starting = {
        row.path
        for dialect in DIALECTS
        for row in dialect.router.rows
        if getattr(sys.modules[row.handler.__module__], "start", None) is generation.start and row.method == "POST"
    }
    others = ("count", "input_tokens", "/control", "/embed")  # no answer begins there, or it grows already
    missing = {path for path in starting - GENERATING if not any(word in path for word in others)}
    assert not missing, f"{missing} are answered and not routed by their prompts"


def test_what_changes_one_machine_is_refused() -> None:
    assert is_refused("POST", "/api/pull")
    assert is_refused("DELETE", "/v1/admin/models/demo")
    assert not is_refused("POST", "/api/chat")
    assert not is_refused("HEAD", "/api/blobs/sha256:0")


def test_metrics_of_several_replicas_stay_in_their_families() -> None:
    text = '# HELP a Counts.\n# TYPE a counter\na_total{model="m"} 1.0\n# HELP b Is.\n# TYPE b gauge\nb 2.0\n'
    lines = join_metrics({"x": text, "y": text}).splitlines()
    assert lines[:2] == ["# HELP a Counts.", "# TYPE a counter"]
    assert lines[2:4] == ['a_total{replica="x",model="m"} 1.0', 'a_total{replica="y",model="m"} 1.0']
    assert lines[4:] == ["# HELP b Is.", "# TYPE b gauge", 'b{replica="x"} 2.0', 'b{replica="y"} 2.0']


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SettingError, match=r"pip install 'ray\[serve\]'"):
        command.require_ray()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules
def test_of_several_clusters_on_a_machine_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from mlxr.cluster import application

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(application.services, "find_gcs_addresses", lambda: {"127.0.0.1:2", "127.0.0.1:1"})
    with pytest.raises(SettingError, match=r"--ray-address, one of 127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        application.join_cluster(None).__enter__()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules
def test_the_manifest_names_what_is_there() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `ray`")
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    manifest = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    workers = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert all(group["template"]["spec"]["containers"] and group["groupName"] for group in workers)
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    for application in config.applications:
        module, _, function = application.import_path.partition(":")
        assert len(inspect.signature(getattr(importlib.import_module(module), function)).parameters) == 1
    from mlxr.cluster.application import APPLICATION, ENGINES, ClusterPlan

    front, engines = config.applications
    assert [front.name, engines.name] == [APPLICATION, ENGINES]
    assert ClusterPlan(**engines.args).resolve().threads == 4


def test_the_compose_file_runs_a_command_that_exists() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `ray`")
    words = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["cluster"]["command"]
    assert words[:3] == ["cluster", "serve", "${MODEL:-demo}"]
    from mlxr.cli.flags import expand_flags

    names = inspect.signature(expand_flags(command.cluster)).parameters
    flags = [re.sub("-", "_", word[2:]) for word in words if word.startswith("--")]
    assert set(flags) <= set(names)


def test_replicas_of_one_machine_cannot_be_reached_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    application = importlib.import_module("mlxr.cluster.application")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    for resources, address in (({"CPU": 2.0, application.ONE_MACHINE: 1.0}, "127.0.0.1"), ({"CPU": 9.0}, "10.0.0.7")):
        monkeypatch.setattr(ray, "cluster_resources", lambda resources=resources: resources)
        assert application.find_address() == address


def test_who_asks_for_another_routing_is_told_which_there_are() -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    application = importlib.import_module("mlxr.cluster.application")
    with pytest.raises(SettingError, match="routing: must be one of prefix, random; got 'best'"):
        application.build_front({"routing": "best"})

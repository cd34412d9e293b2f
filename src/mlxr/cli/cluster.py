"""`mlxr cluster`: one model on several engines, on this machine or on many, run by Ray Serve."""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
from enum import StrEnum
from typing import Annotated

import typer

from mlxr.cli.flags import ServerSettings
from mlxr.cli.serve import describe
from mlxr.cli.terminal import print_note
from mlxr.cluster.router import Routing
from mlxr.core.errors import SettingError
from mlxr.core.settings import BY_NAME, Settings
from mlxr.service.catalogue import choose_default, open_registry


class Action(StrEnum):
    """The actions of `mlxr cluster`."""

    SERVE = "serve"
    UPDATE = "update"
    STATUS = "status"


What = Annotated[
    Action,
    typer.Argument(
        metavar="ACTION",
        help="serve: run a cluster until a signal ends it. update: change the model or the settings of one that runs, "
        "replica by replica. status: tell how one stands.",
    ),
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model that all replicas serve.")]
Replicas = Annotated[int, typer.Option("--replicas", min=1, help="How many engines; with --max-replicas the fewest.")]
MaxReplicas = Annotated[
    int | None, typer.Option("--max-replicas", min=1, help="Scale up to so many as prompt tokens wait.")
]
TokensPerReplica = Annotated[
    int, typer.Option("--tokens-per-replica", min=1, help="Waiting prompt tokens that one replica may have.")
]
ScaleUp = Annotated[
    float, typer.Option("--scale-up-s", min=0.0, help="Seconds for which more replicas must be wanted until they come.")
]
ScaleDown = Annotated[
    float, typer.Option("--scale-down-s", min=0.0, help="Seconds for which fewer must be wanted until some go.")
]
RoutingChoice = Annotated[
    Routing, typer.Option("--routing", help="How serve's front chooses a replica: random is there to compare with.")
]
Cpus = Annotated[
    float | None,
    typer.Option("--cpus", min=0.0, help="Processors that a replica reserves; default: the setting threads, or 1."),
]
ReservedGpus = Annotated[
    float | None,
    typer.Option("--reserved-gpus", min=0.0, help="GPUs that a replica reserves; default: the setting gpus, if not 1."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="A Ray cluster that runs. Without, serve starts Ray here; update and status find the only one here.",
    ),
]


def reserve_gpus(settings: ServerSettings) -> float:
    """Return the GPUs that a replica reserves by default: all that compute a model together, none if one does."""
    return float(settings.gpus) if settings.gpus > 1 else 0.0


def cluster(
    settings: ServerSettings,
    action: What,
    model: Model = None,
    replicas: Replicas = 1,
    max_replicas: MaxReplicas = None,
    tokens_per_replica: TokensPerReplica = 8192,
    scale_up_s: ScaleUp = 30.0,
    scale_down_s: ScaleDown = 600.0,
    routing: RoutingChoice = Routing.PREFIX,
    cpus: Cpus = None,
    reserved_gpus: ReservedGpus = None,
    ray_address: RayAddress = None,
) -> None:
    """Serve a model from several engines behind one address, and change or watch such a cluster."""
    require_ray()
    from mlxr.cluster.application import ClusterPlan, join_cluster, read_status, run_engines, start_cluster

    if action is Action.STATUS:
        with join_cluster(ray_address):
            typer.echo(json.dumps(read_status()))
        return
    if max_replicas is not None and max_replicas < replicas:
        raise SettingError(f"--max-replicas: must be at least --replicas, that is {replicas}; got {max_replicas}")
    plan = ClusterPlan(
        model=model or choose_default(open_registry(settings), settings).name,
        replicas=replicas,
        max_replicas=max_replicas,
        tokens_per_replica=tokens_per_replica,
        scale_up_s=scale_up_s,
        scale_down_s=scale_down_s,
        cpus=float(settings.threads or 1) if cpus is None else cpus,
        gpus=reserve_gpus(settings) if reserved_gpus is None else reserved_gpus,
        settings=list_changed(settings),
    )
    if action is Action.UPDATE:
        with join_cluster(ray_address):
            run_engines(plan)
        print_note(f"updated: {plan.model}")
        return
    with start_cluster(plan, settings, ray_address, routing) as addresses:
        print_note(describe(settings, addresses.url))
        print_note(f"ray: {addresses.ray} (--ray-address of update and status, where several clusters run here)")
        print_note(f"ready: {plan.model} on {plan.replicas} replicas")
        wait_for_end()


def require_ray() -> None:
    """Raise SettingError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise SettingError(
            "mlxr cluster needs Ray, which is not installed: pip install 'ray[serve]', or mlxr's extra `ray`"
        )


def list_changed(settings: Settings) -> dict[str, object]:
    """Return the settings that differ from their defaults, by name."""
    values = {name: getattr(settings, name) for name in BY_NAME}
    return {name: value for name, value in values.items() if value != BY_NAME[name].default}


def wait_for_end() -> None:
    """Return at SIGTERM or SIGINT."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()

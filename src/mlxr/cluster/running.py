"""A cluster from its start to its end: Ray, Ray Serve's HTTP proxy, the application, and how it stands."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray._private import services

from mlxr.cluster.application import (
    APPLICATION,
    ENGINE,
    ENGINES,
    LOCAL,
    ONE_MACHINE,
    ClusterPlan,
    bind_engines,
    build_front,
)
from mlxr.cluster.router import Routing
from mlxr.core.errors import SettingError
from mlxr.core.settings import Settings

OWN_CPUS = 1  # for what Ray itself runs


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where clients find a cluster, and by which address of Ray it is told from others."""

    url: str
    ray: str


@contextmanager
def start_cluster(
    plan: ClusterPlan, settings: Settings, address: str | None, routing: Routing = Routing.PREFIX
) -> Iterator[Addresses]:
    """The cluster's addresses; it runs until the end of the block. `address` is that of Ray, None to start it here.

    Raises SettingError when the application cannot be started.
    """
    port = check_port(settings)
    _connect(address, cpus=max(os.cpu_count() or 1, int((plan.max_replicas or plan.replicas) * plan.cpus) + OWN_CPUS))
    try:
        serve.start(http_options={"host": settings.host, "port": port, "keep_alive_timeout_s": 75})
        serve.run(build_front({"routing": routing}), name=APPLICATION, route_prefix="/")
        run_engines(plan)
        context: Any = ray.get_runtime_context()
        yield Addresses(f"http://{settings.host}:{port}", context.gcs_address)
    finally:
        end_serve: Any = serve.shutdown
        end_serve()
        _disconnect()


@contextmanager
def join_cluster(address: str | None) -> Iterator[None]:
    """Within, one may talk to the cluster at Ray's `address`; None is the only one of this machine.

    Raises SettingError when there is none, or when there are several and none is named.
    """
    _connect(address or _find_ray())
    try:
        yield
    finally:
        _disconnect()


def run_engines(plan: ClusterPlan) -> None:
    """Start the replicas, or change those that run, one after the other; return when they stand.

    Raises SettingError when they cannot be started.
    """
    try:
        serve.run(bind_engines(plan), name=ENGINES, route_prefix=None)
    except RuntimeError as error:
        reason = read_status().get("message") or str(error)
        raise SettingError(f"the cluster cannot be started: {_shorten(reason)}") from None


def read_status() -> dict[str, Any]:
    """How the replicas stand: `status`, `message`, and how many replicas are in which state (`replicas`)."""
    application = serve.status().applications.get(ENGINES)
    if application is None:
        return {"status": "NOT_STARTED", "message": "", "replicas": {}}
    engine = application.deployments.get(ENGINE)
    states = {} if engine is None else {str(name): count for name, count in engine.replica_states.items()}
    message = application.message or ("" if engine is None else engine.message)
    return {"status": str(application.status.value), "message": message, "replicas": states}


def check_port(settings: Settings) -> int:
    """The port that the proxy can have, a free one for 0; raises SettingError."""
    if settings.unix_socket is not None:
        raise SettingError("unix_socket: a cluster listens on an address; leave it out")
    try:
        with socket.create_server((settings.host, settings.port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingError(f"port: {settings.host}:{settings.port} cannot be listened on: {reason}") from error


def _find_ray() -> str:
    """Where the one Ray of this machine is. Ray itself would take any of several."""
    running: Any = services.find_gcs_addresses
    addresses = sorted(running())
    if len(addresses) > 1 and not os.environ.get("RAY_ADDRESS"):
        raise SettingError(f"ray: several run on this machine: give --ray-address, one of {', '.join(addresses)}")
    return "auto"


def _connect(address: str | None, cpus: int | None = None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False, "namespace": APPLICATION}
    if address is not None:
        _use_token()
    else:
        own = {"resources": {ONE_MACHINE: 1}, "_node_ip_address": LOCAL}
        options |= {"num_cpus": cpus, "include_dashboard": False, **own}
    try:
        ray.init(address or "local", **options)
    except (ConnectionError, ValueError) as error:
        raise SettingError(f"ray: cannot reach a cluster at {address}: {_shorten(str(error))}") from None


def _use_token() -> None:
    """Let Ray show the token of `~/.ray` where there is one, as it does by itself only where it starts a cluster."""
    try:
        setup = importlib.import_module("ray._private.authentication.authentication_token_setup")
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except (ImportError, AttributeError):  # a Ray without tokens
        return


def _disconnect() -> None:
    end: Any = ray.shutdown
    end()


def _shorten(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no reason is known"

"""The cluster as two applications of Ray Serve, the front and the replicas (engines); its start and its end.

Ray Serve starts replicas, replaces dead ones, scales and updates them; requests and reports do not pass through it. The
only module that imports Ray. `build_front` and `build_engines` make the applications from plain values, as in a
configuration file of Ray Serve.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import ray
from ray import serve
from ray._private import services
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.requests import Request
from starlette.responses import Response

from mlxr.cluster.front import Front
from mlxr.cluster.replica import Replica, Reply, Report
from mlxr.cluster.router import Routing
from mlxr.core.errors import SettingError
from mlxr.core.frozen import frozen
from mlxr.core.settings import Settings, resolve
from mlxr.server.activity import start_logging

WAITING = "waiting_tokens"  # the statistic that replicas record for Ray Serve


class ScaleByWaiting:
    """A policy for Ray Serve's autoscaling: one replica for every `tokens_per_replica` waiting tokens."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas wanted now, within the bounds, and an empty state."""
        waiting = (context.aggregated_metrics or {}).get(WAITING, {})
        wanted = math.ceil(sum(waiting.values()) / self._tokens_per_replica)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(low, min(high, wanted)), {}


APPLICATION, ENGINES = "mlxr", "mlxr-engines"  # the front is one application, the replicas are another
FRONT, ENGINE = "Front", "Engine"
LOCAL = "127.0.0.1"
ONE_MACHINE = "mlxr_one_machine"  # a resource of a Ray that was started for one cluster on one machine
MAX_REQUESTS = 100_000  # at a time in the front; replicas refuse requests when they are overloaded
FRONT_END_S = 120.0  # for the answers still under way when the front ends
END_S = 15.0  # beyond drain_s, for a replica to end
HEALTH_S = 2.0


@frozen
class ClusterPlan:
    """The size and settings of a cluster. `settings` are those of the replicas that differ from the defaults.

    There are `replicas`, or from that many up to `max_replicas`, by `tokens_per_replica` (see `ScaleByWaiting`): the
    number rises once more are wanted for `scale_up_s`, and falls after `scale_down_s`. Each reserves `cpus` and `gpus`.
    """

    model: str
    replicas: int = 1
    max_replicas: int | None = None
    tokens_per_replica: int = 8192
    scale_up_s: float = 30.0
    scale_down_s: float = 600.0
    cpus: float = 1.0
    gpus: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self) -> Settings:
        """The settings of a replica on this machine; raises SettingError."""
        return resolve({**self.settings, "default_model": self.model})


def find_address() -> str:
    """The address of this machine in the cluster; if it is the only machine, a local address that no other reaches."""
    resources: Any = ray.cluster_resources
    if ONE_MACHINE in resources():
        return LOCAL
    util: Any = ray.util
    return str(util.get_node_ip_address())


class FrontDeployment:
    """The front in an actor, which routes as `routing` says."""

    def __init__(self, routing: str) -> None:
        self._front = Front(routing=Routing(routing))

    async def __call__(self, request: Request) -> Response:
        """Answer one request of a client."""
        return await self._front.answer(request)

    async def report(self, report: Report) -> Reply:
        """Take in the report of a replica; returns the reply to it."""
        return await self._front.note(report)


class EngineDeployment:
    """One replica in an actor. It looks for the front when it has something to report."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        address = find_address()
        values = {**plan.settings, "default_model": plan.model, "host": address, "port": 0, "unix_socket": None}
        settings = resolve(values)
        start_logging(settings)
        context = serve.get_replica_context()
        self._replica = Replica(settings, context.replica_id.unique_id, self._send)
        self._replica.wait_ready()

    async def _send(self, report: Report) -> Reply:
        handle = serve.get_deployment_handle(FRONT, APPLICATION)
        reply: Reply = await handle.report.remote(report)
        return reply

    async def check_health(self) -> None:
        """Raise when the server has ended, so that this replica is replaced."""
        if not self._replica.is_alive:
            raise RuntimeError("the replica's server has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `ScaleByWaiting` counts."""
        return {WAITING: float(self._replica.load.waiting_tokens)}

    async def __del__(self) -> None:
        await self._replica.stop()


def build_front(values: Mapping[str, Any]) -> Any:
    """The application that clients talk to. It does not depend on the plan, so it keeps running when that changes.

    `values` may have `routing`, one of `Routing`; raises SettingError if it is invalid.
    """
    routing = values.get("routing", Routing.PREFIX)
    if routing not in list(Routing):
        raise SettingError(f"routing: must be one of {', '.join(Routing)}; got {routing!r}")
    front: Any = serve.deployment(FrontDeployment)
    return front.options(
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=FRONT_END_S,
    ).bind(str(routing))


def build_engines(values: Mapping[str, Any]) -> Any:
    """The application of the replicas, of a `ClusterPlan` with these values; raises SettingError."""
    try:
        plan = ClusterPlan(**values)
    except TypeError as error:
        raise SettingError(f"cluster: {error}") from None
    return bind_engines(plan)


def bind_engines(plan: ClusterPlan) -> Any:
    """The application of the replicas; raises SettingError for invalid settings."""
    drain_s = plan.resolve().drain_s
    engine: Any = serve.deployment(EngineDeployment)
    return engine.options(
        name=ENGINE,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        graceful_shutdown_timeout_s=drain_s + END_S,
        health_check_period_s=HEALTH_S,
        **_scale(plan),
    ).bind(plan)


def _scale(plan: ClusterPlan) -> dict[str, Any]:
    if plan.max_replicas is None:
        return {"num_replicas": plan.replicas}
    policy: Any = AutoscalingPolicy(  # type: ignore[no-untyped-call,unused-ignore]
        policy_function=f"{ScaleByWaiting.__module__}:{ScaleByWaiting.__name__}",
        policy_kwargs={"tokens_per_replica": plan.tokens_per_replica},
    )
    config = AutoscalingConfig(
        min_replicas=plan.replicas,
        max_replicas=plan.max_replicas,
        upscale_delay_s=plan.scale_up_s,
        downscale_delay_s=plan.scale_down_s,
        policy=policy,
    )
    return {"autoscaling_config": config}


OWN_CPUS = 1  # for Ray's own processes


@frozen
class Addresses:
    """The addresses of a cluster: `url` for clients, `ray` to tell it from other clusters."""

    url: str
    ray: str


@contextmanager
def start_cluster(
    plan: ClusterPlan, settings: Settings, address: str | None, routing: Routing = Routing.PREFIX
) -> Iterator[Addresses]:
    """Run a cluster until the block ends; yields its addresses. `address` is that of Ray, None to start Ray here.

    Raises SettingError if the application cannot be started.
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
    """Connect to the cluster at Ray's `address` until the block ends; None is the only one of this machine.

    Raises SettingError if there is none, or if there are several and none is named.
    """
    _connect(address or _find_ray())
    try:
        yield
    finally:
        _disconnect()


def run_engines(plan: ClusterPlan) -> None:
    """Start the replicas, or update the running ones one by one; returns when they are ready.

    Raises SettingError if they cannot be started.
    """
    try:
        serve.run(bind_engines(plan), name=ENGINES, route_prefix=None)
    except RuntimeError as error:
        reason = read_status().get("message") or str(error)
        raise SettingError(f"the cluster cannot be started: {_shorten(reason)}") from None


def read_status() -> dict[str, Any]:
    """The state of the replicas: `status`, `message`, and the number of replicas in each state (`replicas`)."""
    application = serve.status().applications.get(ENGINES)
    if application is None:
        return {"status": "NOT_STARTED", "message": "", "replicas": {}}
    engine = application.deployments.get(ENGINE)
    states = {} if engine is None else {str(name): count for name, count in engine.replica_states.items()}
    message = application.message or ("" if engine is None else engine.message)
    return {"status": str(application.status.value), "message": message, "replicas": states}


def check_port(settings: Settings) -> int:
    """Return the proxy's port, a free one for 0; raises SettingError if it cannot be listened on."""
    if settings.unix_socket is not None:
        raise SettingError("unix_socket: a cluster listens on an address; leave it out")
    try:
        with socket.create_server((settings.host, settings.port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingError(f"port: {settings.host}:{settings.port} cannot be listened on: {reason}") from error


def _find_ray() -> str:
    """The address of the only Ray on this machine; raises SettingError if several run (Ray would take any)."""
    running: Any = services.find_gcs_addresses
    addresses = sorted(running())
    if len(addresses) > 1 and not os.environ.get("RAY_ADDRESS"):
        raise SettingError(f"ray: several run on this machine: give --ray-address, one of {', '.join(addresses)}")
    return "auto"


def _connect(address: str | None, cpus: int | None = None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends no usage statistics
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
    """Let Ray present the token of `~/.ray`, if any; by itself it does so only when it starts a cluster."""
    try:
        setup = importlib.import_module("ray._private.authentication.authentication_token_setup")
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except (ImportError, AttributeError):  # a Ray without tokens
        return


def _disconnect() -> None:
    end: Any = ray.shutdown
    end()


def _shorten(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no reason is known"

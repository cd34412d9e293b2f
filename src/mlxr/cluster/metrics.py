"""The metrics of all replicas as one text, each sample with the label `replica`, and what the front counts itself."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>.+)")
_registry = CollectorRegistry()
_choices = Counter(
    "mlxr_cluster_requests",
    "Requests by why a replica was chosen for them; `continued` counts answers that went on after one had died.",
    ["reason"],
    registry=_registry,
)
_replicas = Gauge("mlxr_cluster_replicas", "Replicas that take requests.", registry=_registry)


def count_choice(reason: str) -> None:
    """A replica was chosen."""
    _choices.labels(reason).inc()


def render_own(replicas: int) -> str:
    """The front's own metrics, in the text format that Prometheus reads."""
    _replicas.set(replicas)
    return generate_latest(_registry).decode()


def join_metrics(texts: Mapping[str, str]) -> str:
    """The texts of several replicas as one: families stay together, and each sample says whose it is."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                _, _, family, *_ = line.split(" ", 3)
                lines = heads.setdefault(family, [])
                if line not in lines and len(lines) < 2:
                    lines.append(line)
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                labels = f'replica="{replica}"' + (f",{sample['labels']}" if sample["labels"] else "")
                samples.setdefault(family, []).append(f"{sample['name']}{{{labels}}} {sample['value']}")
    return "".join(f"{line}\n" for family in heads for line in (*heads[family], *samples.get(family, ())))

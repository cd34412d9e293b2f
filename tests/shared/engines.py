"""An engine of keywords, for tests that pass on what each of their cases wants."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mlxr.core.model_settings import ModelSettings
from mlxr.engine.engine import Engine
from mlxr.engine.runner import Model
from mlxr.kernels.context import Context

SETTINGS = {field.name for field in fields(ModelSettings)}


def open_engine(model: Model, ctx: Context, **options: Any) -> Engine:
    """Return an engine. Keywords that are settings become its settings; it has no end tokens unless some are given."""
    settings = ModelSettings(**{name: options.pop(name) for name in SETTINGS & options.keys()})
    return Engine(model, ctx, settings, **{"eos_ids": (), **options})

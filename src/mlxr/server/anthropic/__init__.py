"""The Anthropic dialect: messages, and counts of their tokens."""

from __future__ import annotations

from mlxr.server.anthropic.messages import render_error, router
from mlxr.server.routes import Dialect

DIALECT = Dialect("anthropic", ("/v1/messages",), router, render_error)

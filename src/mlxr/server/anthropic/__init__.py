"""The Anthropic dialect: messages, and how many tokens they have."""

from __future__ import annotations

from mlxr.server.anthropic.messages import render_error, router
from mlxr.server.routes import Dialect

DIALECT = Dialect("anthropic", ("/v1/messages",), router, render_error)

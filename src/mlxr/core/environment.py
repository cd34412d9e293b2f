"""A warning about environment variables that look like settings and are none."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable
from functools import cache

logger = logging.getLogger(__name__)
NOT_SETTINGS = frozenset({"MLXR_REAL_MODELS"})  # where the project's own tests find models to try


def warn_unknown(names: Iterable[str], known: Collection[str], prefix: str) -> None:
    """Log a warning for each of `names` that begins with `prefix` and is not `known`, once for each name."""
    for name in sorted(names):
        if name.startswith(prefix) and name not in known and name not in NOT_SETTINGS:
            _warn_once(name, tuple(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)))


@cache
def _warn_once(name: str, near: tuple[str, ...]) -> None:
    # Where nobody has set up logging, Python prints the bare text of warnings to stderr.
    logger.warning("%s is no setting and has no effect; did you mean %s?", name, " or ".join(near))

"""Settings resolve in the stated order and refuse what they cannot take; request values check themselves."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from mlxr.core import errors
from mlxr.core.errors import InvalidRequest, MlxrError, OutOfPages, SettingError
from mlxr.core.settings import SETTINGS, Settings, explain, resolve
from mlxr.core.types import SamplingParams


def test_settings_table_and_class_agree() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert fields == {setting.name: setting.default for setting in SETTINGS}


def test_caller_beats_environment_beats_default() -> None:
    environment = {"MLXR_THREADS": "3", "MLXR_PAGE_SIZE": "16", "OTHER": "x"}
    resolved = explain({"threads": 2, "device": None}, environment)
    assert resolved["threads"] == (2, "caller")
    assert resolved["page_size"] == (16, "environment")
    assert resolved["device"] == ("auto", "default")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512", 512), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1kb", 1024), ("3 g", 3 << 30)],
)
def test_sizes_in_bytes(text: str, expected: int) -> None:
    assert resolve({"arena_bytes": text}, {}).arena_bytes == expected


def test_folders_are_text_or_paths() -> None:
    assert resolve({"store_folder": Path("/some/where")}, {}).store_folder == "/some/where"
    assert resolve({}, {"MLXR_STORE_FOLDER": "pages"}).store_folder == "pages"
    assert resolve({}, {}).store_folder is None


@pytest.mark.parametrize(
    "overrides",
    [
        {"no_such": 1},
        {"threads": 0},
        {"threads": "many"},
        {"threads": True},
        {"arena_bytes": "2X"},
        {"arena_bytes": "-1"},
        {"device": "tpu"},
        {"threads": 1.5},
        {"arena_percent": 0},
        {"kv_cache": "contiguous"},
        {"store_folder": ""},
        {"store_folder": b"bytes"},
    ],
)
def test_unfit_settings_are_refused_by_name(overrides: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=next(iter(overrides))):
        resolve(overrides, {})


def test_unfit_environment_is_refused() -> None:
    with pytest.raises(SettingError, match="page_size"):
        resolve({}, {"MLXR_PAGE_SIZE": "zero"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 1000.0),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", "text"),
        ("stop", ("",)),
        ("logprobs", 1000),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {-3: 1.0}),
    ],
)
def test_unfit_sampling_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_error_tree_in_the_docstring_is_the_tree() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, MlxrError)}
    assert errors.__doc__ is not None
    assert classes == {word for word in errors.__doc__.replace("─", " ").split() if word in classes}


def test_out_of_pages_says_what_helps() -> None:
    message = str(OutOfPages(9, 4, 32))
    assert "9" in message
    assert "4" in message
    assert "arena_bytes" in message

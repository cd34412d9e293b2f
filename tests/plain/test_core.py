"""Settings resolve in the stated order and refuse what they cannot take; request values check themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_type_hints

import pytest

from mlxr.core import errors
from mlxr.core.errors import InvalidRequest, MlxrError, OutOfPages, SettingError
from mlxr.core.model_settings import ModelSettings, Setting, list_rows
from mlxr.core.settings import SETTINGS, Explained, Settings, explain, resolve
from mlxr.core.types import SamplingParams

TYPES = {
    "int": int,
    "bytes": int,
    "seconds": float,
    "flag": bool,
    "choice": str,
    "path": str,
    "text": str,
    "list": tuple[str, ...],
    "object": str,  # as its JSON
}


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.name)
def test_a_row_has_the_type_of_its_field(row: Setting) -> None:
    annotation = get_type_hints(Settings)[row.name]
    assert annotation == (TYPES[row.kind] if row.default is not None else TYPES[row.kind] | None)
    assert row.parse(row.default) == row.default == getattr(Settings(), row.name)


def test_what_concerns_a_model_stands_in_its_table() -> None:
    assert list_rows(ModelSettings) == tuple(row for row in SETTINGS if row.scope == "model")


def test_caller_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('threads = 4\npage_size = 8\nstore_bytes = "2G"\nlog_prompts = true\ncors_origins = ["http://a"]\n')
    environment = {
        "MLXR_THREADS": "3",
        "MLXR_PAGE_SIZE": "16",
        "HF_ENDPOINT": "http://hub",
        "MLXR_SETTINGS_FILE": str(file),
    }
    resolved = explain({"threads": 2, "device": None}, environment)
    assert resolved["threads"] == Explained(2, "caller")
    assert resolved["page_size"] == Explained(16, "environment", "MLXR_PAGE_SIZE")
    assert resolved["store_bytes"] == Explained(2 << 30, "file", str(file))
    assert resolved["log_prompts"].value is True
    assert resolved["cors_origins"].value == ("http://a",)
    assert resolved["device"] == Explained("auto", "default")
    assert resolved["hub_url"] == Explained("http://hub", "environment", "HF_ENDPOINT")


def test_variables_that_are_no_settings_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXR_HOTS", "0.0.0.0")
    monkeypatch.setenv("MLXR_TEMPERATUR", "0")
    monkeypatch.setenv("MLXR_THREADS", "1")
    for _ in range(2):
        assert resolve().threads == 1
    record, other = [record for record in caplog.records if "MLXR_" in record.getMessage()]
    assert other.getMessage().endswith("MLXR_TEMPERATUR is no setting and has no effect; `mlxr settings` lists all")
    assert record.getMessage().endswith("MLXR_HOTS is no setting and has no effect; did you mean MLXR_HOST?")


@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
def test_the_settings_file_of_the_user_is_found(variable: str, tmp_path: Path) -> None:
    folder = tmp_path / (".config/mlxr" if variable == "HOME" else "mlxr")
    folder.mkdir(parents=True)
    assert resolve({}, {variable: str(tmp_path)}) == Settings()
    (folder / "settings.toml").write_text("port = 1\n")
    assert resolve({}, {variable: str(tmp_path)}).port == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("threads = 'many'", "threads"),
        ("thread = 3", "thread: no such setting"),
        ("threads: 3", "is not TOML"),
        ("[threads]", "threads"),
        ("port = 1.5", "port"),
        (None, "No such file"),
    ],
)
def test_a_broken_settings_file_is_refused_by_name(text: str | None, named: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingError, match=named) as caught:
        resolve({}, {"MLXR_SETTINGS_FILE": str(file)})
    assert str(file) in str(caught.value)


def test_a_scope_selects_its_settings() -> None:
    names = [name for scope in ("model", "registry", "hub", "server") for name in Settings().select(scope)]  # type: ignore[arg-type]
    assert sorted(names) == sorted(setting.name for setting in SETTINGS)
    assert "port" in Settings().select("server")
    assert "port" not in Settings().select("model", "registry")


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(SettingError) as caught:
        resolve({"api_keys": b"hunter2"}, {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("keep_alive_s", "-1", -1.0),
        ("drain_s", "2.5", 2.5),
        ("log_prompts", "On", True),
        ("log_prompts", "0", False),
        ("allowed_hosts", " a, b,", ("a", "b")),
        ("hub_url", "http://localhost:1", "http://localhost:1"),
    ],
)
def test_kinds_of_values(name: str, text: str, value: object) -> None:
    assert getattr(resolve({}, {f"MLXR_{name.upper()}": text}), name) == value


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
        {"drain_s": "soon"},
        {"drain_s": "nan"},
        {"drain_s": -1},
        {"log_prompts": "maybe"},
        {"log_prompts": 1},
        {"allowed_hosts": 3},
        {"cors_origins": [1]},
        {"host": ""},
        {"port": 65536},
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
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 1000.0),
        ("frequency_penalty", math.nan),
        ("seed", -(2**64)),
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

"""What commands tell of experts: how many there are, and how many bytes of them a token reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]
EXPERTS = {"layers": 2, "experts": 8, "used": 2, "features": 256, "shared_features": 0}
NAMED = "8 of 256 features in 2 layers, 2 of them for each token"


def test_show_names_experts_and_what_a_token_reads(moe_gguf: Path, gguf: Path, mlxr: Run) -> None:
    shown = json.loads(mlxr("show", moe_gguf, "--json", "--tensors"))
    assert shown["experts"] == EXPERTS
    sizes = {row["name"]: row["bytes"] for row in shown["tensors"]}
    assert shown["tensor_bytes"] == sum(sizes.values())
    assert shown["expert_bytes"] == sum(nbytes for name, nbytes in sizes.items() if "_exps" in name)
    rest = shown["tensor_bytes"] - shown["expert_bytes"] - sizes["token_embd.weight"]
    assert shown["active_bytes"] == rest + shown["expert_bytes"] // 4
    text = mlxr("show", moe_gguf)
    assert NAMED in text
    assert "of weights, 36% of all" in text
    dense = json.loads(mlxr("show", gguf, "--json"))
    assert dense["experts"] is None
    assert dense["active_bytes"] < dense["tensor_bytes"]


def test_show_tells_nothing_of_the_weights_of_what_is_no_model_here(tmp_path: Path, mlxr: Run) -> None:
    from mlxr.formats import write_gguf

    path = tmp_path / "other.gguf"
    write_gguf(path, {"general.architecture": "unheard-of"}, [])
    assert json.loads(mlxr("show", path, "--json"))["active_bytes"] is None
    assert "each token" not in mlxr("show", path)


def test_validate_tells_the_share_of_what_the_machine_reads(
    moe_gguf: Path, mlxr: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path))
    sizes = ("--prompt-tokens", 16, "--generate-tokens", 4, "--repeat", 1, "--batch", 3, "--threads", 1)
    told = json.loads(mlxr("bench", moe_gguf, *sizes, "--probe", "--json"))
    assert told["experts"] == EXPERTS
    assert told["active_bytes"] < told["step_bytes"] < told["weight_bytes"]
    assert told["decode_bandwidth_bytes_per_s"] == pytest.approx(
        told["step_bytes"] * told["decode_tokens_per_s"]["median"] / 3
    )
    text = mlxr("validate", moe_gguf, "--threads", 1)
    assert NAMED in text
    assert "% of what the machine reads" in text
    assert "of them read for each token" in text
    report = json.loads(mlxr("validate", moe_gguf, "--threads", 1, "--json"))
    assert report["experts"] == EXPERTS
    assert report["active_bytes"] == told["active_bytes"]

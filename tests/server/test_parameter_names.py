"""Every row of the table of sampling parameters reaches the engine from every dialect, by each of its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_dialect_messages import chat, message, respond

from mlxr.cli.remote import describe_params
from mlxr.core.errors import InvalidRequest
from mlxr.core.sampling import BY_SPELLING, Dialect, Parameter, read_params
from mlxr.core.types import PARAMETERS, SamplingParams
from mlxr.registry.modelfile import check_options, read_parameter
from mlxr.server.openai.completions import CompletionRequest

OWN_BOUNDS = {"temperature": 0.5}  # Anthropic's ends at 1


def choose_value(row: Parameter) -> Any:
    """Choose a value that is allowed and not the default."""
    if row.kind == "texts":
        return ["a", "b"]
    if row.kind == "flag":
        return True
    if row.name in OWN_BOUNDS:
        return OWN_BOUNDS[row.name]
    return 3 if row.kind in ("int", "seed") and row.high >= 3 else row.high if row.high != row.default else row.high / 2


def complete(**fields: object) -> Any:
    return CompletionRequest.model_validate({"prompt": "Hi", **fields}).to_request("Hi")


NAMES = [
    (ask, row, name)
    for ask, dialects in (
        (chat, ("llamacpp", "openai")),
        (complete, ("llamacpp", "openai")),
        (respond, ("responses",)),
        (message, ("anthropic",)),
    )
    for row in PARAMETERS
    for name in row.list_names(*dialects)  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("ask", "row", "name"), NAMES, ids=[f"{ask.__name__}-{name}" for ask, _, name in NAMES])
def test_a_parameter_arrives_by_its_name(ask: Any, row: Parameter, name: str) -> None:
    value = choose_value(row)
    assert getattr(ask(**{name: value}).params, row.name) == getattr(
        SamplingParams(**read_params({name: value})), row.name
    )
    assert getattr(ask(**{name: value}).params, row.name) != row.default
    if name != "max_tokens" or ask is not message:
        assert ask(**{name: None}).params == ask().params


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
@pytest.mark.parametrize("dialect", ["ollama", "llamacpp", "hub"])
def test_options_and_modelfiles_take_it(row: Parameter, dialect: Dialect) -> None:
    name, value = row.list_names(dialect)[-1], choose_value(row)
    assert BY_SPELLING[name] is row
    if dialect == "ollama":
        assert read_params(check_options({name: value})) == read_params({row.name: value})
        text = value[0] if row.kind == "texts" else str(value)
        assert read_params({name: read_parameter(name, text)}) == read_params(
            {name: value[:1] if row.kind == "texts" else value}
        )
    params = SamplingParams(**read_params({name: value}))
    if row.name != "max_tokens":
        assert describe_params(params)[row.name] == value  # what `--url` sends on


def test_minus_one_is_none() -> None:
    params = SamplingParams(max_tokens=-1, top_k=-1, seed=-1)
    assert params == SamplingParams(max_tokens=None)
    assert SamplingParams(max_tokens=-2).max_tokens is None
    assert 0 < SamplingParams(top_p=0).top_p < 1e-6


def test_what_is_nothing_in_32_bits_counts_as_zero() -> None:
    assert SamplingParams(top_p=1e-308) == SamplingParams(top_p=0)
    assert SamplingParams(temperature=1e-308).temperature == 0
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-308)


def test_an_error_has_the_name_that_was_used() -> None:
    for values, name in (
        ({"repeat_penalty": 0}, "x.repeat_penalty"),
        ({"top_k": 1.5}, "x.top_k"),
        ({"stop": 3}, "x.stop"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read_params(values, prefix="x.")
        assert caught.value.field == name


def test_later_layers_win_under_any_name() -> None:
    layers = (
        {"repetition_penalty": 1.1},
        {"repeat_penalty": 1.2, "num_ctx": 5},
        {"repetition_penalty": 1.3, "top_k": None},
    )
    assert read_params(*layers) == {"repetition_penalty": 1.3}


def test_the_documentation_has_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    missing = [name for name, row in BY_SPELLING.items() if f"`{name}`" not in text and name not in row.names.values()]
    assert not missing
    served = {name for row in PARAMETERS for dialect, name in row.names.items() if dialect not in ("hub", "gguf")}
    assert not [name for name in served if f"`{name}`" not in text]

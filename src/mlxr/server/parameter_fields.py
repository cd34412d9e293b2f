"""The sampling parameters as fields of a request, made from their table.

Every dialect takes all of them: those of its own under its own names, the others as additions to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from mlxr.core.parameter import Dialect, Parameter
from mlxr.core.sampling import BY_SPELLING
from mlxr.core.types import PARAMETERS
from mlxr.server.json_models import RequestModel, Text


class ParameterFields(RequestModel):
    """A request with a field for every name of every sampling parameter; null counts as not given."""

    def list_given(self) -> dict[str, object]:
        """The values that the request sets, by the names it uses; of two names for one thing the preferred one last."""
        names = [name for name in type(self).model_fields if name in BY_SPELLING]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def read(self, name: str, default: Any) -> Any:
        """The value of one of the fields, `default` where it is absent or null."""
        value = getattr(self, name)
        return default if value is None else value


def make_fields(title: str, *dialects: Dialect) -> type[ParameterFields]:
    """A base for the requests of these dialects."""
    fields: dict[str, Any] = {
        name: (_type_of(row) | None, Field(None, description=row.help))
        for row in PARAMETERS
        for name in row.list_names(*dialects)
    }
    return create_model(title, __base__=ParameterFields, __module__=__name__, **fields)


def _type_of(row: Parameter) -> Any:
    if row.kind == "texts":
        return Text | Annotated[list[Text], Field(max_length=int(row.high))]
    if row.kind == "flag":
        return bool
    low = min([row.low, *row.stands_for])
    bounds = Field(gt=low, le=row.high) if row.open_low else Field(ge=low, le=row.high)
    return Annotated[float if row.kind == "float" else int, bounds]


if TYPE_CHECKING:

    class OpenAIParameters(ParameterFields):
        """OpenAI's names, and llama.cpp's, whose server takes them there too."""

    class ResponsesParameters(ParameterFields):
        """The names of OpenAI's Responses."""

    class AnthropicParameters(ParameterFields):
        """The sampling parameters under Anthropic's names."""

    class LlamacppParameters(ParameterFields):
        """The names of llama.cpp's own routes."""
else:
    OpenAIParameters = make_fields("OpenAIParameters", "llamacpp", "openai")
    ResponsesParameters = make_fields("ResponsesParameters", "responses")
    AnthropicParameters = make_fields("AnthropicParameters", "anthropic")
    LlamacppParameters = make_fields("LlamacppParameters", "llamacpp")

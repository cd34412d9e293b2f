"""Numbers that results of products are multiplied by (Falcon-H1): a `config.json` states them, and GGUF files have them
in the weights."""

from __future__ import annotations

from mlxr.models.fields import Fields
from mlxr.models.folders.statement import Statement, WeightFactors

_LOWEST, _HIGHEST = 1e-9, 1e6


def state_multipliers(out: Statement, fields: Fields) -> None:
    """State what weights are multiplied by, as the rows of each make numbers of a result."""

    def number(name: str) -> float:
        return fields.number(name, _LOWEST, _HIGHEST, default=1.0)

    gate, down = _read_list(fields, "mlp_multipliers", 2)
    attention, recurrent = number("attention_in_multiplier"), number("ssm_in_multiplier")
    for name, factor in (
        ("token_embd.weight", number("embedding_multiplier")),
        ("output.weight", number("lm_head_multiplier")),
        ("attn_q.weight", attention),
        ("attn_k.weight", attention * number("key_multiplier")),
        ("attn_v.weight", attention),
        ("attn_output.weight", number("attention_out_multiplier")),
        ("ffn_gate.weight", gate),
        ("ffn_down.weight", down),
        ("ssm_out.weight", number("ssm_out_multiplier")),
    ):
        if factor != 1.0:
            out.factors[name] = WeightFactors((factor,))
    inner, heads, groups, state = (
        int(str(out.values[f"ssm.{name}"])) for name in ("inner_size", "time_step_rank", "group_count", "state_size")
    )
    parts = tuple(recurrent * part for part in _read_list(fields, "ssm_multipliers", 5))
    out.factors["ssm_in.weight"] = WeightFactors(parts, (inner, inner, groups * state, groups * state, heads))


def _read_list(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    if fields.get(name) is None:
        return (1.0,) * count
    numbers = fields.numbers(name, _LOWEST, _HIGHEST)
    if len(numbers) != count:
        fields.refuse(name, f"a list of {count} numbers")
    return numbers

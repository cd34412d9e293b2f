"""The table of commands. A command is one file, with a function of the same name, and one row here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandRow:
    """`module` holds a function called `name`; `help` is its line in `mlxr --help`."""

    name: str
    module: str
    help: str


COMMANDS: tuple[CommandRow, ...] = (
    CommandRow("run", "mlxr.cli.run", "Answer one prompt."),
    CommandRow("chat", "mlxr.cli.chat", "Talk with a model."),
    CommandRow("show", "mlxr.cli.show", "Show what a model file holds."),
    CommandRow("convert", "mlxr.cli.convert", "Write a model as GGUF, quantised on request."),
    CommandRow("perplexity", "mlxr.cli.perplexity", "Measure how well a model predicts a text."),
    CommandRow("bench", "mlxr.cli.bench", "Measure prefill and decode speed."),
    CommandRow("validate", "mlxr.cli.validate", "Prove which kernels run and that their results are right."),
    CommandRow("kernels", "mlxr.cli.kernels", "Print the source of the GPU kernels."),
    CommandRow("version", "mlxr.cli.version", "Print the version."),
)

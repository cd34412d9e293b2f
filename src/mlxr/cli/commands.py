"""The table of commands. A command is one file, with a function of the same name, and one row here."""

from __future__ import annotations

import builtins
import keyword
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandRow:
    """`module` holds a function called `name`, with `_` behind it where Python has that name already.

    `help` is its line in `mlxr --help`.
    """

    name: str
    module: str
    help: str

    @property
    def function(self) -> str:
        """The name of the function that runs the command; one that Python has taken gets a `_`."""
        return f"{self.name}_" if keyword.iskeyword(self.name) or hasattr(builtins, self.name) else self.name


COMMANDS: tuple[CommandRow, ...] = (
    CommandRow("run", "mlxr.cli.run", "Answer one prompt."),
    CommandRow("chat", "mlxr.cli.chat", "Talk with a model."),
    CommandRow("embed", "mlxr.cli.embed", "Print a vector of length 1 for each text."),
    CommandRow("serve", "mlxr.cli.serve", "Answer OpenAI, Ollama and Anthropic clients over HTTP."),
    CommandRow("cluster", "mlxr.cli.cluster", "Serve a model from several engines behind one address."),
    CommandRow("list", "mlxr.cli.list", "List the models here."),
    CommandRow("search", "mlxr.cli.search", "Find a model, and whether it fits this machine."),
    CommandRow("pull", "mlxr.cli.pull", "Fetch a model from Hugging Face."),
    CommandRow("import", "mlxr.cli.import_", "Give a model on disk a name."),
    CommandRow("create", "mlxr.cli.create", "Make a model from another one with a Modelfile."),
    CommandRow("cp", "mlxr.cli.cp", "Give a model a second name."),
    CommandRow("rm", "mlxr.cli.rm", "Remove models."),
    CommandRow("adapters", "mlxr.cli.adapters", "List the adapters (LoRA) here, add or remove one."),
    CommandRow("ps", "mlxr.cli.ps", "Show the models that a server has loaded."),
    CommandRow("stop", "mlxr.cli.stop", "Unload a model from a server."),
    CommandRow("show", "mlxr.cli.show", "Show what a model holds."),
    CommandRow("convert", "mlxr.cli.convert", "Write a model as a GGUF file of a given type."),
    CommandRow("merge", "mlxr.cli.merge", "Write a model with an adapter added to its weights."),
    CommandRow("perplexity", "mlxr.cli.perplexity", "Measure how well a model predicts a text."),
    CommandRow("bench", "mlxr.cli.bench", "Measure prefill and decode speed."),
    CommandRow("profile", "mlxr.cli.profile", "Show where the time of a model's steps goes, kernel by kernel."),
    CommandRow("validate", "mlxr.cli.validate", "Prove which kernels run and that their results are right."),
    CommandRow("kernels", "mlxr.cli.kernels", "Print the source of the GPU kernels."),
    CommandRow("doctor", "mlxr.cli.doctor", "Look whether this machine and installation are well."),
    CommandRow("settings", "mlxr.cli.settings", "Show every setting and where its value came from."),
    CommandRow("help", "mlxr.cli.help", "Explain a command."),
    CommandRow("version", "mlxr.cli.version", "Print the version of mlxr."),
)

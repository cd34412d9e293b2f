"""`mlxr show`: a model's contents and settings, without loading it; also texts about experts and states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from mlxr.cli.flags import Json, RegistrySettings, complete_models
from mlxr.cli.models import describe_model
from mlxr.cli.terminal import format_bytes, format_count, make_printable, print_fields, print_json, print_table
from mlxr.core.errors import InvalidRequest, MlxrError
from mlxr.core.settings import Settings
from mlxr.core.stats import MachineLimits
from mlxr.formats import GGUFFile, SafetensorsFolder, TensorSource, open_gguf, open_safetensors
from mlxr.loading import (
    ExpertsSummary,
    Footprint,
    LoadedModel,
    find_model,
    read_footprint,
    read_sampling,
    read_template,
    read_unknown_keys,
)
from mlxr.registry import ModelRecord, Registry
from mlxr.registry.modelfile import list_parameters, write_modelfile
from mlxr.service.catalogue import describe_template, open_registry
from mlxr.service.opening import find_record
from mlxr.service.stats import StateUse, read_state_use


def describe_experts(experts: ExpertsSummary | None) -> dict[str, int] | None:
    """Return the numbers of the experts as JSON fields, None for a model without."""
    return None if experts is None else asdict(experts)


def format_experts(experts: ExpertsSummary) -> str:
    """Return the number of experts, the number that a token uses, and the part that all tokens share, as text."""
    shared = f", and a block of {format_count(experts.shared_features)} features of all tokens"
    return (
        f"{experts.experts} of {format_count(experts.features)} features in {experts.layers} layers, {experts.used} "
        f"of them for each token{shared if experts.shared_features else ''}"
    )


def list_experts(loaded: LoadedModel) -> list[tuple[str, str]]:
    """Return the row of a table with the experts of a model, if it has some, and their bytes in memory."""
    if loaded.experts is None:
        return []
    held, total = loaded.model.expert_memory
    resident = f"; {format_bytes(held)} of {format_bytes(total)} resident" if held < total else ""
    return [("experts", format_experts(loaded.experts) + resident)]


def describe_routing(loaded: LoadedModel) -> dict[str, object]:
    """Return the experts' bytes in memory and altogether, and the tokens sent to them, as JSON fields."""
    held, total = loaded.model.expert_memory
    routing = loaded.model.read_routing()
    return {
        "expert_bytes": total,
        "resident_expert_bytes": held,
        "routing": None if routing is None else asdict(routing),
    }


def format_reading(loaded: LoadedModel, bytes_per_s: float, tokens: int, limits: MachineLimits | None) -> str:
    """Return as text the size of the weights, the part that a step of `tokens` tokens reads, its speed, and its share
    of the machine's.
    """
    read_bytes = loaded.model.work.count_weight_bytes(tokens)
    about, of_machine = "about " if loaded.experts is not None and tokens > 1 else "", ""
    if limits is not None:
        of_machine = f", {bytes_per_s / limits.read_bytes_per_s:.0%} of what the machine reads"
    step = "token" if tokens == 1 else f"step of {tokens} tokens"
    return (
        f"{format_bytes(loaded.weight_bytes)}; {about}{format_bytes(read_bytes)} of them read for each {step}, at "
        f"{format_bytes(bytes_per_s)}/s{of_machine}"
    )


def describe_states(use: StateUse | None) -> dict[str, int] | None:
    """Return the bytes of the states as JSON fields, None for a model without recurrent layers."""
    return None if use is None else {**asdict(use), "cached_bytes": use.cached_bytes}


def list_states(use: StateUse | None) -> list[tuple[str, str]]:
    """Return the rows of a table with the bytes of a slot, of a snapshot, and of a conversation."""
    if use is None:
        return []
    snapshots = f"{use.snapshots} {'snapshot' if use.snapshots == 1 else 'snapshots'}"
    return [
        ("state", f"{format_bytes(use.slot_bytes)} each: {use.live_slots} slots of one that runs, and every snapshot"),
        (
            "conversation",
            f"of {format_count(use.tokens)} tokens: {format_bytes(use.page_bytes)} of pages and room for {snapshots} "
            f"of {format_bytes(use.slot_bytes)}, {format_bytes(use.cached_bytes)} in all",
        ),
    ]


MAX_ITEMS = 8
MAX_CHARACTERS = 100

File = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A .gguf file, a Hugging Face folder, or a name.", autocompletion=complete_models
    ),
]
ShowTensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]
ShowModelfile = Annotated[bool, typer.Option("--modelfile", help="Print the Modelfile that makes this model.")]
ShowTemplate = Annotated[bool, typer.Option("--template", help="Print the chat template.")]
ShowSystem = Annotated[bool, typer.Option("--system", help="Print the system message.")]
ShowParameters = Annotated[bool, typer.Option("--parameters", help="Print the parameters that were set on it.")]
ShowLicense = Annotated[bool, typer.Option("--license", help="Print the licence.")]


def show(
    file: File,
    settings: RegistrySettings,
    tensors: ShowTensors = False,
    json: Json = False,
    modelfile: ShowModelfile = False,
    template: ShowTemplate = False,
    system: ShowSystem = False,
    parameters: ShowParameters = False,
    license_: ShowLicense = False,
) -> None:
    """Show what a model holds: its metadata, and the types and sizes of its tensors."""
    texts = {
        "modelfile": modelfile,
        "template": template,
        "system": system,
        "parameters": parameters,
        "license": license_,
    }
    wanted = [name for name, is_wanted in texts.items() if is_wanted]
    if wanted:
        if len(wanted) > 1 or tensors or json:
            raise InvalidRequest(f"--{wanted[0]}", "is shown alone, as it is a text for other programs")
        print(read_text(open_registry(settings), file, wanted[0]))
        return
    record = find_record(file, settings)
    path = find_model(file) if record is None else record.path
    opened = open_safetensors(path) if path.is_dir() else open_gguf(path)
    with opened:
        if json:
            fields: dict[str, object] = {} if record is None else {"record": describe_record(record)}
            recommended = {"sampling": read_sampling(path), "chat": describe_template(read_template(path))}
            read = describe_footprint(find_footprint(path)) | {"states": describe_states(find_states(path, settings))}
            unknown = {"unknown_keys": find_unknown_keys(path)}
            print_json(fields | describe(opened, with_tensors=tensors) | read | recommended | unknown)
            return
        if record is not None:
            print_record(record)
        print_chat(path)
        rows = [*list_footprint(find_footprint(path)), *list_states(find_states(path, settings))]
        name = file if record is None else record.short_name
        if adapters := [one.name for one in open_registry(settings).adapters.list() if one.base == name]:
            rows.append(("adapters", ", ".join(adapters)))
        if unknown_keys := find_unknown_keys(path):
            rows.append(("no effect", make_printable(f"keys that mlxr does not know: {', '.join(unknown_keys)}")))
        print_description(opened, rows, with_tensors=tensors)


def read_text(registry: Registry, name: str, wanted: str) -> str:
    """Return the `modelfile`, `template`, `system`, `parameters` or `license` of a model; "" if it has none."""
    record = registry.find(name)
    if wanted == "modelfile":
        adapter = registry.find_adapter_of(record)
        return write_modelfile(record, None if adapter is None else adapter.path).removesuffix("\n")
    texts = {
        "template": record.template or record.own_template,
        "system": record.system or "",
        "parameters": "\n".join(list_parameters(record.parameters)),
        "license": record.license,
    }
    return texts[wanted]


def find_footprint(path: Path) -> Footprint | None:
    """Return the sizes of a model and of its parts that a token reads; None for files that cannot be loaded."""
    try:
        return read_footprint(path)
    except MlxrError:
        return None


def find_unknown_keys(path: Path) -> list[str]:
    """Return the keys of a file that have no effect here; none for files that cannot be loaded."""
    try:
        return read_unknown_keys(path)
    except MlxrError:
        return []


def find_states(path: Path, settings: Settings) -> StateUse | None:
    """Return the bytes of recurrent states; None without recurrent layers, and for files that cannot be loaded."""
    try:
        return read_state_use(path, settings)
    except MlxrError:
        return None


def describe_footprint(footprint: Footprint | None) -> dict[str, object]:
    """Return the bytes of all tensors and of those that a token reads, and the experts, as JSON fields."""
    if footprint is None:
        names = "tensor_bytes active_bytes expert_bytes experts draft_bytes bits_per_weight rotated_tensors"
        return dict.fromkeys(names.split())
    return {
        "tensor_bytes": footprint.total_bytes,
        "active_bytes": footprint.active_bytes,
        "expert_bytes": footprint.expert_bytes,
        "experts": describe_experts(footprint.experts),
        "draft_bytes": footprint.draft_bytes,
        "bits_per_weight": round(footprint.bits_per_weight, 3),
        "rotated_tensors": footprint.rotated,
    }


def list_footprint(footprint: Footprint | None) -> list[tuple[str, str]]:
    """Return the same as text for people."""
    if footprint is None:
        return []
    share = footprint.active_bytes / footprint.total_bytes
    read = f"{format_bytes(footprint.active_bytes)} of weights, {share:.0%} of all"
    rows = [("each weight", f"{footprint.bits_per_weight:.2f} bits on average"), ("each token", f"reads {read}")]
    if footprint.experts is not None:
        rows.insert(0, ("experts", f"{format_experts(footprint.experts)}: {format_bytes(footprint.expert_bytes)}"))
    if footprint.rotated:
        blocks = f"blocks of {format_count(footprint.rotated_block)} (Hadamard)"
        rows.append(("rotated", f"{format_count(footprint.rotated)} tensors in {blocks}, and what they multiply"))
    if footprint.draft_bytes:
        rows.append(("drafts", f"by a layer of the file (mtp): {format_bytes(footprint.draft_bytes)}"))
    return rows


def describe_record(record: ModelRecord) -> dict[str, object]:
    """Return the catalogue's facts about a model and the settings of the model, as JSON fields."""
    return describe_model(record) | {
        "template": record.template,
        "system": record.system,
        "options": dict(record.parameters),
        "messages": [dict(message) for message in record.messages],
    }


def print_record(record: ModelRecord) -> None:
    """Print the catalogue's facts about a model as text for people."""
    rows = [("name", record.short_name), ("id", record.digest), ("from", record.from_name or "")]
    rows += [("system", make_printable(record.system or "")), ("template", make_printable(record.template or ""))]
    rows += [("options", ", ".join(list_parameters(record.parameters)))]
    rows += [("can do", ", ".join(sorted(record.capabilities)))]
    rows += [("tower", "" if record.tower is None else make_printable(record.tower.name))]
    rows += [("adapter", "" if record.adapter is None else record.adapter.digest)]
    rows += [("messages", str(len(record.messages)) if record.messages else "")]
    print_fields([(name, value) for name, value in rows if value])
    print()


def print_chat(path: Path) -> None:
    """Print the features of a model's chat template, and the sampling parameters that its files recommend."""
    rows = [
        *describe_template(read_template(path)).items(),
        ("sampling", ", ".join(list_parameters(read_sampling(path)))),
    ]
    rows = [(name, make_printable(value)) for name, value in rows if value]
    if rows:
        print_fields(rows)
        print()


def describe(opened: GGUFFile | SafetensorsFolder, *, with_tensors: bool) -> dict[str, object]:
    """Return everything as JSON fields; long arrays are shortened to their length and first items."""
    fields: dict[str, object] = {
        "format": name_format(opened),
        "paths": [str(path) for path in opened.paths],
        "size_bytes": opened.size_bytes,
        "parameters": sum(math.prod(tensor.shape) for tensor in opened.tensors.values()),
        "metadata": {key: shorten(value) for key, value in read_metadata(opened).items()},
        "types": sum_by_type(opened.tensors),
    }
    if with_tensors:
        fields["tensors"] = [
            {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape), "bytes": tensor.nbytes}
            for tensor in opened.tensors.values()
        ]
    return fields


def print_description(
    opened: GGUFFile | SafetensorsFolder, rows: Sequence[tuple[str, str]], *, with_tensors: bool
) -> None:
    """Print the description of a file as text for people, with `rows` in its head."""
    parameters = sum(math.prod(tensor.shape) for tensor in opened.tensors.values())
    head = [
        ("format", name_format(opened)),
        ("files", ", ".join(str(path) for path in opened.paths)),
        ("size", format_bytes(opened.size_bytes)),
        ("parameters", format_count(parameters)),
        *rows,
    ]
    print_fields(head)
    print()
    print_fields(
        [(make_printable(key), format_value(value)) for key, value in read_metadata(opened).items()], "metadata"
    )
    print()
    types = [
        (name, format_count(row["tensors"]), format_count(row["parameters"]), format_bytes(row["bytes"]))
        for name, row in sum_by_type(opened.tensors).items()
    ]
    print_table(("type", " tensors", " parameters", " size"), types, "tensors")
    if with_tensors:
        print()
        listed = [_list_tensor(tensor) for tensor in opened.tensors.values()]
        print_table(("name", "type", "shape", " size"), listed)


def _list_tensor(tensor: TensorSource) -> tuple[str, str, str, str]:
    shape = " × ".join(map(str, tensor.shape))
    return make_printable(tensor.name), tensor.type_name, shape, format_bytes(tensor.nbytes)


def name_format(opened: GGUFFile | SafetensorsFolder) -> str:
    """Return the container's name and version."""
    return f"GGUF {opened.version}" if isinstance(opened, GGUFFile) else "safetensors"


def read_metadata(opened: GGUFFile | SafetensorsFolder) -> Mapping[str, object]:
    """Return the metadata of a GGUF file, or config.json of a folder."""
    return opened.metadata if isinstance(opened, GGUFFile) else opened.config


def sum_by_type(tensors: Mapping[str, TensorSource]) -> dict[str, dict[str, int]]:
    """Return for each type its tensors, parameters and bytes, the largest first."""
    sums: dict[str, dict[str, int]] = {}
    for tensor in tensors.values():
        row = sums.setdefault(tensor.type_name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]["bytes"]))


def shorten(value: object) -> object:
    """Return a value fit for JSON; an array longer than MAX_ITEMS becomes its length and first items."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | np.ndarray):
        items = [shorten(item) for item in value[:MAX_ITEMS]]
        return items if len(value) <= MAX_ITEMS else {"length": len(value), "first": items}
    if isinstance(value, Mapping):
        return {str(key): shorten(item) for key, item in value.items()}
    return value


def format_value(value: object) -> str:
    """Return one line for a value of any length, with control characters spelt out, as files are untrusted."""
    if isinstance(value, list | np.ndarray):
        items = ", ".join(repr(shorten(item)) for item in value[:MAX_ITEMS])
        text = f"{format_count(len(value))} items: {items}{', …' if len(value) > MAX_ITEMS else ''}"
    else:
        text = str(shorten(value))
    cut = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "…"
    return make_printable(cut)

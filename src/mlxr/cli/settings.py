"""`mlxr settings`: every setting, its value, and where that came from."""

from __future__ import annotations

from mlxr.cli.flags import Json
from mlxr.cli.terminal import print_json, print_table
from mlxr.core.model_settings import Setting, Value
from mlxr.core.settings import SETTINGS, Explained, explain, find_settings_file


def settings(json: Json = False) -> None:
    """Show every setting and where its value came from: MLXR_* variables, the settings file, or the default.
    Commands use these values unless flags say otherwise.
    """
    found = explain()
    if json:
        print_json({setting.name: describe(setting, found[setting.name]) for setting in SETTINGS})
        return
    rows = []
    for setting in SETTINGS:
        row = found[setting.name]
        rows.append((setting.name, show(setting, row.value), f"{row.source} {row.place}".strip(), setting.help))
    print_table(("setting", "value", "from", "meaning"), rows)
    file = find_settings_file()
    print(f"\nsettings file: {file or 'none'}")


def describe(setting: Setting, row: Explained) -> dict[str, object]:
    """One setting as JSON fields; secrets are counted, not shown."""
    value = row.value
    shown = show(setting, value) if setting.secret else list(value) if isinstance(value, tuple) else value
    return {"value": shown, "source": row.source, "place": row.place or None, "scope": setting.scope}


def show(setting: Setting, value: Value) -> str:
    """The value as text for people."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return f"({len(value)} set)" if setting.secret and value else ",".join(value) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

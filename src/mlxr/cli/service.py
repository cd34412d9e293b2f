"""`mlxr service`: `mlxr serve` as a service of the user who asks, run by systemd, or on macOS by launchd.

Both run the Python that runs this command, so that a service uses the installation that made it. Nothing needs the
rights of an administrator. Formats: `man systemd.service`, `man launchd.plist`.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import platformdirs
import typer

from mlxr.cli.terminal import print_note
from mlxr.core.errors import MlxrError, NotFound
from mlxr.core.settings import explain

NAME = "mlxr"
STOP_S = 45  # the system waits this long for the end, longer than the setting drain_s


class Action(StrEnum):
    """The verbs of `mlxr service`."""

    INSTALL = "install"
    START = "start"
    STOP = "stop"
    STATUS = "status"
    UNINSTALL = "uninstall"


What = Annotated[
    Action,
    typer.Argument(
        metavar="ACTION",
        help="install: write the service's file and start it, now and at every login. start, stop, status: of the one "
        "that is installed. uninstall: stop it and delete its file; models and settings stay.",
    ),
]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[-- MODEL FLAGS]", help="Of install: what `mlxr serve` shall be given.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]


def service(action: What, words: Words = None, dry_run: DryRun = False) -> None:
    """Run the server as a service of yours, also after a restart.

    Uses systemd, or launchd on macOS, as your own user. Everything that is done is
    printed. Settings come from the settings file (`mlxr settings`) and the flags.
    """
    is_mac = sys.platform == "darwin"
    folder = Path.home() / "Library" / "LaunchAgents" if is_mac else platformdirs.user_config_path("systemd") / "user"
    path = folder / (f"{NAME}.plist" if is_mac else f"{NAME}.service")
    if not dry_run and shutil.which("launchctl" if is_mac else "systemctl") is None:
        raise NotFound("systemctl is not on this machine; docs/service of the sources has files for other systems")
    if action is Action.INSTALL:
        _check_words(words or [])
        _write(path, (write_plist if is_mac else write_unit)(words or []), dry_run=dry_run)
        _warn_of_variables()
    elif words:
        raise MlxrError(f"words behind `--` go with install alone, got {' '.join(words)[:80]}")
    elif not (path.is_file() or dry_run):
        raise NotFound(f"{path}: no service is installed; `mlxr service install` does it")
    for command in (list_launchd if is_mac else list_systemd)(action, path):
        _run(command, dry_run=dry_run, is_status=action is Action.STATUS)
    if action is Action.UNINSTALL:
        _say(dry_run, "delete", path)
        if not dry_run:
            path.unlink()
    if action is Action.INSTALL and not is_mac:
        print_note("it runs while you are logged in; `loginctl enable-linger` starts it with the machine")


def write_unit(words: Sequence[str]) -> str:
    """Return the unit for systemd that runs `mlxr serve` with these words."""
    line = " ".join(map(_quote, _list_command(words)))
    return f"""# Written by `mlxr service install`.
[Unit]
Description=mlxr, local language models over HTTP
After=network-online.target

[Service]
Type=exec
ExecStart={line}
Restart=on-failure
# SIGTERM lets answers go on for the setting drain_s; systemd must wait longer than that.
TimeoutStopSec={STOP_S}
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


def write_plist(words: Sequence[str]) -> str:
    """Return the agent for launchd that runs `mlxr serve` with these words."""
    agent = {
        "Label": NAME,
        "ProgramArguments": _list_command(words),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ExitTimeOut": STOP_S,
        "SoftResourceLimits": {"NumberOfFiles": 8192},
        "StandardErrorPath": str(Path.home() / "Library" / "Logs" / f"{NAME}.log"),
    }
    return plistlib.dumps(agent).decode()


def list_systemd(action: Action, _: Path) -> list[list[str]]:
    """Return the command lines of an action with systemd."""
    own = ["systemctl", "--user"]
    lines = {
        Action.INSTALL: [[*own, "daemon-reload"], [*own, "enable", NAME], [*own, "restart", NAME]],
        Action.STATUS: [[*own, "--no-pager", "status", NAME]],
        Action.UNINSTALL: [[*own, "disable", "--now", NAME]],
    }
    return lines.get(action, [[*own, str(action), NAME]])


def list_launchd(action: Action, path: Path) -> list[list[str]]:
    """Return the command lines of an action with launchd."""
    domain = f"gui/{os.getuid()}"
    if action in (Action.INSTALL, Action.START):
        return [["launchctl", "bootstrap", domain, str(path)]]
    return [["launchctl", "print" if action is Action.STATUS else "bootout", f"{domain}/{NAME}"]]


def _list_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "mlxr", "serve", *words]


def _quote(word: str) -> str:
    """Quote a word of ExecStart: systemd expands `%` and `$`, and reads quotes and backslashes as in C."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if shlex.quote(word) == word else f'"{escaped}"'


def _check_words(words: Sequence[str]) -> None:
    """Refuse flags that `mlxr serve` does not know, so that the error is not hidden in a log."""
    from mlxr.cli.main import build_app

    if any(not word.isprintable() for word in words):
        raise MlxrError("a service's flags must be printable, on one line")
    group = typer.main.get_group(build_app(["serve"]))
    group.commands["serve"].make_context("mlxr serve", list(words))


def _warn_of_variables() -> None:
    """Warn of settings in variables of this shell, since the service does not see them."""
    for name, row in explain().items():
        if row.source == "environment":
            print_note(f"the service does not see {row.place}: put {name} into the settings file, or give its flag")


def _write(path: Path, text: str, *, dry_run: bool) -> None:
    _say(dry_run, "write", path)
    if dry_run:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text() != text:
        shutil.copy2(path, path.with_name(f"{path.name}.old"))
        print(f"what it held is in {path.name}.old")
    path.write_text(text)


def _run(command: Sequence[str], *, dry_run: bool, is_status: bool) -> None:
    """Run a command of the system; raises MlxrError with its message if it fails."""
    _say(dry_run, "run", shlex.join(command))
    if dry_run:
        return
    sys.stdout.flush()
    out = None if is_status else subprocess.PIPE  # a status goes to the user
    done = subprocess.run(command, check=False, text=True, stderr=subprocess.PIPE, stdout=out)
    if done.returncode and is_status and not done.stderr:
        raise typer.Exit(1)
    if done.returncode:
        told = (done.stderr or done.stdout or f"exit code {done.returncode}").strip()
        remedy = "; a login by ssh or a desktop has such a session" if "bus" in told else ""
        raise MlxrError(f"`{shlex.join(command)}`: {told}{remedy}")


def _say(dry_run: bool, verb: str, what: object) -> None:
    print(f"{'would ' if dry_run else ''}{verb} {what}")

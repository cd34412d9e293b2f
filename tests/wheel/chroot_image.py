"""Builds deploy/Dockerfile's image without Docker: each stage is a folder, and its steps run in a chroot, as root.

`debootstrap --variant=minbase trixie BASE` makes the folder of the base image. `python tests/wheel/chroot_image.py BASE
OUT [TARGET]` builds the image in OUT, asks its demo model a question as the image's user, starts the server, and waits
until the health check passes. Certificates and the registry are those of this machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED_ON = ("PIP_CERT", "PIP_DEFAULT_TIMEOUT", "SSL_CERT_FILE", "CMAKE_BUILD_PARALLEL_LEVEL")
HOST_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
LIMIT_S = 120


@dataclass
class Stage:
    """A stage: its folder, and the settings from its instructions."""

    folder: Path
    values: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})
    workdir: str = "/"
    user: str = "0"
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def start(self, words: list[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a program in the stage, as its user and in its folder, with the network of this machine."""
        for file in filter(Path.is_file, map(Path, HOST_FILES)):  # packages may have overwritten them
            (self.folder / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.folder / file.relative_to("/"))
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        line = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(words)}"
        chroot = [
            shutil.which("chroot") or "chroot",
            f"--userspec={self.user}:{self.user}",
            str(self.folder),
            "/bin/sh",
            "-c",
            line,
        ]
        return subprocess.Popen(chroot, env=passed | self.values, **options)  # type: ignore[call-overload,no-any-return]

    def run(self, words: list[str]) -> int:
        """Run a program to its end and return its exit status."""
        return self.start(words).wait()


def read_instructions(text: str) -> list[tuple[str, str]]:
    """Read the instructions of a Dockerfile with their arguments, without comments and with lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines()]


def build(base: Path, out: Path, target: str) -> Stage:
    """Build all stages that `target` needs and return it; "" is the last one."""
    instructions = read_instructions((ROOT / "deploy" / "Dockerfile").read_text())
    heads = [(place, rest.split()) for place, (name, rest) in enumerate(instructions) if name == "FROM"]
    names = [words[2] if len(words) > 2 else "" for _, words in heads]
    stages: dict[str, Stage] = {}

    def make(name: str) -> Stage:
        if name in stages:
            return stages[name]
        at = names.index(name)
        end = heads[at + 1][0] if at + 1 < len(heads) else len(instructions)
        own = instructions[heads[at][0] + 1 : end]
        parent = heads[at][1][0]
        folder = out / (name or "final")
        before = make(parent) if parent in names else Stage(base)
        subprocess.run(["cp", "-a", "--reflink=auto", str(before.folder), str(folder)], check=True)
        stage = stages[name] = replace(before, folder=folder, values=dict(before.values))
        for word, rest in own:
            print(f"[{name or 'final'}] {word} {rest[:100]}", flush=True)
            follow(stage, word, rest, make)
        return stage

    return make(target)


def follow(stage: Stage, word: str, rest: str, make: object) -> None:
    """Carry out one instruction; exits where a step fails or an instruction is not known."""
    inside = stage.folder / stage.workdir.lstrip("/")
    match word:
        case "RUN":
            if status := stage.run(["/bin/sh", "-c", rest]):
                sys.exit(f"RUN ended with {status}: {rest}")
        case "COPY" if rest.startswith("--from="):
            origin, source, goal = rest.removeprefix("--from=").split()
            before = make(origin)  # type: ignore[operator]
            subprocess.run(["cp", "-a", f"{before.folder}{source}", f"{stage.folder}{goal}"], check=True)
        case "COPY":
            *sources, goal = rest.split()
            for source in sources:
                ends = inside / goal / source if goal == "./" else inside / goal
                ignore = shutil.ignore_patterns("__pycache__", "*.so")
                given = ROOT / source
                shutil.copytree(given, ends, ignore=ignore) if given.is_dir() else shutil.copy(given, ends)
        case "ENV":
            stage.values |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        case "ARG":
            key, _, value = rest.partition("=")
            stage.values[key] = os.environ.get(key, value)
        case "WORKDIR":
            stage.workdir = rest
            (stage.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "USER":
            stage.user = rest
        case "HEALTHCHECK":
            stage.health = json.loads(rest[rest.index("[") :])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case "CMD":
            stage.command = json.loads(rest)
        case "VOLUME" | "EXPOSE":
            pass
        case _:
            sys.exit(f"{word} is an instruction that this program does not know")


def try_image(stage: Stage) -> None:
    """Answer a question, serve until the health check passes, and end in order."""
    stage.values["HOME"] = "/home/mlxr"
    stage.values["PYTHONDONTWRITEBYTECODE"] = "1"
    assert stage.run([*stage.entrypoint, "run", "demo", "What does os.path.join do?", "--temperature", "0"]) == 0
    server = stage.start([*stage.entrypoint, *stage.command, "--port", "11434"])
    began = time.monotonic()
    try:
        while status := stage.run(stage.health):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() - began < LIMIT_S, f"the health check still says {status}"
            time.sleep(1)
        print(f"healthy after {time.monotonic() - began:.0f} s")
    finally:
        server.terminate()
    assert server.wait(60) == 0


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.mkdir(parents=True)
    try_image(build(Path(sys.argv[1]), out, sys.argv[3] if len(sys.argv) > 3 else ""))

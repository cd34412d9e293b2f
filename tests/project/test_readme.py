"""The README's file tree and the Makefile's help match the files and targets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from typer.main import get_command

from mlxr.cli.main import COMMANDS, build_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def tree_entries() -> dict[str, str]:
    """Path → description of every line of the tree in the README's code block that opens with `mlxr/`."""
    block = re.search(r"```\nmlxr/\n(.*?)```", README, re.DOTALL)
    assert block, "the README has no file tree"
    entries: dict[str, str] = {}
    parents: list[str] = []
    for line in block.group(1).splitlines():
        match = re.match(r"^(?P<indent>[│ ]*)(?:├─|└─) (?P<name>\S+)\s+(?P<text>.+)$", line)
        assert match, f"not a line of a tree: {line!r}"
        depth = len(match["indent"]) // 3
        parents = [*parents[:depth], match["name"].rstrip("/")]
        entries["/".join(parents)] = match["text"]
    return entries


def tracked(folder: str) -> set[str]:
    """Names directly in `folder` (or the root, ""), as git sees them; falls back to the disk outside a checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder or "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    prefix = f"{folder}/" if folder else ""
    return {path.removeprefix(prefix).split("/")[0] for path in listing if (ROOT / path).exists()}


def test_the_tree_is_true() -> None:
    entries = tree_entries()
    for path in entries:
        assert (ROOT / path).exists(), f"the README names {path}, which is not there"
    for folder in ("", "src/mlxr"):
        shown = {path.removeprefix(f"{folder}/") for path in entries if str(Path(path).parent) == (folder or ".")}
        hidden = {name for name in tracked(folder) if name.startswith(".") or name in {"py.typed", "src"}} | {"src"}
        assert tracked(folder) - hidden <= shown, f"the README's tree leaves out {tracked(folder) - hidden - shown}"


def test_the_make_targets_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "test"} <= named <= targets


def test_nothing_is_to_be_installed_from_an_index_that_does_not_have_it() -> None:
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    assert not [path for path in places if re.search(r"pip install '?mlxr\b", path.read_text())]


def test_commands_and_flags_in_all_pages_exist() -> None:
    """The first pages and the guides are also run; this covers the others, which may use a large model."""
    flags: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("Dockerfile")]:
        text = page.read_text()
        lines = [
            line for body in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL) for line in body.splitlines()
        ]
        for line in [*lines, *re.findall(r"`(mlxr [^`]+)`", text)]:
            for words in re.findall(r"(?:^|[|&(] ?)mlxr ([^#|&\n]*)", line):
                name, *rest = words.split() or [""]
                if not re.fullmatch("[a-z]+", name):
                    continue
                assert name in {row.name for row in COMMANDS}, f"{page}: {line}"
                if name not in flags:
                    command = get_command(build_app([name, "--help-all"])).commands[name]  # type: ignore[attr-defined]
                    flags[name] = {flag for option in command.params for flag in option.opts} | {"--help", "--help-all"}
                ours = rest[: rest.index("--")] if "--" in rest else rest
                given = {word.partition("=")[0] for word in ours if re.match("--[a-z]", word)}
                assert given <= flags[name], f"{page}: {line}"
    assert len(flags) > 20


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed, f"mkdocs.yml does not list {pages - listed}"


def test_the_links_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"

"""Every command of the installed `mlxr` does its work once; a pull survives a hub that breaks off, and a kill."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from fake_hub import Behaviour, FakeHub
from gguf import GGUFReader
from safetensors.numpy import save_file

from conftest import ROOT, Installed

ASSETS = ROOT / "src" / "mlxr" / "assets"
DRAFT = (ASSETS / "demo-draft.gguf").read_bytes()
REPO, FILE = "someone/Draft-GGUF", "Draft.Q8_0.gguf"
NAME = f"hf.co/{REPO}"
QUESTION = "What does os.path.join do?"
ANSWER = "`os.path.join`: Join two or more pathname components, inserting '/' as needed."


@contextmanager
def serving(installed: Installed, *arguments: object) -> Iterator[str]:
    """`mlxr serve` of the environment; its address."""
    process = installed.start("mlxr", "serve", "--port", 0, *arguments)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready"):
                break
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))
        assert found, lines
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def write_adapter(folder: Path) -> None:
    """An adapter of one weight of the draft model, as PEFT writes it."""
    (output,) = (
        one for one in GGUFReader(ASSETS / "demo-draft.gguf").tensors if one.name == "blk.0.attn_output.weight"
    )
    columns, rows = map(int, output.shape)
    module, folder_config = "base_model.model.model.layers.0.self_attn.o_proj", {"peft_type": "LORA", "r": 2}
    folder.mkdir()
    sides = {"A": np.ones((2, columns), np.float32), "B": np.full((rows, 2), 0.01, np.float32)}
    save_file(
        {f"{module}.lora_{side}.weight": values for side, values in sides.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(folder_config | {"lora_alpha": 4}))


def test_a_browser_gets_the_page(installed: Installed) -> None:
    with serving(installed) as address:
        page = httpx.get(address, headers={"accept": "text/html"})
        assert page.headers["content-type"].startswith("text/html")
        files = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
        assert len(files) >= 3
        for name in files:
            assert httpx.get(f"{address}/{name}").status_code == 200, name
        assert httpx.get(address).text == "Ollama is running"


def test_every_command(installed: Installed, hub: FakeHub) -> None:
    run, seen = installed.run, set()

    def mlxr(command: str, *arguments: object, text: str | None = None) -> str:
        seen.add(command)
        return run("mlxr", command, *arguments, text=text)

    hub.add(REPO, {FILE: DRAFT})
    (installed.folder / "own.gguf").write_bytes(DRAFT)
    (installed.folder / "Modelfile").write_text("FROM own\nSYSTEM Be brief.\n")
    (installed.folder / "text.txt").write_text((ROOT / "tests/real/held_out.txt").read_text()[:2000])

    assert "version" in mlxr("version") or re.search(r"\d+\.\d+", mlxr("version"))
    assert "run" in mlxr("help")
    assert ANSWER in mlxr("run", "demo", QUESTION, "--temperature", 0)
    assert ANSWER in mlxr("chat", "demo", "--temperature", 0, text=QUESTION + "\n")
    assert len(json.loads(mlxr("embed", "demo", "a text").partition("\n")[0])) > 8
    assert "pulled" in mlxr("pull", NAME, "--hub-url", hub.url)
    mlxr("import", "own.gguf", "own")
    mlxr("create", "mine")
    mlxr("cp", "mine", "other")
    listed = mlxr("list")
    assert all(name in listed for name in ("demo", NAME, "own", "mine", "other"))
    mlxr("rm", "other")
    assert "other" not in mlxr("list")
    assert "llama" in mlxr("show", "mine")
    mlxr("convert", "own.gguf", "small.gguf", "--type", "q4_0")
    assert (installed.folder / "small.gguf").stat().st_size < len(DRAFT)
    write_adapter(installed.folder / "adapter")
    mlxr("merge", "own.gguf", "adapter", "merged.gguf")
    assert (installed.folder / "merged.gguf").stat().st_size == len(DRAFT)
    assert "added" in mlxr("adapters", "add", "brief", "adapter", "--model", "own")
    assert "brief" in mlxr("adapters", "list")
    assert "perplexity" in mlxr("perplexity", "small.gguf", "text.txt")
    mlxr("imatrix", "own.gguf", "text.txt", "matter.gguf", "--context", 64)
    assert (installed.folder / "matter.gguf").exists()
    assert mlxr("bench", "demo", "--prompt-tokens", 16, "--generate-tokens", 4, "--repeat", 1)
    assert "attend" in mlxr("profile", "demo", "--prompt-tokens", 16, "--steps", 2)
    assert "passed" in mlxr("validate")
    assert "metal" in mlxr("kernels").lower()
    assert "arena_bytes" in mlxr("settings")
    assert "coder" in mlxr("search", "coder", "--hub-url", hub.url)
    assert "processor" in mlxr("doctor", "--hub-url", hub.url)
    seen.add("check-gpu")
    assert "mlx finds no GPU here" in run("mlxr", "check-gpu", code=2)
    (installed.folder / "notes").mkdir()
    (installed.folder / "notes" / "cats.txt").write_text("The cat sat.")
    assert "cats.txt:1" in mlxr("find", "notes", "cat", "--model", "demo")
    assert "ExecStart" in mlxr("service", "install", "--dry-run")
    seen.add("rerank")
    assert "ranks no texts" in run("mlxr", "rerank", "demo", "a question", "text.txt", code=2)
    seen.add("serve")
    with serving(installed) as url:
        assert "mine" in mlxr("ps", "--url", url)  # one's own model answers before the demo
        assert ANSWER in run("mlxr", "run", "demo", QUESTION, "--temperature", 0, "--url", url)
        assert "demo" in mlxr("ps", "--url", url)
        assert "demo" in mlxr("top", "--json", "--url", url)
        assert url in mlxr("connect", "opencode", "--url", url)
        mlxr("stop", "demo", "--url", url)
        assert "demo" not in mlxr("ps", "--url", url)

    seen.add("cluster")
    assert "pip install 'ray[serve]'" in run("mlxr", "cluster", "status", code=2)

    section = run("mlxr", "--help").partition("Examples:")[0]
    assert seen == set(re.findall(r"^  ([a-z-]+)  ", section, re.MULTILINE)), "this test has forgotten a command"


def test_a_pull_goes_on_where_it_stopped(installed: Installed, hub: FakeHub) -> None:
    behaviour = Behaviour(drop_after=len(DRAFT) // 4, drops=1, pause=threading.Event())
    hub.add(REPO, {FILE: DRAFT}).behaviour[FILE] = behaviour
    pull = ("mlxr", "pull", NAME, "--hub-url", hub.url)
    process = installed.start(*pull)
    while not any(name.stat().st_size for name in installed.folder.glob("models/**/partial-*")):
        assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate()
    assert behaviour.pause is not None
    behaviour.pause.set()
    assert NAME not in installed.run("mlxr", "list")
    hub.requests.clear()
    behaviour.drops = 1  # and once in the middle of the second try
    installed.run(*pull)
    ranges = [asked for path, asked in hub.requests if "/resolve/" in path]
    assert len(ranges) == 2
    assert all(ranges), "both asked for the rest only"
    assert [path.read_bytes() for path in Path(installed.folder, "models").glob("blobs/*")] == [DRAFT]
    assert installed.run("mlxr", "run", NAME, "x", "--max-tokens", 4)


def test_without_a_network(installed: Installed) -> None:
    said = installed.run("mlxr", "pull", NAME, "--hub-url", "http://127.0.0.1:9", code=2)
    assert said.count("\n") == 1
    assert "cannot be asked" in said
    assert "check the network" in said
    shutil.rmtree(installed.folder / "models", ignore_errors=True)

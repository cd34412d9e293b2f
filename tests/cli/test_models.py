"""The commands about models on disk, through the command line, with a hub on loopback and the demo model's file."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from encoder_folder import make_encoder_folder
from model_folder import write_with

from mlxr import LLM
from mlxr.cli.main import main
from mlxr.core.types import SamplingParams
from mlxr.loading import ASSETS
from mlxr.model_files.files import GGUF_POOLINGS
from mlxr.service.requests import ChatRequest

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_hub import FakeHub

Run = Callable[..., str]
GREEDY = ("--temperature", "0")
DRAFT = ASSETS / "demo-draft.gguf"


@pytest.fixture(autouse=True)
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(folder))
    return folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        yield fake


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "my-draft.gguf"
    shutil.copy(DRAFT, path)
    return path


def list_names(mlxr: Run) -> list[str]:
    return [record["name"] for record in json.loads(mlxr("list", "--json"))]


def test_list_shows_what_comes_with_mlxr(mlxr: Run, models_folder: Path) -> None:
    lines = mlxr("list").splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "demo", "demo-draft"]
    assert not models_folder.exists()


def test_pull_show_run_and_remove(
    mlxr: Run, hub: FakeHub, models_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("me/draft-GGUF", {"draft.Q8_0.gguf": DRAFT.read_bytes()})
    assert main(["pull", "hf.co/me/draft-GGUF", "--hub-url", hub.url]) == 0
    output = capsys.readouterr()
    assert "hf.co/me/draft-GGUF" in output.out
    lines = output.err.splitlines()
    assert re.fullmatch(r"draft\.Q8_0\.gguf: [0-9.]+ [KMi]*B of 4\.7 MiB", lines[0])
    assert re.fullmatch(r"draft\.Q8_0\.gguf: 4\.7 MiB of 4\.7 MiB, [0-9.]+ [KMGi]*B/s", lines[-1])
    assert list_names(mlxr)[0] == "hf.co/me/draft-GGUF:latest"
    shown = json.loads(mlxr("show", "hf.co/me/draft-gguf", "--json"))
    assert shown["record"]["quantization"] == "Q8_0"
    assert shown["metadata"] == json.loads(mlxr("show", DRAFT, "--json"))["metadata"]
    options = ("x", *GREEDY, "--max-tokens", 4)
    assert mlxr("run", "hf.co/me/draft-GGUF", *options) == mlxr("run", DRAFT, *options)
    mlxr("rm", "hf.co/me/draft-GGUF")
    assert list(models_folder.glob("blobs/*")) == []


def test_import_and_copies_leave_the_file_alone(mlxr: Run, own_file: Path, models_folder: Path) -> None:
    mlxr("import", own_file)
    mlxr("import", own_file, "me/second:v1")
    mlxr("cp", "my-draft", "third")
    assert list_names(mlxr)[:3] == ["me/second:v1", "my-draft:latest", "third:latest"]
    assert "still there" in mlxr("rm", "me/second:v1", "my-draft", "third", "--json")
    assert own_file.read_bytes() == DRAFT.read_bytes()
    assert not (models_folder / "blobs").exists()


def test_ones_own_model_answers_before_the_demo(mlxr: Run, own_file: Path, tmp_path: Path) -> None:
    def ask(*words: str) -> object:
        return json.loads(mlxr("run", *words, "--max-tokens", 1, "--json"))["model"]

    mlxr("import", make_encoder_folder(tmp_path / "texts", "bert"), "vectors")
    assert json.loads(mlxr("show", "vectors", "--json"))["record"]["capabilities"] == ["embedding"]
    seeker = write_with(DRAFT, tmp_path / "seeker.gguf", llama__pooling_type=GGUF_POOLINGS.index("last"))
    mlxr("import", seeker, "seeker")
    assert json.loads(mlxr("show", "seeker", "--json"))["record"]["capabilities"] == ["embedding"]
    mlxr("embed", "seeker", "Hi")
    assert ask("Hi") == "demo"  # an encoder writes nothing, and what is made for vectors writes badly
    mlxr("import", own_file, "first")
    assert ask("Hi") == "first"
    mlxr("cp", "first", "second")
    assert ask("Hi") == "first"  # it was used last
    assert (ask("second", "Hi"), ask("Hi")) == ("second", "second")
    mlxr("rm", "second", "first", "vectors", "seeker")
    assert ask("Hi") == "demo"


def test_nothing_is_replaced_without_force(
    mlxr: Run, refused: Run, own_file: Path, tmp_path: Path, hub: FakeHub
) -> None:
    hub.add("me/draft-GGUF", {"draft.Q8_0.gguf": DRAFT.read_bytes()})
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM demo\nSYSTEM Be brief.\n")
    mlxr("create", "owned", "-f", modelfile)
    commands = (
        ("cp", "demo-draft", "owned"),
        ("import", own_file, "owned"),
        ("create", "owned", "-f", modelfile),
        ("pull", "hf.co/me/draft-GGUF", "--name", "owned", "--hub-url", hub.url),
    )
    for command in commands:
        before = mlxr("list", "--json")
        assert "owned exists" in refused(*command)
        assert mlxr("list", "--json") == before
        mlxr(*command, "--force")


def test_create(mlxr: Run, own_file: Path, tmp_path: Path) -> None:
    modelfile = tmp_path / "Modelfile"
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    modelfile.write_text(f'FROM ./{own_file.name}\nTEMPLATE """{template}"""\nSYSTEM Talk.\nPARAMETER top_k 3\n')
    mlxr("create", "mine", "-f", modelfile)
    shown = mlxr("show", "mine")
    assert "Talk." in shown
    assert "options   top_k 3" in shown
    with LLM("mine") as llm:
        ids = llm._session.encode_chat(ChatRequest([{"role": "user", "content": "Hi"}], SamplingParams()))
        assert llm.detokenize(ids).endswith("system: Talk.\nuser: Hi\n")


def test_what_show_prints_is_what_create_reads(mlxr: Run, refused: Run, own_file: Path, tmp_path: Path) -> None:
    modelfile = tmp_path / "Modelfile"
    modelfile.write_bytes(
        b'\xef\xbb\xbfFROM demo\r\nSYSTEM "Use \\nabla"\r\nPARAMETER stop "\\n"\r\n'
        b'MESSAGE user "one\ntwo"\r\nLICENSE MIT\r\n'
    )
    mlxr("create", "first", "-f", modelfile)
    texts = {name: mlxr("show", "first", f"--{name}") for name in ("system", "parameters", "license", "template")}
    assert (texts["system"], texts["parameters"], texts["license"]) == ("Use \\nabla\n", 'stop "\\n"\n', "MIT\n")
    assert texts["template"] == mlxr("show", "demo", "--template") != "\n"
    modelfile.write_text(mlxr("show", "first", "--modelfile"))
    mlxr("create", "second", "-f", modelfile)
    ids = {record["name"]: record["digest"] for record in json.loads(mlxr("list", "--json"))}
    assert ids["first:latest"] == ids["second:latest"]
    assert "--modelfile: is shown alone" in refused("show", "first", "--modelfile", "--json")
    assert mlxr("show", own_file, "--modelfile").splitlines()[1] == f"FROM {own_file}"


def test_files_at_home_and_renderers_of_ollama(
    mlxr: Run, refused: Run, own_file: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM ~/{own_file.name}\nRENDERER qwen3-coder\nTEMPLATE {{{{ .Prompt }}}}\nREQUIRES 0.14\n")
    mlxr("create", "home", "-f", "~/Modelfile")
    assert mlxr("show", "home", "--template") == mlxr("show", own_file, "--template")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "Modelfile").write_text(f"FROM ../{own_file.name}\n")
    mlxr("create", "below", "-f", "~/sub/Modelfile")
    modelfile.write_text(f"FROM {gguf}\nRENDERER qwen3-coder\n")
    assert "RENDERER: 'qwen3-coder' is a part of Ollama" in refused("create", "bare", "-f", modelfile)


@pytest.mark.parametrize("given", ["-", "pipe"])
def test_a_modelfile_comes_through_a_pipe(
    given: str, mlxr: Run, own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come by `-f /dev/stdin` or `-f <(...)`; its paths begin where the command runs."""
    monkeypatch.chdir(tmp_path)
    end, start = os.pipe()
    os.write(start, f"FROM ./{own_file.name}\nSYSTEM piped\n".encode())
    os.close(start)
    with open(end, "rb") as pipe:
        if given == "-":
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))
        mlxr("create", "piped", "-f", "-" if given == "-" else f"/dev/fd/{end}")
    assert mlxr("show", "piped", "--system") == "piped\n"


def test_create_quantises(mlxr: Run, refused: Run, folder: Path, tmp_path: Path, models_folder: Path) -> None:
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM {folder}\nSYSTEM Talk.\nPARAMETER num_predict 6")
    mlxr("create", "small", "-f", modelfile, "--quantize", "q4_K_M")
    record = json.loads(mlxr("show", "small", "--json"))["record"]
    assert (record["quantization"], record["format"], record["is_owned"]) == ("Q4_K_M", "gguf", True)
    assert record["options"] == {"num_predict": 6}
    mlxr("convert", folder, tmp_path / "same.gguf", "--type", "q4_k_m")
    expected = mlxr("run", tmp_path / "same.gguf", "the fox", "--system", "Talk.", *GREEDY, "--max-tokens", 6)
    assert mlxr("run", "small", "the fox", *GREEDY) == expected
    modelfile.write_text("FROM small")
    assert "quantize: these weights are quantised already" in refused("create", "x", "-f", modelfile, "-q", "q8_0")
    assert "quantize: cannot convert to 'q9'" in refused("create", "x", "-f", modelfile, "-q", "q9")
    assert list_names(mlxr)[0] == "small:latest"
    mlxr("rm", "small")
    assert [*models_folder.glob("blobs/*"), *models_folder.glob("downloads/*")] == []


def test_create_from_a_go_template(mlxr: Run, own_file: Path, tmp_path: Path) -> None:
    modelfile = tmp_path / "Modelfile"
    template = "{{ if .System }}<|system|>{{ .System }}{{ end }}<|user|>{{ .Prompt }}<|assistant|>{{ .Response }}"
    modelfile.write_text(f'FROM ./{own_file.name}\nTEMPLATE """{template}"""\nSYSTEM Talk.\n')
    mlxr("create", "mine", "-f", modelfile)
    with LLM("mine") as llm:
        ids = llm._session.encode_chat(ChatRequest([{"role": "user", "content": "Hi"}], SamplingParams()))
        assert llm.detokenize(ids).endswith("<|system|>Talk.<|user|>Hi<|assistant|>")


def test_what_is_refused(refused: Run, mlxr: Run, tmp_path: Path, own_file: Path) -> None:
    modelfile = tmp_path / "Modelfile"
    for text, message in (
        ("FROM demo\nADAPTER x", "x: no such adapter"),
        ("FROM demo\nTEMPLATE {{ .Nonsense }}", "line 1 of the Go template: .Nonsense is not supported"),
        ("FROM demo\nTEMPLATE {% if %}", "template: "),
        ("FROM nothing", "nothing"),
    ):
        modelfile.write_text(text)
        assert message in refused("create", "mine", "-f", modelfile)
    modelfile.write_bytes(b"FROM \xff")
    assert "not UTF-8" in refused("create", "mine", "-f", modelfile)
    assert "there is no Modelfile" in refused("create", "mine", "-f", tmp_path / "none")
    assert "is not the name of a model" in refused("cp", "demo", "../../x")
    assert "comes with mlxr" in refused("rm", "demo")
    assert "did you mean llama3.2" in refused("pull", "lama3.2")
    assert "check the network" in refused("pull", "hf.co/a/b", "--hub-url", "http://127.0.0.1:9")
    assert "is not the name of a model" in refused("import", own_file, "a/../b")
    assert "no mlxr server answers: nothing listens there; `mlxr serve` starts one" in refused(
        "ps", "--url", "http://127.0.0.1:9"
    )
    assert list_names(mlxr) == ["demo:latest", "demo-draft:latest"]


def test_a_file_that_changed_is_not_run(mlxr: Run, refused: Run, own_file: Path) -> None:
    mlxr("import", own_file, "mine")
    shutil.copy(ASSETS / "demo.gguf", own_file)
    assert "changed since it was imported" in refused("show", "mine")
    assert "changed since it was imported" in refused("run", "mine", "x")

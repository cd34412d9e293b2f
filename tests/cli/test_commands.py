"""Each command on small models: what it prints, and its JSON."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from encoder_folder import make_encoder_folder

from mlxr.cli.chat import complete, show_answer, stop_on_interrupt
from mlxr.cli.chat_model import Conversation
from mlxr.cli.main import main
from mlxr.cli.run import names_model, split_words
from mlxr.cli.terminal import Markdown, show_progress
from mlxr.core.errors import ContextFull
from mlxr.core.settings import resolve
from mlxr.core.types import Finish, FinishReason, SamplingParams
from mlxr.llm import LLM

Run = Callable[..., str]
GREEDY = ("--temperature", "0")


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_run_prints_what_the_model_says(folder: Path, mlxr: Run) -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    with LLM(folder) as llm:
        chatted = llm.chat(turns, SamplingParams(max_tokens=8)).text
        raw = llm.generate("the fox", SamplingParams(max_tokens=8))[0].text
    options = [*GREEDY, "--max-tokens", 8]
    assert mlxr("run", folder, "the fox", "--system", "be brief", *options) == chatted + "\n"
    assert mlxr("run", folder, "the fox", "--raw", *options) == raw + "\n"
    assert raw != chatted


def test_run_as_json(folder: Path, mlxr: Run) -> None:
    report = json.loads(mlxr("run", folder, "the fox", *GREEDY, "--max-tokens", 5, "--json"))
    assert report["text"] + "\n" == mlxr("run", folder, "the fox", *GREEDY, "--max-tokens", 5)
    assert report["usage"]["completion_tokens"] <= 5
    assert report["finish_reason"] in ("stop", "length")
    assert report["total_ms"] >= report["first_text_ms"] > 0


@pytest.mark.slow
def test_run_says_the_same_with_drafts(gguf: Path, mlxr: Run, refused: Run) -> None:
    options = ["run", gguf, "the fox and the fox and the", "--raw", "--max-tokens", 30, "--seed", 3]
    for temperature in (0, 0.8):
        said = {
            mlxr(*options, "--temperature", temperature, "--draft", draft) for draft in ("off", "auto", "ngram", gguf)
        }
        assert len(said) == 1
    assert "draft: demo has another vocabulary" in refused(*options, "--draft", "demo")
    assert "draft: mtp cannot be used" in refused(*options, "--draft", "mtp")


def test_run_reads_stdin_and_tells_timings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mlxr: Run
) -> None:
    expected = mlxr("run", folder, "the fox", *GREEDY, "--max-tokens", 5)
    feed(monkeypatch, b"the fox")
    assert main(["run", str(folder), "-", *GREEDY, "--max-tokens", "5", "--stats"]) == 0
    output = capsys.readouterr()
    assert output.out == expected
    assert "prompt tokens" in output.err


@pytest.mark.slow
def test_what_comes_through_a_pipe_belongs_to_the_prompt(folder: Path, tmp_path: Path, mlxr: Run) -> None:
    options = (*GREEDY, "--max-tokens", "5", "--json")
    command = [sys.executable, "-m", "mlxr", "run", str(folder), "the fox", *options]
    (tmp_path / "text").write_text("is brown\n")
    counts = [
        json.loads(mlxr("run", folder, prompt, *options))["usage"]["prompt_tokens"]
        for prompt in ("the fox", "the fox\n\nis brown")
    ]
    told = []
    for given in (b"", b"is brown\n"):
        run = subprocess.run(command, input=given, capture_output=True, check=True)
        told.append(json.loads(run.stdout)["usage"]["prompt_tokens"])
    with (tmp_path / "text").open("rb") as file:
        run = subprocess.run(command, stdin=file, capture_output=True, check=True)
    assert told == counts
    assert json.loads(run.stdout)["usage"]["prompt_tokens"] == counts[1] > counts[0]


def test_answers_that_people_read_are_sampled_as_they_expect(folder: Path, mlxr: Run) -> None:
    usual = ("--temperature", 0.7, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.05)
    options = ("the fox", "--seed", 3, "--max-tokens", 12)
    assert (
        mlxr("run", folder, *options) == mlxr("run", folder, *options, *usual) != mlxr("run", folder, *options, *GREEDY)
    )
    assert "[default: 0.7, or what the model recommends]" in re.sub(r"[\s│]+", " ", mlxr("run", "--help"))


def test_run_uses_seed_and_stop(folder: Path, mlxr: Run) -> None:
    options = ["run", folder, "the fox", "--raw", "--max-tokens", 20, "--temperature", 2, "--top-k", 0]
    text = mlxr(*options, "--seed", 1)
    assert mlxr(*options, "--seed", 1) == text
    assert mlxr(*options, "--seed", 2) != text
    stop = text[5:7]
    assert mlxr(*options, "--seed", 1, "--stop", stop) == text[: text.index(stop)] + "\n"


def test_run_refuses_what_it_cannot_use(
    gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Run
) -> None:
    assert "no chat template" in refused("run", gguf, "hi", "--system", "x")
    assert "--raw" in refused("run", folder, "hi", "--system", "x", "--raw")
    feed(monkeypatch, b"")
    assert "is missing" in refused("run", gguf)
    feed(monkeypatch, b"\xff\xfe")
    assert "UTF-8" in refused("run", gguf, "-")
    assert "UTF-8" in refused("run", gguf, "a\udcff")


def test_run_refuses_a_prompt_beyond_the_context_or_the_arena(gguf: Path, refused: Run) -> None:
    assert "prompt" in refused("run", gguf, "hello " * 20, "--raw", "--context-tokens", 16)
    line = refused("run", gguf, "hello", *GREEDY, "--max-tokens", 400, "--arena-bytes", "32K")
    assert "pages" in line
    assert "arena_bytes" in line


def test_one_word_is_a_prompt_unless_it_names_a_model(folder: Path, gguf: Path, tmp_path: Path, mlxr: Run) -> None:
    settings = resolve({"models_folder": str(tmp_path)})
    mlxr("import", gguf, "mine", "--models-folder", tmp_path)

    def split(word: str) -> tuple[str | None, str | None]:
        return split_words([word], lambda word: names_model(word, settings, None))

    for prompt in ("hi", "word " * 1000, "x" * 5000, "Who wrote model.gguf", "What is a:b?", "a\0b", ""):
        assert split(prompt) == (None, prompt)
    for model in ("demo", "missing.gguf", str(folder), str(gguf), "mine", "Mine:latest", "llama3:8b"):
        assert split(model) == (model, None)


def test_a_model_alone_answers_stdin(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlxr: Run, refused: Run
) -> None:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path))
    mlxr("import", folder, "mine")
    expected = mlxr("run", folder, "the fox", *GREEDY, "--max-tokens", 5)
    feed(monkeypatch, b"the fox\n")
    assert mlxr("run", "mine", *GREEDY, "--max-tokens", 5) == expected
    feed(monkeypatch, b"x")
    assert "missing:8b" in refused("run", "missing:8b")


def test_chat_through_a_pipe_keeps_the_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_tokens=6)
    turns: list[dict[str, str]] = []
    answers = []
    with LLM(folder) as llm:
        for text in ("the fox", "the dog"):
            turns.append({"role": "user", "content": text})
            answers.append(llm.chat(turns, params).text)
            turns.append({"role": "assistant", "content": answers[-1]})
        fresh = llm.chat([{"role": "user", "content": "the dog"}], params).text
    assert fresh != answers[1]
    feed(monkeypatch, b"the fox\n\nthe dog\n/help\n/what\n/reset\nthe dog\n/exit\nnever read\n")
    assert main(["chat", str(folder), *GREEDY, "--max-tokens", "6"]) == 0
    output = capsys.readouterr()
    assert output.out == "".join(f"{text}\n" for text in (*answers, fresh))
    assert "Forget the conversation" in output.err
    assert "/what: is no command" in output.err
    assert "starts anew" in output.err


def test_an_interrupt_stops_the_answer_and_the_chat_goes_on() -> None:
    before = signal.getsignal(signal.SIGINT)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with LLM("demo") as llm:  # its context takes a second to fill
        with llm.stream("the fox", params) as stream, stop_on_interrupt(stream):
            next(stream)
            signal.raise_signal(signal.SIGINT)
            rest = list(stream)
        assert isinstance(rest[-1], Finish)
        assert rest[-1].reason is FinishReason.CANCELLED
        assert llm.stats().engine.used_pages == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    """A real pseudo-terminal: prompt, answer, an error that does not end the chat, Ctrl-C and Ctrl-D at the prompt."""
    command = [sys.executable, "-m", "mlxr", "run", str(folder), *GREEDY, "--max-tokens", "4"]  # a model alone: a chat
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background may have been told to ignore it
        os.execve(sys.executable, command, {**os.environ, "TERM": "dumb"})
    shown = b""

    def wait_for(text: bytes) -> None:
        """Read on until `text` comes after all that was waited for before."""
        nonlocal shown, seen
        while (at := shown.find(text, seen)) < 0:
            shown += os.read(terminal, 4096)
        seen = at + len(text)

    seen = 0
    wait_for(b"> ")
    os.write(terminal, b"the fox\n")
    wait_for(b"\n")  # the echo of what was typed
    wait_for(b"\n> ")
    os.write(terminal, b"fox " * 200 + b"\n")  # a line that long is scrolled, with marks that look like a prompt
    wait_for(b"mlxr: prompt")
    wait_for(b"\n> ")
    os.write(terminal, b"/set parameter temp\t 0.5\n")  # Tab completes the name
    wait_for(b"temperature is 0.5")
    os.write(terminal, b'"""the fox\nand the dog"""\n')
    wait_for(b"... ")
    wait_for(b"\n> ")
    os.write(terminal, b"unfinished")
    wait_for(b"unfinished")
    # a Ctrl-C while readline works on a key is only seen at the next event
    while b"/bye or Ctrl-D ends" not in shown[seen:]:
        os.write(terminal, b"\x03")
        while select.select([terminal], [], [], 0.5)[0] and b"/bye or Ctrl-D ends" not in shown[seen:]:
            shown += os.read(terminal, 4096)
    wait_for(b"/bye or Ctrl-D ends")
    wait_for(b"\n> ")
    os.write(terminal, b"\x04")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"Traceback" not in shown


def test_a_failed_step_is_told_in_one_line(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("broken kernel")

    monkeypatch.setattr("mlxr.models.Decoder.forward", fail)
    assert main(["run", str(gguf), "hi", "--raw"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "mlxr: a step with 1 requests failed",
        "mlxr: the step failed: ValueError: broken kernel",
    ]
    assert main(["bench", str(gguf)]) == 2
    assert "broken kernel" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress("loading") as progress:
        assert progress is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with show_progress("loading") as progress:
        assert progress is not None
        progress(1, 2)
    output = capsys.readouterr()
    assert output.out == ""
    assert "loading" in output.err


def test_chat_refuses_a_model_without_a_template_before_it_is_loaded(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, refused: Run
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("its weights were loaded")

    monkeypatch.setattr("mlxr.loading.Decoder", build)
    assert "no chat template" in refused("chat", gguf)
    assert "no chat template" in refused("run", gguf, "hi", "--system", "x")


def test_a_text_without_a_template_is_told_and_bounded(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlxr.cli.run.PLAIN_TOKENS", 3)
    assert main(["run", str(gguf), "the fox", *GREEDY, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["usage"]["completion_tokens"] == 3
    assert "no chat template: the text goes on, by 3 tokens at most" in output.err
    assert main(["run", str(gguf), "the fox", *GREEDY, "--json", "--max-tokens", "5"]) == 0
    output = capsys.readouterr()
    assert (json.loads(output.out)["usage"]["completion_tokens"], output.err) == (5, "")


def test_chat_in_a_pipe_forgets_the_oldest_turns_when_the_context_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, b"".join(b"the fox %d jumps over the lazy dog\n" % index for index in range(12)))
    with LLM(folder) as llm:
        alone = llm.chat(
            [{"role": "user", "content": "the fox 0 jumps over the lazy dog"}], SamplingParams(max_tokens=9)
        )
    assert main(["chat", str(folder), *GREEDY, "--max-tokens", "9"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") >= 12
    assert output.out.startswith(alone.text)
    assert output.err.splitlines()[0] == "(the context is full: the oldest turn was forgotten)"


@pytest.mark.parametrize("name", ["gemma3", "mistral-v3"])
def test_a_long_chat_goes_on_with_a_template_that_alternates(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = Path(__file__).parents[1] / "tokenizers" / "templates" / f"{name}.jinja"
    with LLM(folder, chat_template=file if file.exists() else name) as llm:
        opening = [{"role": "assistant", "content": "the dog"}, {"role": "assistant", "content": "the fox"}]
        conversation = Conversation(llm, SamplingParams(max_tokens=2), "be brief", opening)
        for number in range(40):
            conversation.ask(f"the fox {number}", show_answer)
        assert 1 < len(conversation.turns) < 40
    assert "forgotten" in capsys.readouterr().err


def test_an_answer_that_the_context_cuts_makes_room_for_the_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    with LLM(folder) as llm:
        conversation = Conversation(llm, endless, "be brief")
        for question in ("the fox", "the dog"):
            conversation.ask(question, show_answer)
        assert [turn.question for turn in conversation.turns] == ["the dog"]
        assert sum(turn.tokens for turn in conversation.turns) == llm.context_tokens
        with pytest.raises(ContextFull):
            conversation.ask("fox " * 300, show_answer)
        assert len(conversation.turns) == 1
    notes = capsys.readouterr().err
    assert notes.count("the answer ends here") == 2
    assert "oldest turn was forgotten" in notes


def test_chat_in_a_pipe_ends_at_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, b"hi\n" + b"fox " * 200 + b"\nhi\n")
    assert main(["chat", str(folder), *GREEDY, "--max-tokens", "3"]) == 2
    output = capsys.readouterr()
    assert output.out.count("\n") >= 1
    assert output.err.startswith("mlxr: prompt")


def test_what_is_set_in_a_chat_holds_and_is_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mlxr: Run
) -> None:
    monkeypatch.setenv("MLXR_MODELS_FOLDER", str(tmp_path))
    mlxr("import", folder, "mine")
    first, second = {"role": "user", "content": "the fox"}, {"role": "user", "content": "the\n dog"}
    with LLM(folder) as llm:
        params = SamplingParams(max_tokens=5, top_k=3, temperature=0.5, seed=7, stop=("zz", "y y"))
        system = {"role": "system", "content": "be\nbrief"}
        answer = llm.chat([system, first], params)
        reply = {"role": "assistant", "content": answer.text}
        other = llm.chat([system, first, reply, second], params)
        alone = llm.chat([system, second], params)
    lines = [
        *("/set parameter num_predict 5", "/set parameter top_k 3", "/set parameter temperature 0.5"),
        *("/set parameter top_p 1", "/set parameter min_p 0"),
        *("/set parameter seed 7", '/set parameter stop zz "y y"', '/set system """be', 'brief"""', "/set verbose"),
        *("the fox", "/save new", '"""the', ' dog"""', "/set nohistory", '"""the\n dog"""', "/load new"),
        *('"""the\n dog"""', "/show parameters", "/show system", "/show", "/bye", "never read"),
    ]
    feed(monkeypatch, "\n".join(lines).encode())
    assert main(["chat", "mine"]) == 0
    out, err = capsys.readouterr()
    texts = [answer.text, other.text, alone.text, other.text]
    assert out.startswith("".join(f"{text}\n" for text in texts))
    shown = out.removeprefix("".join(f"{text}\n" for text in texts))
    shown = re.sub(" +", " ", shown)
    assert all(
        row in shown for row in ("num_predict 5", "top_k 3", "stop 'zz' 'y y'", "be\nbrief", "architecture llama")
    )
    assert "tokens/s; ended by" in err
    assert "mlxr:" not in err
    saved = json.loads(mlxr("show", "new", "--json"))["record"]
    assert saved["messages"] == [first, reply]
    assert (saved["system"], saved["options"]["num_predict"]) == ("be\nbrief", 5)
    feed(monkeypatch, b"the\n dog\n")
    assert mlxr("run", "new", "the\n dog") == f"{other.text}\n"
    assert mlxr("run", "new", "the\n dog", "--max-tokens", 1) != f"{other.text}\n"


def test_what_a_chat_cannot_do_is_said_and_it_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "/set parameter top_k": "takes a name and a value",
        "/set parameter nothing 1": "names are max_tokens",
        "/set top_k many": "top_k: must be a whole number",
        "/undo": "/undo: there is no question to take back",
        "/retry": "/retry: there is no question",
        "/edit": "/edit: there is no question",
        "/copy": "/copy: there is no answer",
        "/read": "/read: needs a file",
        '/read "no file" why': "/read: no file cannot be read: No such file",
        "/image": "/image: needs a file",
        "/image photo.png": "reads text only: ",
        "/system": "there is no system message",
        "/set parameter top_p 2": "top_p: must be at least 0",
        "/set everything": "/set: sets parameter",
        "/set format xml": "knows json alone",
        "/set system": "needs the text",
        "/show nothing": "/show: shows info",
        "/load": "needs the name",
        "/load nothing-here": "nothing-here",
        "/save ../x": "is not the name of a model",
        "/set think": "the model thinks",
        "/set think low": "with the effort low",
        "/set think 12": "thinking_budget is 12",
        "/set think hugely": "takes tokens or one of minimal, low",
        "/set nothink": "without thinking",
        "/set format json": "JSON objects",
        "/? set": "/set parameter NAME VALUE",
        "/? shortcuts": "Ctrl-D",
        '"""never': "has no end",
    }
    assert complete("/s") == ["/save", "/set", "/show", "/system"]
    assert complete("/set parameter top_k") == ["/set parameter top_k"]
    assert complete("/show te") == ["/show template"]
    assert "/load demo" in complete("/load d")
    assert complete("text") == complete("/nothing x") == []
    feed(monkeypatch, "\n".join(wrong).encode())
    assert main(["chat", str(folder), *GREEDY, "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "there is no system message\n"
    for line, text in wrong.items():
        assert text in out + err, line


def test_a_chat_takes_back_asks_again_reads_and_copies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file.txt").write_text("one two\n")
    (tmp_path / "system.txt").write_text("be brief\n")
    (tmp_path / "wl-copy").write_text(f"#!/bin/sh\n/bin/cat > {tmp_path}/copied\n")
    (tmp_path / "wl-copy").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = f"the cat\n\n{tmp_path}/a file.txt:\none two"
    with LLM(folder) as llm:
        params = SamplingParams(max_tokens=4, temperature=0)
        system = {"role": "system", "content": "be brief"}
        fox, dog = ({"role": "user", "content": f"the {animal}"} for animal in ("fox", "dog"))
        texts = [llm.chat([system, turn], params).text for turn in (fox, dog)]
        turns = [system, dog, {"role": "assistant", "content": texts[1]}, {"role": "user", "content": asked}]
        texts.append(llm.chat(turns, params).text)
    lines = ["the fox", "/undo", "/undo", "the fox", "/retry", "/edit the dog", f"/read '{tmp_path}/a file.txt'"]
    lines += ["the cat", "/copy", "/edit"]
    feed(monkeypatch, "\n".join(lines).encode())
    greedy = [*GREEDY, "--max-tokens", "4", "--system-file", str(tmp_path / "system.txt")]
    assert main(["chat", str(folder), *greedy]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{texts[index]}\n" for index in (0, 0, 0, 1, 2))
    assert (tmp_path / "copied").read_bytes().decode() == texts[2]
    for text in ("taken back: the fox", "there is no question to take back", "gives the same answer again"):
        assert text in err
    assert "goes with the next question" in err
    assert "/edit: takes the new text, as the question has several lines" in err
    feed(monkeypatch, b"")
    (tmp_path / "q.txt").write_text("the fox\n")
    assert main(["run", str(folder), "-f", str(tmp_path / "q.txt"), *greedy]) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n"
    assert main(["run", str(folder), "the cat", "--system", "x", *greedy]) == 2
    assert main(["run", str(folder), "-f", str(tmp_path / "none.txt")]) == 2
    assert "--file: " in capsys.readouterr().err


MARKDOWN = """# A *title* here
Some **bold text**, *italics*, `code with ** stars`, 2 * 3 * 4, snake_case_name, __init__ and 2**3**4.

- first item that is quite long so that it must be wrapped
> quoted
---
```python
return x ** 2
```
| a long table | that is | not wrapped at all |
\x1b[2J \\*escaped\\* 日本語のテキスト
"""


def test_markdown_is_shown_alike_in_whatever_pieces_it_comes() -> None:
    shown = set()
    for step in (1, 2, 3, 7, len(MARKDOWN)):
        renderer = Markdown(40)
        pieces = [renderer.push(MARKDOWN[at : at + step]) for at in range(0, len(MARKDOWN), step)]
        text = "".join([*pieces, renderer.push("", is_last=True)])
        shown.add(re.sub(r"\x1b\[\d*m", "", text))
    assert re.search(r"\x1b\[1mA \x1b\[3mtitle\x1b\[0m\x1b\[1m here\x1b\[0m", text)
    assert "Some \x1b[1mbold text\x1b[0m, \x1b[3mitalics" in text
    (plain,) = shown
    lines = plain.splitlines()
    assert lines[:4] == [
        "A title here",
        "Some bold text, italics, code with **",
        "stars, 2 * 3 * 4, snake_case_name,",
        "__init__ and 2**3**4.",
    ]
    assert lines[5:10] == [
        "• first item that is quite long so that",
        "  it must be wrapped",
        "│ quoted",
        "─" * 40,
        "return x ** 2",
    ]
    assert lines[10] == "| a long table | that is | not wrapped at all |"
    assert lines[11:] == ["\\x1b[2J *escaped* 日本語のテキスト"]


def test_a_line_that_is_not_utf8_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, b"hi\n")
    assert main(["chat", str(folder), *GREEDY, "--max-tokens", "3"]) == 0
    expected = capsys.readouterr().out
    feed(monkeypatch, b"caf\xe9\nhi\n")
    assert main(["chat", str(folder), *GREEDY, "--max-tokens", "3"]) == 0
    output = capsys.readouterr()
    assert output.out == expected
    assert output.err.startswith("line 1 is not UTF-8")


def test_show_gguf(gguf: Path, mlxr: Run) -> None:
    report = json.loads(mlxr("show", gguf, "--json", "--tensors"))
    assert report["format"] == "GGUF 3"
    assert report["size_bytes"] == gguf.stat().st_size
    assert report["metadata"]["llama.block_count"] == 2
    assert report["metadata"]["tokenizer.ggml.tokens"]["length"] == 512
    assert report["metadata"]["tokenizer.ggml.tokens"]["first"][:3] == ["<unk>", "<s>", "</s>"]
    assert sum(row["tensors"] for row in report["types"].values()) == len(report["tensors"]) == 21
    assert sum(row["bytes"] for row in report["types"].values()) == sum(row["bytes"] for row in report["tensors"])
    assert report["tensors"][0] == {"name": "token_embd.weight", "type": "q4_k", "shape": [512, 256], "bytes": 73728}
    text = mlxr("show", gguf)
    assert "llama.block_count" in text
    assert "token_embd.weight" not in text
    assert "token_embd.weight" in mlxr("show", gguf, "--tensors")


def test_show_a_folder(folder: Path, mlxr: Run) -> None:
    report = json.loads(mlxr("show", folder, "--json"))
    assert report["format"] == "safetensors"
    assert report["metadata"]["model_type"] == "llama"
    assert list(report["types"]) == ["f32"]
    assert "hidden_size" in mlxr("show", folder)


def test_show_prints_json_whatever_a_configuration_holds(folder: Path, tmp_path: Path, mlxr: Run) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"factor": math.nan, "factors": list(range(100)), "deep": {"value": -math.inf}}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    shown = json.loads(mlxr("show", tmp_path / "odd", "--json"))["metadata"]["rope_scaling"]
    assert shown["factor"] == "nan"
    assert shown["factors"]["length"] == 100
    assert shown["deep"] == {"value": "-inf"}


def test_show_spells_control_characters_out(synthetic: object, tmp_path: Path, mlxr: Run) -> None:
    del synthetic
    from mlxr.formats import write_gguf

    path = tmp_path / "a.gguf"
    write_gguf(path, {"general.architecture": "llama", "general.name": "\x1b[2Jcleared\nnext", "x": math.inf}, [])
    assert "\\x1b[2Jcleared\\nnext" in mlxr("show", path)
    assert json.loads(mlxr("show", path, "--json"))["metadata"]["x"] == "inf"


def test_perplexity(gguf: Path, tmp_path: Path, mlxr: Run, refused: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 10)
    report = json.loads(mlxr("perplexity", gguf, text, "--context", 32, "--json"))
    with LLM(gguf) as llm:
        scored = len(llm.tokenize(text.read_text())) - 1  # without BOS
    assert report["tokens"] == scored
    assert report["context"] == 32
    bits = math.log2(report["perplexity"]) * scored / (len(text.read_text()) + 1)  # SPM's own space before the text
    assert report["bits_per_byte"] == pytest.approx(bits)
    reference = json.loads(mlxr("perplexity", gguf, text, "--context", 32, "--json", "--device", "reference"))
    assert report["perplexity"] == pytest.approx(reference["perplexity"], rel=0.02)
    assert f"{report['perplexity']:.4f}" in mlxr("perplexity", gguf, text, "--context", 32)
    assert "context" in refused("perplexity", gguf, text, "--context", 1)
    assert "512" in refused("perplexity", gguf, text, "--context", 513)
    text.write_bytes(b"abc\xff")
    assert "UTF-8 at byte 3" in refused("perplexity", gguf, text)
    assert "cannot be read" in refused("perplexity", gguf, tmp_path)


def test_perplexity_writes_the_loss_of_each_token(gguf: Path, tmp_path: Path, mlxr: Run, refused: Run) -> None:
    text, losses = tmp_path / "text.txt", tmp_path / "losses.jsonl"
    text.write_text("the quick brown fox é " * 10)
    report = json.loads(mlxr("perplexity", gguf, text, "--context", 32, "--json", "--per-token", losses))
    rows = [json.loads(line) for line in losses.read_text().splitlines()]
    with LLM(gguf) as llm:
        token_ids = llm.tokenize(text.read_text())[1:]  # without BOS
    assert [row["position"] for row in rows] == list(range(len(token_ids)))
    assert [row["token"] for row in rows] == token_ids
    assert math.exp(sum(row["loss"] for row in rows) / len(rows)) == pytest.approx(report["perplexity"])
    assert "".join(row["text"] for row in rows if "\ufffd" not in row["text"]).startswith(" the quick")
    assert len({row["loss"] for row in rows}) > len(rows) / 2
    assert "cannot be written" in refused("perplexity", gguf, text, "--per-token", tmp_path)


@pytest.mark.parametrize("batch", [1, 5])
def test_bench(batch: int, gguf: Path, mlxr: Run) -> None:
    sizes = ["--prompt-tokens", 40, "--generate-tokens", 6, "--batch", batch, "--repeat", 2, "--max-batch-tokens", 32]
    report = json.loads(mlxr("bench", gguf, *sizes, "--threads", 1, "--json"))
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        assert 0 < report[name]["min"] <= report[name]["median"] <= report[name]["max"]
    wanted = {"prompt_tokens": 40, "generate_tokens": 6, "batch": batch, "repeat": 2, "threads": 1, "device": "cpu"}
    assert {name: report[name] for name in wanted} == wanted
    assert report["load_s"] > 0
    assert report["peak_memory_bytes"] > report["weight_bytes"] > 800_000
    assert "decode" in mlxr("bench", gguf, *sizes)


@pytest.mark.slow
def test_bench_shows_what_drafts_bring(gguf: Path, mlxr: Run, refused: Run) -> None:
    sizes = ["--prompt-tokens", 40, "--generate-tokens", 30, "--batch", 2, "--repeat", 1]
    report = json.loads(mlxr("bench", gguf, *sizes, "--draft", gguf, "--json"))
    assert report["text_tokens_per_s"]["min"] > 0
    assert report["draft_tokens_per_s"]["min"] > 0
    assert 0 <= report["accepted_tokens"] <= report["drafted_tokens"]
    assert "were right" in mlxr("bench", gguf, *sizes, "--draft", "ngram")
    assert "draft: demo has another vocabulary" in refused("bench", gguf, *sizes, "--draft", "demo")


def test_bench_refuses_what_does_not_run_side_by_side(gguf: Path, refused: Run) -> None:
    small = ["--prompt-tokens", 8, "--generate-tokens", 4]
    assert "side by side" in refused("bench", gguf, *small, "--batch", 3, "--max-sequences", 2)
    assert "side by side" in refused("bench", gguf, *small, "--batch", 3, "--arena-bytes", "64K")
    assert "512" in refused("bench", gguf, "--prompt-tokens", 510, "--generate-tokens", 2)


def test_validate_passes_on_the_native_kernels(gguf: Path, mlxr: Run) -> None:
    report = json.loads(mlxr("validate", gguf, "--json"))
    assert report["passed"]
    assert report["reference_runs"] == []
    assert report["copied_bytes"] == 0
    assert report["generated_tokens"] == 16
    assert {row["implementation"] for row in report["dispatches"]} == {"cpu"}
    counts: dict[str, int] = {}
    for row in report["dispatches"]:
        counts[row["operator"]] = counts.get(row["operator"], 0) + row["count"]
    assert counts["attend"] == counts["write_pages"] == 2 * 16
    assert counts["sample"] == counts["embed"] == 16
    cache = report["cache"]
    assert cache["peak_pages"] == 2
    assert cache["gqa_saved_bytes"] == cache["peak_bytes"] == 2 * cache["page_bytes"]
    (group,) = cache["groups"]
    assert (group["window"], group["peak_bytes"], cache["window_saved_bytes"]) == (None, cache["peak_bytes"], 0)
    use = cache["full_use"]
    assert use["sequences"] == 8
    assert use["needed_bytes"] == use["unwindowed_bytes"] == 8 * -(-use["tokens"] // 32) * cache["page_bytes"]
    assert report["logits"]["agree"]
    assert report["logits"]["positions"] == 16
    assert report["logits"]["relative_error"] < report["logits"]["max_relative_error"]
    assert report["prefill_ms"] > 0
    assert report["bandwidth_bytes_per_s"] > 0
    text = mlxr("validate", gguf)
    assert text.endswith("passed\n")
    assert "attend" in text


def test_validate_refuses_a_context_too_short(gguf: Path, refused: Run) -> None:
    assert "context" in refused("validate", gguf, "--context-tokens", 30)


def test_validate_fails_where_native_code_did_not_run(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(gguf), "--device", "reference"]) == 1
    output = capsys.readouterr().out
    assert "FAILED: attend has a native implementation, but the reference ran" in output
    assert output.endswith("FAILED\n")


def test_validate_fails_when_logits_disagree(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlxr.service.validation.MAX_PRODUCT_ERROR", 0.0)
    assert main(["validate", str(gguf), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    assert report["reference_runs"] == []
    assert not report["logits"]["agree"]


def test_rerank_ranks_files_and_lines(tmp_path: Path, mlxr: Run, refused: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = make_encoder_folder(tmp_path / "ranks", "bert-ranks")
    texts = {"a.txt": "paris is the capital of france", "b.txt": "the cat sat on mat", "c.txt": "rain"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in texts]
    lines = [line.split("\t") for line in mlxr("rerank", ranker, "where is paris?", *files).splitlines()]
    assert sorted(name for _, name in lines) == [str(file) for file in files]
    assert [float(score) for score, _ in lines] == sorted((float(score) for score, _ in lines), reverse=True)
    feed(monkeypatch, "\n".join(texts.values()).encode())
    best = json.loads(mlxr("rerank", ranker, "where is paris?", "--top", 1, "--json"))["results"]
    assert [row["name"] for row in best] == [texts[Path(lines[0][1]).name]]
    assert "cannot be read" in refused("rerank", ranker, "a", tmp_path / "none.txt")

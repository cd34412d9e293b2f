"""Questions and answers about entries: many ways to ask, one way to answer each.

`Conversations` draws conversations (lists of role and text) from entries with a seeded random stream. It knows the
wording (`phrases.toml`) and the shares of each kind of conversation, and nothing of tokens. Answers quote the
docstring's first sentence and the signature exactly; the model has only to learn which belongs to which name.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

Message = tuple[str, str]
EntryRecord = dict[str, Any]

PHRASES: dict[str, Any] = tomllib.loads((Path(__file__).parent / "phrases.toml").read_text(encoding="utf-8"))
OUTSIDE_ANSWER = "I only know the Python standard library. Ask me, for example: What does os.path.join do?"

# Shares of conversations by what their first question is.
KINDS = {
    "entry": 0.775,
    "unknown": 0.075,
    "contents": 0.025,
    "reverse": 0.025,
    "task": 0.03,
    "compare": 0.02,
    "talk": 0.03,
    "outside": 0.02,
}


def answer(entry: EntryRecord, mode: str) -> str:
    """The answer to a question of `mode` ("what", "explain", "call") about one entry."""
    name, signature, sentence = entry["name"], entry["signature"], entry["sentence"]
    if mode == "call":
        if entry["kind"] == "module":
            how = f"`{name}` is a module: write `import {name}`."
        elif entry["kind"] == "property":
            how = f"`{name}` is an attribute: use it without parentheses."
        elif signature:
            how = f"Call `{signature}`."
        else:
            return f"`{name}`: {sentence} I don't know its signature."
        return f"{how} {sentence}".rstrip()
    if not sentence:
        return f"`{name}` is a {entry['kind']} of the `{entry['module']}` module. It has no docstring."
    return f"`{name}`: {entry['paragraph'] if mode == 'explain' else sentence}"


class Conversations:
    """Draws conversations; the same entries and seed give the same ones."""

    def __init__(self, entries: Sequence[EntryRecord], contents: dict[str, list[str]], seed: int) -> None:
        self._random = random.Random(seed)
        self._entries = entries
        self._cumulative = list(accumulate(float(e["weight"]) for e in entries))
        self._names = {e["name"] for e in entries} | {a for e in entries for a in e["aliases"]}
        self._contents = sorted(contents.items())
        self._reverse = [e for e in entries if e["unique_sentence"]]
        self._tasks = [(e, PHRASES["tasks"][e["name"]]) for e in entries if e["name"] in PHRASES["tasks"]]
        self._functions = sorted({e["name"].rpartition(".")[2] for e in entries if e["kind"] in ("function", "method")})
        self._modules = sorted({e["module"] for e in entries})
        self._words = sorted({w for f in self._functions for w in re.findall(r"[A-Z]?[a-z]{3,}", f)})

    def draw(self) -> list[Message]:
        """One conversation: perhaps a system message, then one to four exchanges."""
        rng = self._random
        messages: list[Message] = [("system", rng.choice(PHRASES["system"]))] if rng.random() < 0.08 else []
        turns = 1 if rng.random() < 0.8 else rng.randint(2, 4)
        last: EntryRecord | None = None
        for turn in range(turns):
            if turn and last is not None and rng.random() < 0.5:
                mode = rng.choice(list(PHRASES["follow_up"]))
                exchange = rng.choice(PHRASES["follow_up"][mode]), answer(last, mode)
            else:
                last, exchange = self._draw_exchange()
            messages += [("user", exchange[0]), ("assistant", exchange[1])]
        return messages

    def _draw_exchange(self) -> tuple[EntryRecord | None, tuple[str, str]]:
        rng = self._random
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        if kind == "unknown":
            name = self._draw_unknown_name()
            question = rng.choice(PHRASES["what"] + PHRASES["explain"] + PHRASES["call"]).format(n=name, k="function")
            return None, (
                question,
                f"I don't know `{name}`. I only know names of the Python standard library.",
            )
        if kind == "contents" and self._contents:
            module, names = rng.choice(self._contents)
            listed = ", ".join(f"`{n}`" for n in names)
            return None, (
                rng.choice(PHRASES["contents"]).format(n=module),
                f"The names in `{module}` include {listed}.",
            )
        if kind == "reverse" and self._reverse:
            entry = rng.choice(self._reverse)
            return entry, (
                rng.choice(PHRASES["reverse"]).format(s=entry["sentence"]),
                f"`{entry['name']}`: {entry['sentence']}",
            )
        if kind == "talk":
            talk = rng.choice(PHRASES["small_talk"])
            return None, (rng.choice(talk["questions"]), talk["answer"])
        if kind == "outside":
            subject, other = (rng.choice(PHRASES["outside_subjects"]) for _ in range(2))
            return None, (rng.choice(PHRASES["outside"]).format(x=subject, y=other), OUTSIDE_ANSWER)
        if kind == "compare":
            first, second = (rng.choices(self._entries, cum_weights=self._cumulative)[0] for _ in range(2))
            question = rng.choice(PHRASES["compare"]).format(a=first["name"], b=second["name"])
            return None, (question, f"{answer(first, 'what')}\n{answer(second, 'what')}")
        if kind == "task":
            entry, tasks = rng.choice(self._tasks)
            return entry, (
                rng.choice(PHRASES["task"]).format(t=rng.choice(tasks)),
                f"Use `{entry['name']}`. {answer(entry, 'call')}",
            )
        entry = rng.choices(self._entries, cum_weights=self._cumulative)[0]
        return entry, self._ask(entry)

    def _ask(self, entry: EntryRecord) -> tuple[str, str]:
        rng = self._random
        mode, forms = rng.choices(
            [("what", PHRASES["what"]), ("explain", PHRASES["explain"]), ("call", PHRASES["call"])],
            weights=[0.36, 0.3, 0.34],
        )[0]
        form = forms[0] if rng.random() < 0.3 else rng.choice(forms)
        name = entry["name"]
        if entry["aliases"] and rng.random() < 0.15:
            name = rng.choice(entry["aliases"])
        return form.format(n=name, k=entry["kind"]), answer(entry, mode)

    def _draw_unknown_name(self) -> str:
        # A real module or class with a name it does not have, or invented words: neither may be answered with a guess.
        rng = self._random
        while True:
            if rng.random() < 0.06:
                return str(rng.choice(PHRASES["third_party"]))
            invented = "".join(rng.choices(PHRASES["syllables"], k=rng.randint(1, 3)))
            word = invented if rng.random() < 0.5 else rng.choice(self._words)
            form = rng.random()
            if form < 0.5:
                last = word
            elif form < 0.8:
                last = f"{word}_{rng.choice(self._words)}"
            else:
                last = f"{rng.choice(self._functions)}_{word}"
            place = rng.random()
            if place < 0.7:  # weighed like the entries, so that a known module is as common here as with a known name
                owner = rng.choices(self._entries, cum_weights=self._cumulative)[0]
                name = f"{owner['name' if owner['kind'] in ('class', 'module') else 'module']}.{last}"
                name = name.removeprefix("builtins.")
            elif place < 0.85:
                name = f"{invented}.{last}"
            else:
                name = last
            # A bare word may be a fair short form of a real name, so only invented ones count as unknown.
            if name not in self._names and ("." in name or invented in name):
                return name

# ruff: noqa: E501 (one template to a line)
"""Templates that would fill memory or never end are stopped, each by the right bound."""

from __future__ import annotations

import resource
import sys
from datetime import UTC, datetime

import pytest

from mlxr.core.errors import TemplateError
from mlxr.templates import budget
from mlxr.templates.worker import ProgramError, Programs
from mlxr.tokenizers import ChatTemplate

MEMORY_BYTES = 400 << 20


def render(source: str, content: str = "Hi") -> str:
    template = ChatTemplate(source, bos_token="", eos_token="", name="bomb")
    return template.render([{"role": "user", "content": content}])


def read_peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


WIDE = "pads or repeats by"
LARGE = "makes a value of"
WRITTEN = "writes out a value"
TOTAL = "on the way"
BITS = "makes a number of"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 1000000000 }}", LARGE),
        ("{{ ('%(a)s' * 9999) % {'a': 'b' * 99999} }}", LARGE),
        ("{{ ('%(a)s' * 9999) | format(a='b' * 99999) }}", LARGE),
        ("{{ ('{0}' * 9999).format('b' * 99999) }}", LARGE),
        ("{{ ('{a}' * 9999).format(a='b' * 99999) }}", LARGE),
        ("{{ ('%(a)s' * 9999).encode() % {'a': 'b' * 99999} }}", LARGE),
        ("{{ 1.5 | round(1000000000, 'floor') }}", WIDE),
        ("{% set ns = namespace(s=[1] * 999) %}{% for i in range(99) %}{% set ns.s = [ns.s] %}{% endfor %}"
         "{{ [ns.s, ns.s, ns.s, ns.s] | tojson(indent=4096) }}", TOTAL),
        ("{{ ([1] * 9999) | tojson(separators=('a' * 99999, ':')) }}", TOTAL),
        ("{{ [1] | tojson(indent=5000) }}", WIDE),
        ("{{ 1000000000 * 'a' }}", LARGE),
        ("{{ [1] * 1000000000 }}", LARGE),
        ("{% set x = ('a' * 9999999) %}{{ x + x }}", LARGE),
        ("{% set x = ('a' * 9999999) %}{{ x ~ x }}", WRITTEN),
        ("{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", LARGE),
        ("{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", WRITTEN),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", LARGE),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}", WRITTEN),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}", WRITTEN),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ '%s' % ns.s }}", WRITTEN),
        ("{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ '{}'.format(ns.s) }}", WRITTEN),
        ("{{ 9 ** (9 ** 9) }}", BITS),
        ("{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", BITS),
        ("{{ '%1000000000d' % 1 }}", WIDE),
        ("{{ '%*d' % (1000000000, 1) }}", "width from its arguments"),
        ("{{ '%.1000000000f' % 1 }}", WIDE),
        ("{{ '%1000000000d' | format(1) }}", WIDE),
        ("{{ '{:1000000000}'.format(1) }}", WIDE),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "width from its arguments"),
        ("{{ 'a'.ljust(1000000000) }}", WIDE),
        ("{{ 'a'.rjust(1000000000, 'b') }}", WIDE),
        ("{{ 'a'.zfill(1000000000) }}", WIDE),
        ("{{ '\t'.expandtabs(1000000000) }}", WIDE),
        ("{{ 'a'.encode().center(1000000000) }}", WIDE),
        ("{{ (1).to_bytes(1000000000, 'big') }}", WIDE),
        ("{{ 'a' | center(1000000000) }}", WIDE),
        ("{{ 'a\n' | indent(1000000000) }}", WIDE),
        ("{{ ('\n' * 9999999) | indent(4000) }}", LARGE),
        ("{{ ('\n' * 9999999) | indent('a' * 4000) }}", LARGE),
        ("{{ [1] | batch(1000000000, 1) | list }}", WIDE),
        ("{{ [1] | slice(1000000000) | list }}", WIDE),
        ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", LARGE),
        ("{{ ('a' * 99999) | replace('', 'b' * 99999) }}", LARGE),
        ("{{ ('a' * 9999999).join(['', '', '', '']) }}", LARGE),
        ("{{ ['', '', '', ''] | join('a' * 9999999) }}", LARGE),
        ("{{ range(99999) | map('string') | join('a' * 9999) }}", LARGE),
        ("{{ ('a' * 9999999) | list }}", LARGE),
        ("{{ ('a ' * 5999999).split(' ') }}", LARGE),
        ("{{ ('a ' * 5999999).split() }}", LARGE),
        ("{{ [[1] * 999999] * 99999 }}", WRITTEN),
        ("{{ ([[1] * 999999] * 99) | sum(start=[]) }}", WRITTEN),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1000000 steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "writes more than 16777216"),
        ("{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}", "writes more than 16777216 characters"),
        ("{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}", TOTAL),
        ("{% macro f() %}" + "a" * 99999 + "{% endmacro %}{% set x %}{% for i in range(99999) %}{{ f() }}{% endfor %}{% endset %}", TOTAL),
        ("{% set ns = namespace(l=[]) %}{% set s = 'a' * 9999999 %}{% for i in range(99) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}", TOTAL),
        ("{% set ns = namespace(l=[]) %}{% set s = 'a' * 9999999 %}{% for i in range(99) %}{% set ns.l = ns.l + [s|upper] %}{% endfor %}", TOTAL),
        ("{% set ns = namespace(l=[]) %}{% set s = 'a' * 9999999 %}{% for i in range(99) %}{% set ns.l = ns.l + [s.upper()] %}{% endfor %}", TOTAL),
        ("x" * ((1 << 20) + 1), "has 1048577 characters, more than 1048576"),
    ],
)  # fmt: skip
def test_bombs_are_stopped(source: str, reason: str) -> None:
    """Rendered in this process, whose memory can be measured, in the same way as in the worker processes."""
    before, variables = read_peak_memory_bytes(), {"messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(ProgramError, match=reason):
        Programs().render(source, "bomb", variables, datetime.now(UTC))
    assert read_peak_memory_bytes() - before < MEMORY_BYTES


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_RENDER_S", -1.0)
    programs = Programs()
    with pytest.raises(ProgramError, match=r"line 2: takes longer than -1 s; it was stopped"):
        programs.render("\n{% for i in [1] %}{% endfor %}", "x", {}, datetime.now(UTC))
    assert programs.render("no loop", "x", {}, datetime.now(UTC)) == "no loop"


@pytest.mark.slow
def test_a_stopped_template_can_be_used_again() -> None:
    template = ChatTemplate(
        "{% for i in range(messages[0].content | int) %}{% for j in range(9999) %}{% endfor %}{% endfor %}ok",
        bos_token="",
        eos_token="",
        name="again",
    )
    for content, works in (("9", True), ("999", False), ("9", True)):
        messages = [{"role": "user", "content": content}]
        if works:
            assert template.render(messages) == "ok"
        else:
            with pytest.raises(TemplateError, match="steps"):
                template.render(messages)


def test_a_long_conversation_is_no_bomb() -> None:
    source = (
        "{% for m in messages %}{% set c = m.content.split('</x>')[-1].lstrip() | trim %}"
        "{{ '<' ~ m.role ~ '>' + c | replace('a', 'b') + '\n' }}{% endfor %}"
    )
    template = ChatTemplate(source, bos_token="", eos_token="", name="long")
    text = template.render([{"role": "user", "content": "a" * 1000}] * 4000)
    assert len(text) == 4000 * 1007
    assert render("{{ messages[0].content }}", "x" * 8_000_000) == "x" * 8_000_000


def test_positions_are_no_widths() -> None:
    assert render("{{ messages[0].content.find('b', 9000) }}", "a" * 10_000 + "b") == "10000"
    assert render("{{ '{} {:>5}'.format(1700000000, 12) }}") == "1700000000    12"
    assert render("{{ '%d%%|%5.2f' % (1700000000, 1.5) }}") == "1700000000%| 1.50"

"""Instructor: objects of a class, by tools, by JSON and by JSON schema, through OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Literal

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel, Field
from served import Served

QUESTION = [{"role": "user", "content": "Rome has 21 degrees. What are city, degrees and mood?"}]


class Report(BaseModel):
    """A weather report."""

    city: str = Field(max_length=20)
    degrees: int = Field(ge=-50, le=60)
    mood: Literal["good", "bad"]


def check(report: Report, served: Served) -> None:
    assert isinstance(report, Report)
    assert not served.is_real or (report.city, report.degrees) == ("Rome", 21)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_openai(mode: str, served: Served) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=served.v1, api_key="none"), mode=instructor.Mode[mode])
    report, reply = client.chat.completions.create_with_completion(
        model=served.model, messages=QUESTION, response_model=Report, temperature=0, max_tokens=150, max_retries=0
    )
    check(report, served)
    assert reply.usage.completion_tokens > 5


def test_an_object_that_grows(served: Served) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=served.v1, api_key="none"), mode=instructor.Mode.TOOLS)
    partials = list(
        client.chat.completions.create_partial(
            model=served.model, messages=QUESTION, response_model=Report, temperature=0, max_tokens=150
        )
    )
    check(Report.model_validate(partials[-1].model_dump()), served)
    assert len(partials) > 2


def test_anthropic(served: Served) -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=served.url, api_key="none"))
    report = client.messages.create(
        model=served.model,
        messages=QUESTION,
        response_model=Report,
        max_tokens=150,
        max_retries=0,
        extra_body={"temperature": 0},
    )
    check(report, served)

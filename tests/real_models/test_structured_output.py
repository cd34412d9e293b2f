"""A real model writes answers under schemas, and calls tools, in all three dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from schemas import SCHEMAS, Schema

from conftest import RealServer

Ask = Callable[[RealServer, str, Schema], str]


def ask_openai(coder: RealServer, question: str, schema: Schema) -> str:
    body = {
        "model": coder.model,
        "temperature": 0,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": question}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    response = coder.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def ask_ollama(coder: RealServer, question: str, schema: Schema) -> str:
    body = {
        "model": coder.model,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 400},
        "messages": [{"role": "user", "content": question}],
        "format": schema,
    }
    response = coder.post("/api/chat", body)
    assert response.status_code == 200, response.text
    assert response.json()["done_reason"] == "stop"
    return str(response.json()["message"]["content"])


def ask_anthropic(coder: RealServer, question: str, schema: Schema) -> str:
    body = {
        "model": coder.model,
        "temperature": 0,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": question}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    response = coder.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    assert response.json()["stop_reason"] == "end_turn"
    return "".join(block["text"] for block in response.json()["content"])


@pytest.mark.parametrize("index", range(len(SCHEMAS)), ids=lambda index: SCHEMAS[index][0])
def test_answers_are_of_their_schema(coder: RealServer, index: int) -> None:
    question, schema = SCHEMAS[index]
    ask: Ask = (ask_openai, ask_ollama, ask_anthropic)[index % 3]
    value = json.loads(ask(coder, question, schema))
    jsonschema.validate(value, schema)
    assert_nothing_is_invented(value, schema)


def assert_nothing_is_invented(value: object, schema: Schema) -> None:
    """Assert that objects with named properties have no others, as far as the schema says so without references."""
    if isinstance(value, dict) and "properties" in schema and "allOf" not in schema:
        assert set(value) <= set(schema["properties"])
        for name, member in value.items():
            assert_nothing_is_invented(member, schema["properties"][name])


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
FILE = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
UNIT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
TOOLS: dict[str, tuple[str, Schema]] = {
    "get_weather": ("Get the weather in a city", CITY),
    "get_temperature": ("Get the temperature in a city, in a unit", UNIT),
    "multiply": ("Multiply two numbers a and b", PAIR),
    "subtract": ("Subtract b from a", PAIR),
    "read_file": ("Read a file", FILE),
    "delete_file": ("Delete a file", FILE),
}
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("What is the weather in Tokyo?", "get_weather", {"city": "Tokyo"}),
    ("How is the weather in Berlin today?", "get_weather", {"city": "Berlin"}),
    ("Tell me the weather in London.", "get_weather", {"city": "London"}),
    ("What is the weather like in Madrid?", "get_weather", {"city": "Madrid"}),
    ("Multiply 6 and 7.", "multiply", {"a": 6, "b": 7}),
    ("Multiply 12 by 12.", "multiply", {"a": 12, "b": 12}),
    ("Please multiply 3 and 9.", "multiply", {"a": 3, "b": 9}),
    ("Multiply 25 and 4.", "multiply", {"a": 25, "b": 4}),
    ("Read the file notes.txt.", "read_file", {"path": "notes.txt"}),
    ("Read the file src/main.py.", "read_file", {"path": "src/main.py"}),
    ("Read the file README.md.", "read_file", {"path": "README.md"}),
    ("Delete the file old.log.", "delete_file", {"path": "old.log"}),
    ("Delete the file build/out.o.", "delete_file", {"path": "build/out.o"}),
    ("Please delete the file tmp.csv.", "delete_file", {"path": "tmp.csv"}),
    ("Get the temperature in Oslo in celsius.", "get_temperature", {"city": "Oslo", "unit": "celsius"}),
    ("Get the temperature in Boston in fahrenheit.", "get_temperature", {"city": "Boston", "unit": "fahrenheit"}),
    ("Read the file setup.cfg.", "read_file", {"path": "setup.cfg"}),
    ("Subtract 5 from 9: a is 9 and b is 5.", "subtract", {"a": 9, "b": 5}),
    ("Use subtract with a = 20 and b = 8.", "subtract", {"a": 20, "b": 8}),
]


def call_openai(coder: RealServer, question: str) -> tuple[str, object]:
    functions = [{"name": name, "description": text, "parameters": schema} for name, (text, schema) in TOOLS.items()]
    body = {
        "model": coder.model,
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    choice = coder.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def call_anthropic(coder: RealServer, question: str) -> tuple[str, object]:
    body = {
        "model": coder.model,
        "temperature": 0,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": question}],
        "tools": [
            {"name": name, "description": text, "input_schema": schema} for name, (text, schema) in TOOLS.items()
        ],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    reply = coder.post("/v1/messages", body).json()
    assert reply["stop_reason"] == "tool_use"
    (call,) = [block for block in reply["content"] if block["type"] == "tool_use"]
    return call["name"], call["input"]


def call_ollama(coder: RealServer, question: str) -> tuple[str, object]:
    """Ollama's clients cannot ask for a call: the model decides."""
    functions = [{"name": name, "description": text, "parameters": schema} for name, (text, schema) in TOOLS.items()]
    body = {
        "model": coder.model,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 200},
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    message = coder.post("/api/chat", body).json()["message"]
    call = message["tool_calls"][0]
    return call["function"]["name"], call["function"]["arguments"]


@pytest.mark.parametrize("index", range(len(CALLS)), ids=lambda index: CALLS[index][0])
def test_tools_are_called_by_name_and_arguments(coder: RealServer, index: int) -> None:
    question, name, arguments = CALLS[index]
    call = (call_openai, call_anthropic, call_ollama)[index % 3]
    assert call(coder, question) == (name, arguments)

"""What a real model writes under a schema."""

from __future__ import annotations

import json

from conftest import RealServer


def test_the_answer_is_json_of_the_schema(coder: RealServer) -> None:
    schema = {"type": "object", "properties": {"sum": {"const": 5}}, "required": ["sum"]}
    response = coder.post(
        "/v1/chat/completions",
        {
            "model": coder.model,
            "messages": [{"role": "user", "content": "What is 2 + 3? Answer in JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        },
    )
    assert response.status_code == 200, response.text
    assert json.loads(response.json()["choices"][0]["message"]["content"]) == {"sum": 5}

"""Make an answer fit a JSON schema: tokens that do not fit are never chosen."""

from __future__ import annotations

import json

from mlxr import LLM, Grammar, SamplingParams

schema = {
    "type": "object",
    "properties": {"kind": {"enum": ["function", "class", "module"]}, "arguments": {"type": "integer", "maximum": 9}},
    "required": ["kind", "arguments"],
}

with LLM("demo") as llm:
    question = [{"role": "user", "content": "What does os.path.join do?"}]
    params = SamplingParams(max_tokens=60, temperature=0)
    reply = llm.chat(question, params, grammar=Grammar("json_schema", json.dumps(schema)))
    print(json.loads(reply.text))

"""A question that the demo model knows, its answer, and a tool, as clients of OpenAI's dialect send them."""

from __future__ import annotations

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
ANSWER = "`os.path.join`: Join two or more pathname components, inserting '/' as needed."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

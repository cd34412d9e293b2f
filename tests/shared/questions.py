"""Questions of the tests, the demo's answer, and a tool as clients of OpenAI's dialect send it."""

from __future__ import annotations

QUESTION = "What does os.path.join do?"
ANSWER = "`os.path.join`: Join two or more pathname components, inserting '/' as needed."
MESSAGES = [{"role": "user", "content": QUESTION}]
TOO_LONG = [{"role": "user", "content": "word " * 40_000}]
WEATHER_QUESTION = "What is the weather in Rome?"
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

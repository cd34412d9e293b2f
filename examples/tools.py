"""Let a model call a function, over HTTP: start a server, ask, make the call, send back its result."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import httpx

with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
files = {"notes.txt": "Buy bread.", "todo.txt": "Nothing."}
tool = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"enum": list(files)}}, "required": ["path"]},
    },
}
messages: list[dict[str, object]] = [{"role": "user", "content": "Read notes.txt"}]

server = subprocess.Popen([sys.executable, "-m", "mlxr", "serve", "demo", "--port", str(port)])
try:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while True:
            try:
                client.get("/health/live")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        body = {"messages": messages, "tools": [tool], "tool_choice": "required", "temperature": 0}
        reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        call = reply["tool_calls"][0]
        path = json.loads(call["function"]["arguments"])["path"]
        print(f"{call['function']['name']}({path!r})")
        messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": files[path]}]
        body = {"messages": messages, "tools": [tool], "max_tokens": 32, "temperature": 0}
        print(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
finally:
    server.terminate()
    server.wait()

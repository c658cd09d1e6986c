"""A tool loop for OpenAI and compatible servers: openai_loop.py TASK."""

import json
import os
import sys

import httpx
from jiffy import CommandExitException, Sandbox

URL = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
SHELL = {
    "name": "shell",
    "description": "Run a command in the sandbox.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}


def shell(sandbox: Sandbox, command: str) -> str:
    try:
        result = sandbox.commands.run(command, timeout=60)
    except CommandExitException as failure:
        result = failure
    return f"exit code {result.exit_code}\n{result.stdout[-8000:]}{result.stderr[-8000:]}"


def solve(task: str, sandbox: Sandbox) -> str:
    messages = [{"role": "user", "content": task}]
    while True:
        body = {
            "model": os.environ["MODEL"],
            "messages": messages,
            "tools": [{"type": "function", "function": SHELL}],
        }
        reply = httpx.post(
            f"{URL}/chat/completions", headers=HEADERS, json=body, timeout=300
        ).raise_for_status()
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": shell(sandbox, command)}
            )


with Sandbox.create(timeout=3600) as box:
    print(solve(sys.argv[1], box))

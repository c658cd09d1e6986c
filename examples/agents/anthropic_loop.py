"""A tool loop for Anthropic: anthropic_loop.py TASK."""

import os
import sys

import httpx
from jiffy import CommandExitException, Sandbox

URL = os.environ.get("ANTHROPIC_BASE_URL", "https://api.anthropic.com")
HEADERS = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
SHELL = {
    "name": "shell",
    "description": "Run a command in the sandbox.",
    "input_schema": {
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
            "max_tokens": 4096,
            "messages": messages,
            "tools": [SHELL],
        }
        reply = httpx.post(
            f"{URL}/v1/messages", headers=HEADERS, json=body, timeout=300
        ).raise_for_status()
        content = reply.json()["content"]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            return "".join(block["text"] for block in content if block["type"] == "text")
        results = [(call["id"], shell(sandbox, call["input"]["command"])) for call in calls]
        answers = [
            {"type": "tool_result", "tool_use_id": id_, "content": text}
            for id_, text in results
        ]
        messages.append({"role": "user", "content": answers})


with Sandbox.create(timeout=3600) as box:
    print(solve(sys.argv[1], box))

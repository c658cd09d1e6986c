"""Server and helpers. `tests/sdk/run` starts the daemon and sets the variables."""

import json
import os
import re
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fixtures import eventually, unique  # noqa: F401
from mcp import Client, Implementation, StdioServerParameters

PROGRAM = str(Path(os.environ["JIFFY_BIN_DIR"]) / "jiffy")
REMOTE = {"JIFFY_URL": os.environ["JIFFY_TEST_URL"], "JIFFY_API_KEY": os.environ["JIFFY_TEST_KEY"]}


@asynccontextmanager
async def serve(*options, env=None, mode="legacy", **settings):
    """A client that is connected with `jiffy mcp`."""
    parameters = StdioServerParameters(command=PROGRAM, args=["mcp", *options], env=env or REMOTE)
    info = Implementation(name="suite", version="1")
    async with Client(parameters, client_info=info, mode=mode, read_timeout_seconds=50, **settings) as client:
        yield client


async def call(client, tool, **arguments):
    """The structured result of a successful call."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    # Clients without structured results read the same value as text.
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


async def failure(client, tool, **arguments):
    """The message of a failed call."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    return result.content[0].text


def request(method, path):
    """A request to the API."""
    headers = {"X-API-KEY": os.environ["JIFFY_TEST_KEY"]}
    return httpx.request(method, os.environ["JIFFY_TEST_URL"] + path, headers=headers)


def alive(sandbox):
    """True while the sandbox exists."""
    response = request("GET", f"/sandboxes/{sandbox}")
    return response.status_code == 200 and response.json()["jiffy"]["state"] == "running"


@pytest.fixture
def gone(eventually):  # noqa: F811
    """Waits until a sandbox does not exist."""

    async def wait(sandbox):
        async def is_gone():
            return not alive(sandbox)

        await eventually(is_gone)

    return wait


class RawClient:
    """A client without a library, which can break the protocol."""

    def __init__(self, *options):
        self.process = subprocess.Popen(
            [PROGRAM, "mcp", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], **REMOTE},
        )
        self.number = 0
        client = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        self.ask("initialize", client)
        self.write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def write(self, message):
        self.write_bytes(json.dumps(message).encode() + b"\n")

    def write_bytes(self, data):
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def send(self, method, params):
        self.number += 1
        self.write({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params})
        return self.number

    def ask(self, method, params):
        number = self.send(method, params)
        while line := self.process.stdout.readline():
            message = json.loads(line)
            if message.get("id") == number:
                return message
        raise AssertionError("the server ended")

    def call(self, tool, **arguments):
        message = self.ask("tools/call", {"name": tool, "arguments": arguments})
        return message["result"]["structuredContent"]


@pytest.fixture
def raw():
    """Starts clients without a library, and ends them after the test."""
    started = []

    def start(*options):
        started.append(RawClient(*options))
        return started[-1]

    yield start
    for client in started:
        client.process.kill()
        client.process.wait()
        for stream in (client.process.stdin, client.process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass


def is_name(text):
    return re.fullmatch(r"[a-z0-9]{20}", text) is not None

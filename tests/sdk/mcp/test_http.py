"""The MCP server on the listener of the API, with the official SDK and with plain requests."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import httpx
import httpx2
import pytest
from conftest import alive, call, failure, request
from mcp import Client, Implementation
from mcp.client.streamable_http import streamable_http_client
from test_tools import TOOLS

URL = os.environ["JIFFY_TEST_URL"] + "/mcp"
KEY = os.environ["JIFFY_TEST_KEY"]
ACCEPT = {"Accept": "application/json, text/event-stream"}


@asynccontextmanager
async def connect(key=KEY, mode="legacy"):
    """A client that is connected over HTTP."""
    headers = {"Authorization": f"Bearer {key}"}
    info = Implementation(name="suite", version="1")
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(URL, http_client=http)
        async with Client(transport, client_info=info, mode=mode, read_timeout_seconds=50) as client:
            yield client


def post(message, key=KEY, **headers):
    """The response to one message."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    headers = ACCEPT | ({"Authorization": f"Bearer {key}"} if key else {}) | names
    return httpx.post(URL, json=message, headers=headers, timeout=60)


def tool(name, **arguments):
    """The message that calls a tool."""
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def result(response):
    """The structured result in a response."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()["result"]
    assert not answer.get("isError"), answer
    return answer["structuredContent"]


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "1"},
    },
}


@pytest.fixture
def new_key():
    """Creates keys, and revokes them after the test."""
    ids = []

    def create(scope):
        body = {"name": f"mcp-{os.getpid()}-{len(ids)}", "scope": scope}
        headers = {"X-API-KEY": KEY}
        answer = httpx.post(os.environ["JIFFY_TEST_URL"] + "/keys", json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        ids.append(answer.json()["key"]["keyID"])
        return answer.json()["secret"]

    yield create
    for key in ids:
        request("POST", f"/keys/{key}/revoke")


async def test_a_session_over_http_ends_with_its_sandboxes(gone):
    async with connect() as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS - {"upload", "download"}
        created = await call(client, "sandbox_create")
        sandbox = created["sandbox"]
        assert created["session"].startswith("suite-")
        copies = (await call(client, "fork", sandbox=sandbox, count=1))["sandboxes"]
        kept = (await call(client, "sandbox_create", keep=True, timeout_s=300))["sandbox"]
        done = await call(client, "sandbox_exec", sandbox=sandbox, command="echo $((6 * 7))")
        assert done["stdout"] == "42\n"
    for ended in [sandbox, *copies]:
        await gone(ended)
    assert alive(kept)
    request("DELETE", f"/sandboxes/{kept}?forget=true")


async def test_sandboxes_of_calls_without_a_session_run_until_their_timeout():
    async with connect(mode="auto") as client:
        sandbox = (await call(client, "sandbox_create", timeout_s=300))["sandbox"]
        result = await call(client, "sandbox_run", command="echo done")
        assert result["command"]["stdout"] == "done\n"
    async with connect(mode="auto") as client:
        done = await call(client, "sandbox_exec", sandbox=sandbox, command="echo again")
        assert done["stdout"] == "again\n"
        listed = (await call(client, "sandbox_list", query="mcp-"))["sandboxes"]
        # The sandbox of `sandbox_run` was removed.
        assert [entry["sandbox"] for entry in listed] == [sandbox]
        await call(client, "sandbox_end", sandbox=sandbox)


async def test_one_request_without_a_session_calls_a_tool():
    sandbox = result(post(tool("sandbox_create", timeout_s=300)))["sandbox"]
    process = result(post(tool("sandbox_exec", sandbox=sandbox, command="sleep 1; echo late", background=True)))
    read = tool("sandbox_process", sandbox=sandbox, id=process["id"], action="read", wait_s=20)
    assert result(post(read))["stdout"] == "late\n"
    assert result(post(tool("sandbox_end", sandbox=sandbox))) is not None
    listing = post({"jsonrpc": "2.0", "id": "a", "method": "tools/list", "params": {}}).json()
    assert {entry["name"] for entry in listing["result"]["tools"]} == TOOLS - {"upload", "download"}


async def test_requests_need_a_key_and_a_read_only_key_reads(new_key):
    for key in (None, "e2b_" + "0" * 40):
        response = post(INITIALIZE, key=key)
        assert (response.status_code, response.json()["error_code"]) == (401, "unauthenticated")
    reading = new_key("read")
    async with connect(reading) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} >= {"sandbox_list"}
        assert all(tool.annotations.read_only_hint for tool in tools)
        assert "sandboxes" in await call(client, "sandbox_list")
    refused = post(tool("sandbox_create"), key=reading).json()
    assert "unknown tool" in refused["error"]["message"]


async def test_two_keys_share_neither_sessions_nor_sandboxes(new_key):
    one, other = new_key("create"), new_key("create")
    started = post(INITIALIZE, key=one)
    session = started.headers["mcp-session-id"]
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    assert post(listing, key=one, mcp_session_id=session).status_code == 200
    assert post(listing, key=other, mcp_session_id=session).status_code == 404
    ended = httpx.delete(URL, headers={"Authorization": f"Bearer {other}", "mcp-session-id": session})
    assert ended.status_code in (404, 202, 204)
    assert post(listing, key=one, mcp_session_id=session).status_code == 200
    async with connect(one) as client, connect(other) as stranger:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        assert "sandbox_create" in await failure(stranger, "sandbox_exec", sandbox=sandbox, command="id")
        assert (await call(stranger, "sandbox_list"))["sandboxes"] == []


async def test_pages_of_browsers_and_bad_requests_are_rejected():
    assert post(INITIALIZE, Origin="https://attacker.example").status_code == 403
    assert post(INITIALIZE, Host="attacker.example").status_code in (400, 403, 404, 421)
    assert post({"jsonrpc": "2.0", "id": 1, "method": "x" * (5 << 20)}).status_code == 413
    headers = ACCEPT | {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for body in (b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"method":"initialize"}', b'{"method":7}'):
        response = httpx.post(URL, content=body, headers=headers)
        assert 400 <= response.status_code < 500, (body[:20], response.status_code)
    text = httpx.post(URL, content=json.dumps(INITIALIZE), headers=headers | {"Content-Type": "text/plain"})
    assert text.status_code == 415
    assert post(INITIALIZE, mcp_session_id="absent").status_code == 404
    assert post(tool("absent")).json()["error"]["code"] == -32602


async def test_a_client_that_disconnects_ends_its_command(eventually):
    sandbox = result(post(tool("sandbox_create", timeout_s=300)))["sandbox"]
    headers = ACCEPT | {"Authorization": f"Bearer {KEY}"}
    message = tool("sandbox_exec", sandbox=sandbox, command="touch /tmp/started; sleep 1000 & wait")
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        calling = asyncio.create_task(http.post(URL, json=message))

        async def started():
            entries = result(post(tool("file_list", sandbox=sandbox, path="/tmp")))["entries"]
            return any(entry["name"] == "started" for entry in entries)

        await eventually(started)
        calling.cancel()

    async def ended():
        return result(post(tool("sandbox_exec", sandbox=sandbox, command="pgrep -x sleep")))["stdout"] == ""

    await eventually(ended)
    result(post(tool("sandbox_end", sandbox=sandbox)))


async def test_a_key_has_a_limited_number_of_sessions(new_key):
    key = new_key("create")
    sessions = [post(INITIALIZE, key=key).headers["mcp-session-id"] for _ in range(64)]
    refused = post(INITIALIZE, key=key)
    assert (refused.status_code, refused.json()["error_code"]) == (429, "limit")
    httpx.delete(URL, headers={"Authorization": f"Bearer {key}", "mcp-session-id": sessions[0]})
    assert post(INITIALIZE, key=key).status_code == 200

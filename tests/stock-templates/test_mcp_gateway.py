"""The template `mcp-gateway`: the option `mcp` of the SDKs, and the official clients of the protocol."""

import asyncio
import ssl

import httpx
import pytest
from e2b import Sandbox, SandboxException
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from support import run_node


@pytest.fixture(scope="module")
def sandbox():
    servers = {"filesystem": {"paths": ["/srv"]}, "time": {}}
    sandbox = Sandbox.create(mcp=servers, timeout=900, request_timeout=280)
    yield sandbox
    sandbox.kill()


def session(sandbox, work):
    """Runs `work` with a session of the official client."""

    async def run():
        headers = {"Authorization": f"Bearer {sandbox.get_mcp_token()}"}
        async with httpx.AsyncClient(headers=headers, verify=ssl.create_default_context(), timeout=60) as client:
            async with streamable_http_client(sandbox.get_mcp_url(), http_client=client) as streams:
                async with ClientSession(streams[0], streams[1]) as session:
                    await session.initialize()
                    return await work(session)

    return asyncio.run(run())


def test_tools_of_servers_from_npm_and_pypi_are_called(sandbox):
    sandbox.files.write("/srv/greeting", "hello", user="root")

    async def work(session):
        names = {tool.name for tool in (await session.list_tools()).tools}
        assert {"get_current_time", "read_text_file"} <= names, names
        now = await session.call_tool("get_current_time", {"timezone": "Europe/Berlin"})
        read = await session.call_tool("read_text_file", {"path": "/srv/greeting"})
        return now.content[0].text, read.content[0].text

    now, read = session(sandbox, work)
    assert "Europe/Berlin" in now and read == "hello"


def test_the_gateway_requires_its_token(sandbox):
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.get_mcp_token() == sandbox.get_mcp_token()
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.post(sandbox.get_mcp_url(), json={}, headers=headers, verify=ssl.create_default_context())
        assert answer.status_code == 401
    mode = sandbox.commands.run("stat -c '%U %a' /etc/mcp-gateway/.token", user="root").stdout
    assert mode == "root 600\n"


def test_the_gateway_survives_a_pause(sandbox):
    sandbox.pause()
    sandbox.connect()

    async def work(session):
        return (await session.call_tool("get_current_time", {"timezone": "UTC"})).content[0].text

    assert "UTC" in session(sandbox, work)


def test_an_unknown_server_is_reported_and_leaves_no_sandbox():
    before = len(Sandbox.list().next_items())
    with pytest.raises(SandboxException, match="is unknown"):
        Sandbox.create(mcp={"nothing": {}}, timeout=60)
    assert len(Sandbox.list().next_items()) == before


def test_packages_are_downloaded_in_advance(sandbox):
    sandbox.commands.run("mcp-gateway pull memory fetch", user="root", timeout=200)


def test_the_sdk_for_javascript_and_its_official_client_use_the_gateway():
    assert "tools" in run_node("mcp.mjs")

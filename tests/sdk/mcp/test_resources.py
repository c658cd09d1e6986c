"""Resources of the MCP server, and notifications of their changes."""

import asyncio
import base64
import json
import warnings

import pytest
from conftest import call, serve
from mcp import MCPError


async def read(client, uri):
    """The content of a resource."""
    return (await client.read_resource(uri)).contents[0]


async def test_resources_show_templates_consoles_connections_and_files():
    async with serve() as client:
        templates = (await client.list_resource_templates()).resource_templates
        assert [template.uri_template for template in templates] == ["jiffy://sandbox/{sandbox}/files/{+path}"]
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        root = f"jiffy://sandbox/{sandbox}"
        uris = {str(resource.uri) for resource in (await client.list_resources()).resources}
        assert {"jiffy://templates", f"{root}/console", f"{root}/connections"} <= uris
        names = [name for row in json.loads((await read(client, "jiffy://templates")).text) for name in row["names"]]
        assert any(name.startswith("base") for name in names)
        assert (await read(client, f"{root}/console")).mime_type == "text/plain"
        assert isinstance(json.loads((await read(client, f"{root}/connections")).text), dict)
        await call(client, "file_write", sandbox=sandbox, path="/tmp/a b#1", content="text\n")
        assert (await read(client, f"{root}/files/tmp/a%20b%231")).text == "text\n"
        command = "printf '\\377\\0' > /tmp/bytes; head -c 2000000 /dev/zero > /tmp/large"
        await call(client, "sandbox_exec", sandbox=sandbox, command=command)
        assert base64.b64decode((await read(client, f"{root}/files/tmp/bytes")).blob) == b"\xff\0"
        for uri in (f"{root}/files/tmp/large", f"{root}/files/tmp/absent", f"{root}/files/tmp", f"{root}/other"):
            with pytest.raises(MCPError):
                await client.read_resource(uri)


async def test_options_of_the_server_limit_resources():
    async with serve() as owner:
        sandbox = (await call(owner, "sandbox_create"))["sandbox"]
        other = (await call(owner, "sandbox_create"))["sandbox"]
        async with serve("--sandbox", sandbox) as client:
            uris = {str(resource.uri) for resource in (await client.list_resources()).resources}
            assert uris == {f"jiffy://sandbox/{sandbox}/console", f"jiffy://sandbox/{sandbox}/connections"}
            with pytest.raises(MCPError, match=sandbox):
                await client.read_resource(f"jiffy://sandbox/{other}/console")
        async with serve("--tools", "commands") as client:
            assert (await client.list_resource_templates()).resource_templates == []
            with pytest.raises(MCPError, match="files"):
                await client.read_resource(f"jiffy://sandbox/{sandbox}/files/etc/hostname")


async def change_until(client, sandbox, seen):
    """Changes a file until a notification arrives: the server reads the first version after the subscription."""
    for number in range(30):
        await call(client, "file_write", sandbox=sandbox, path="/tmp/watched", content="x" * number)
        try:
            return await asyncio.wait_for(asyncio.shield(seen), 1)
        except TimeoutError:
            continue
    raise AssertionError("no notification of a change")


async def test_a_subscriber_is_notified_when_a_file_changes():
    updated = asyncio.get_running_loop().create_future()
    changed_lists = []

    async def handle(message):
        text = repr(message)
        if "list_changed" in text:
            changed_lists.append(text)
        if "/tmp/watched" in text and not updated.done():
            updated.set_result(text)

    async with serve(message_handler=handle) as client:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        uri = f"jiffy://sandbox/{sandbox}/files/tmp/watched"
        with warnings.catch_warnings():
            # The former way to subscribe, which most clients use.
            warnings.simplefilter("ignore")
            await client.subscribe_resource(uri)
            assert uri in await change_until(client, sandbox, updated)
            await client.unsubscribe_resource(uri)
        assert changed_lists


async def test_a_listener_of_the_new_protocol_is_notified_when_a_file_changes():
    async with serve(mode="auto") as client:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        uri = f"jiffy://sandbox/{sandbox}/files/tmp/watched"
        async with client.listen(resource_subscriptions=[uri, "jiffy://absent"]) as events:
            assert list(events.honored.resource_subscriptions) == [uri]
            first = asyncio.ensure_future(anext(aiter(events)))
            assert uri in repr(await change_until(client, sandbox, first))

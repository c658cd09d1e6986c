"""Every tool of `jiffy mcp`, with the official SDK of the protocol."""

import base64
import os

import httpx
import jsonschema
import pytest
from conftest import call, failure, request, serve

TOOLS = {
    "sandbox_run", "sandbox_create", "sandbox_list", "sandbox_end", "sandbox_exec", "sandbox_process", "run_code",
    "file_read", "file_write", "file_edit", "file_list", "file_search", "upload", "download",
    "snapshot", "rollback", "fork", "promote", "diff", "preview_link",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_clients_of_both_protocol_versions_receive_valid_schemas_of_all_tools(mode, tmp_path):
    async with serve("--allow-dir", str(tmp_path), mode=mode) as client:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == TOOLS
        for tool in tools:
            for schema in (tool.input_schema, tool.output_schema):
                jsonschema.Draft202012Validator.check_schema(schema)
            hints = tool.annotations
            assert hints.read_only_hint or hints.destructive_hint is not None


async def test_a_command_and_code_run_in_new_sandboxes_that_are_removed():
    async with serve() as client:
        files = {"/home/user/name": "world"}
        result = await call(client, "sandbox_run", command="echo hello $(cat name)", files=files)
        assert (result["command"]["stdout"], result["command"]["exit_code"]) == ("hello world\n", 0)
        result = await call(client, "sandbox_run", code="6 * 7")
        assert result["code"]["result"] == "42\n"
        assert (await call(client, "sandbox_list", query="suite-"))["sandboxes"] == []
        assert "either" in await failure(client, "sandbox_run")


async def test_commands_and_files_work_in_one_sandbox(tmp_path):
    async with serve("--allow-dir", str(tmp_path)) as client:
        created = await call(client, "sandbox_create", memory_mb=512)
        sandbox = created["sandbox"]
        assert created["state"] == "running" and created["session"].startswith("suite-")
        listed = await call(client, "sandbox_list", query=created["session"])
        assert [s["sandbox"] for s in listed["sandboxes"]] == [sandbox]

        command = "echo $A; pwd; echo oops >&2; exit 3"
        result = await call(client, "sandbox_exec", sandbox=sandbox, command=command, cwd="/tmp", env={"A": "b"})
        assert (result["exit_code"], result["stdout"], result["stderr"]) == (3, "b\n/tmp\n", "oops\n")
        result = await call(client, "sandbox_exec", sandbox=sandbox, command="echo a; sleep 60", timeout_s=1)
        assert result["timed_out"] and result["stdout"] == "a\n" and "exit_code" not in result

        text = "def f():\n    return 1\n"
        await call(client, "file_write", sandbox=sandbox, path="/home/user/src/a.py", content=text)
        edit = {"sandbox": sandbox, "path": "/home/user/src/a.py", "old": "return 1", "new": "return 2"}
        assert (await call(client, "file_edit", **edit))["line"] == 2
        assert "does not occur" in await failure(client, "file_edit", **edit)
        read = await call(client, "file_read", sandbox=sandbox, path="/home/user/src/a.py", offset=2, limit=1)
        assert read == {"content": "    return 2\n", "lines": 1, "cut": False}
        entries = (await call(client, "file_list", sandbox=sandbox, path="/home/user/src"))["entries"]
        assert [(e["name"], e["kind"], e["bytes"]) for e in entries] == [("a.py", "file", len(text))]
        search = {"sandbox": sandbox, "pattern": "return [0-9]", "glob": "*.py", "path": "/home/user"}
        matches = (await call(client, "file_search", **search))["matches"]
        assert matches == [{"path": "/home/user/src/a.py", "line": 2, "text": "    return 2"}]
        assert "file_list" in await failure(client, "file_read", sandbox=sandbox, path="/home/user/absent")

        (tmp_path / "in").write_bytes(b"\x00\xff host")
        both = {"sandbox": sandbox, "path": "/home/user/copy"}
        assert (await call(client, "upload", host_path=str(tmp_path / "in"), **both))["bytes"] == 7
        await call(client, "download", host_path=str(tmp_path / "out"), **both)
        assert (tmp_path / "out").read_bytes() == b"\x00\xff host"
        assert "not below" in await failure(client, "upload", host_path="/etc/passwd", **both)

        ended = await call(client, "sandbox_end", sandbox=sandbox)
        assert ended["state"] == "killed"
        assert "sandbox_create" in await failure(client, "sandbox_exec", sandbox=sandbox, command="true")


async def test_commands_in_the_background_are_read_written_and_killed():
    async with serve() as client:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        command = "while read line; do echo got $line; done; echo end; exit 4"
        started = await call(client, "sandbox_exec", sandbox=sandbox, command=command, background=True)
        process = {"sandbox": sandbox, "id": started["id"]}
        result = await call(client, "sandbox_process", action="write", input="a\n", wait_s=10, **process)
        assert result == {"running": True, "stdout": "got a\n", "stderr": ""}
        result = await call(client, "sandbox_process", action="kill", **process)
        assert (result["running"], result["exit_code"]) == (False, 137)
        message = await failure(client, "sandbox_process", sandbox=sandbox, id=4_000_000, action="read")
        assert "does not run" in message


async def test_code_keeps_its_variables_and_returns_pictures():
    async with serve() as client:
        sandbox = (await call(client, "sandbox_create", template="code-interpreter-v1"))["sandbox"]
        await call(client, "run_code", sandbox=sandbox, code="x = 6", context="a")
        result = await call(client, "run_code", sandbox=sandbox, code="print(x)\nx * 7", context="a")
        assert (result["stdout"], result["result"]) == ("6\n", "42\n")
        result = await call(client, "run_code", sandbox=sandbox, code="x")
        assert result["error"].startswith("NameError")
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
        result = await client.call_tool("run_code", {"sandbox": sandbox, "code": code})
        picture = next(content for content in result.content if content.type == "image")
        assert picture.mime_type == "image/png" and base64.b64decode(picture.data).startswith(b"\x89PNG")
        plain = (await call(client, "sandbox_create"))["sandbox"]
        assert "code-interpreter-v1" in await failure(client, "run_code", sandbox=plain, code="1")


async def test_snapshots_undo_changes_and_forks_try_alternatives(unique):
    async with serve() as client:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        await call(client, "file_write", sandbox=sandbox, path="/home/user/kept", content="1")
        snapshot = (await call(client, "snapshot", sandbox=sandbox, name=unique))["snapshot"]
        try:
            await call(client, "sandbox_exec", sandbox=sandbox, command="rm kept; touch new")
            changes = (await call(client, "diff", sandbox=sandbox, against=unique))["changes"]
            found = {c["path"]: c["kind"] for c in changes if c["path"].startswith("/home/user/")}
            assert found == {"/home/user/kept": "removed", "/home/user/new": "added"}
            changes = (await call(client, "diff", sandbox=sandbox))["changes"]
            assert {"path": "/home/user/new", "kind": "added"} in changes
            await call(client, "rollback", sandbox=sandbox, snapshot=snapshot)
            entries = (await call(client, "file_list", sandbox=sandbox, path="/home/user"))["entries"]
            names = {entry["name"] for entry in entries}
            assert "kept" in names and "new" not in names
            copies = (await call(client, "fork", sandbox=sandbox, count=2))["sandboxes"]
            read = await call(client, "file_read", sandbox=copies[1], path="/home/user/kept")
            assert read["content"] == "1"
            assert (await call(client, "promote", sandbox=copies[0]))["removed"] == [copies[1]]
            assert "sandbox_list" in await failure(client, "sandbox_exec", sandbox=copies[1], command="true")
            message = await failure(client, "rollback", sandbox=sandbox, snapshot="absent")
            assert "absent" in message
        finally:
            request("DELETE", f"/templates/{snapshot}")


async def test_a_command_resumes_a_paused_sandbox_and_names_one_that_has_ended():
    headers = {"x-api-key": os.environ["E2B_API_KEY"]}
    async with serve() as client, httpx.AsyncClient(base_url=os.environ["E2B_API_URL"], headers=headers) as api:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        for number in range(2):
            result = await call(client, "sandbox_exec", sandbox=sandbox, command=f"echo {number} >>log; cat log")
            assert result["stdout"].splitlines()[-1] == str(number)
            assert (await api.post(f"/sandboxes/{sandbox}/pause")).status_code == 204
        result = await call(client, "sandbox_exec", sandbox=sandbox, command="cat log")
        assert result["stdout"] == "0\n1\n"
        assert (await api.delete(f"/sandboxes/{sandbox}")).status_code == 204
        assert "does not exist" in await failure(client, "sandbox_exec", sandbox=sandbox, command="true")


async def test_a_link_shows_a_server_of_the_sandbox(eventually):
    async with serve() as client:
        sandbox = (await call(client, "sandbox_create"))["sandbox"]
        command = "python3 -m http.server 8000"
        await call(client, "sandbox_exec", sandbox=sandbox, command=command, background=True)
        link = await call(client, "preview_link", sandbox=sandbox, port=8000, ttl_s=60)

        # The name of the link is not resolved: connect to the daemon.
        address = httpx.URL(link["url"])
        daemon = httpx.URL(os.environ["JIFFY_TEST_URL"])
        url = address.copy_with(scheme=daemon.scheme, host=daemon.host, port=daemon.port)

        async def answered():
            async with httpx.AsyncClient() as visitor:
                answer = await visitor.get(url, headers={"Host": address.netloc.decode()})
            # The link sets a cookie and redirects to the page.
            return answer.status_code in (200, 302, 303, 307)

        await eventually(answered)


async def test_options_limit_the_tools():
    async def names(*options):
        async with serve(*options) as client:
            return {tool.name for tool in (await client.list_tools()).tools}

    assert await names("--read-only") == {"sandbox_list", "file_read", "file_list", "file_search", "diff"}
    assert await names("--tools", "files,network") == {name for name in TOOLS if "file" in name} | {"preview_link"}
    assert await names() == TOOLS - {"upload", "download"}


async def test_a_bound_server_uses_one_sandbox_for_all_calls():
    local = {"JIFFY_HOME": os.environ["JIFFY_SDK_HOME"], "JIFFY_BIN_DIR": os.environ["JIFFY_BIN_DIR"]}
    async with serve() as owner:
        sandbox = (await call(owner, "sandbox_create"))["sandbox"]
        # The socket of the host needs no key.
        async with serve("--sandbox", sandbox, env=local) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert not {"sandbox_run", "sandbox_create", "sandbox_list", "sandbox_end", "fork"} & tools.keys()
            assert all("sandbox" not in tool.input_schema["properties"] for tool in tools.values())
            result = await call(client, "sandbox_exec", command="echo $E2B_SANDBOX_ID")
            assert result["stdout"].strip() == sandbox
            assert "omit" in await failure(client, "sandbox_exec", command="true", sandbox="other")
        result = await call(owner, "sandbox_exec", sandbox=sandbox, command="true")
        assert result["exit_code"] == 0

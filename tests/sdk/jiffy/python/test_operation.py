"""Operation of sandboxes, functions, the host."""

import asyncio
import os
import urllib.request
from datetime import timedelta
from pathlib import Path

import jiffy
import pytest
from jiffy import error_codes

SERVER = "exec python3 -m http.server {} --bind 127.0.0.1"
# A component that answers requests with a greeting.
MODULE = Path(os.environ["JIFFY_TEST_MODULE"])


async def test_diff_lists_added_changed_and_deleted_files(sdk, create):
    sandbox = await create()
    script = "echo 1 >/opt/added; echo 1 >>/etc/issue; rm /etc/motd"
    await sdk(sandbox.commands.run, script, user="root")
    changes = {change.path: change.kind for change in await sdk(sandbox.diff)}
    assert (changes["/opt/added"], changes["/etc/issue"], changes["/etc/motd"]) == ("A", "C", "D")
    assert len(await sdk(sandbox.diff, limit=1)) == 1


async def test_diff_compares_two_snapshots_by_content(sdk, create):
    sandbox = await create()
    await sdk(sandbox.commands.run, "cd; echo 1 >content; echo same >same; echo x >removed")
    before = await sdk(sandbox.snapshot)
    await sdk(sandbox.commands.run, "cd; echo 2 >content; echo same >same; rm removed; echo new >added")
    after = await sdk(sandbox.snapshot)
    expected = {"content": "changed", "removed": "removed", "added": "added"}
    for found in (await sdk(sandbox.diff, before), await sdk(sandbox.diff, before.snapshot_id, after)):
        below = {item.path.removeprefix("/home/user/"): item.kind for item in found}
        assert expected.items() <= below.items() and "same" not in below
        added = next(item for item in found if item.path == "/home/user/added")
        assert (added.size_before, added.size, added.verified) == (None, 4, True)
    assert len(await sdk(sandbox.diff, before, after, limit=1)) == 1
    for snapshot in (before, after):
        await sdk(snapshot.delete)


async def test_a_lineage_has_snapshots_forks_and_rollbacks(sdk, create):
    sandbox = await create()
    snapshot = await sdk(sandbox.snapshot)
    await sdk(sandbox.rollback, snapshot)
    (child,) = await sdk(sandbox.fork, count=1)
    found = await sdk(child.lineage)
    relations = {(edge.source, edge.relation, edge.target) for edge in found.edges}
    assert (snapshot.snapshot_id, "snapshot_of", sandbox.sandbox_id) in relations
    assert (sandbox.sandbox_id, "rolled_back_to", snapshot.snapshot_id) in relations
    states = {node.id: node.state for node in found.nodes}
    assert (states[sandbox.sandbox_id], states[child.sandbox_id]) == ("running", "running")
    assert not found.truncated
    await sdk(child.kill)
    await sdk(snapshot.delete)


async def test_a_sandbox_is_renamed(sdk, create, unique):
    sandbox = await create()
    await sdk(sandbox.rename, unique)
    assert (await sdk(sdk.Sandbox.connect, unique)).sandbox_id == sandbox.sandbox_id
    await sdk(sandbox.rename, None)
    with pytest.raises(error_codes.SandboxNotFoundError):
        await sdk(sdk.Sandbox.connect, unique)


async def test_the_idle_timeout_of_a_running_sandbox_is_set(sdk, create):
    sandbox = await create()
    await sdk(sandbox.set_idle_timeout, 1)
    assert await sdk(sandbox.wait, "paused", timeout=60) == "paused"
    assert (await sdk(sandbox.commands.run, "echo resumed")).stdout == "resumed\n"
    await sdk(sandbox.set_idle_timeout, 0)


async def test_wait_returns_at_the_awaited_state(sdk, create):
    sandbox = await create()
    assert await sdk(sandbox.wait, "running", timeout=20) == "running"
    waiting = asyncio.ensure_future(sdk(sandbox.wait, "paused", timeout=20))
    await sdk(sandbox.pause)
    assert await waiting == "paused"
    await sdk(sandbox.connect)
    waiting = asyncio.ensure_future(sdk(sandbox.wait, timeout=20))
    await sdk(sandbox.kill)
    assert await waiting == "killed"


async def test_wait_ends_at_its_timeout(sdk, shared):
    with pytest.raises(jiffy.TimeoutException, match="is running after"):
        await sdk(shared.wait, "paused", timeout=0.2)


async def test_a_restart_ends_processes_and_keeps_files(sdk, create):
    sandbox = await create()
    await sdk(sandbox.files.write, "/home/user/note", "kept")
    await sdk(sandbox.commands.run, SERVER.format(8000), background=True, timeout=0)
    await sdk(sandbox.wait_for_port, 8000)
    assert await sdk(sandbox.restart, 0.5) is sandbox
    assert await sdk(sandbox.files.read, "/home/user/note") == "kept"
    with pytest.raises(error_codes.PortClosedError):
        await sdk(sandbox.port, 8000)


async def test_stats_are_the_present_usage(sdk, shared):
    stats = await sdk(shared.stats)
    assert isinstance(stats, jiffy.SandboxMetrics)
    assert 0 < stats.mem_used < stats.mem_total and stats.cpu_count >= 1


async def test_connections_list_rejected_connections(sdk, create, eventually):
    sandbox = await create(network={"deny_out": ["192.0.2.0/24"]})
    await sdk(sandbox.commands.run, "timeout 1 bash -c 'echo >/dev/tcp/192.0.2.7/443' || true")

    async def rejected():
        found = await sdk(sandbox.connections)
        # Some kernels report no rejections.
        return "refusals" in found.untold or any(
            (one.address, one.port, one.verdict) == ("192.0.2.7", 443, "refused") for one in found.items
        )

    await eventually(rejected)


async def test_network_rules_are_replaced(sdk, create):
    sandbox = await create()
    await sdk(sandbox.update_network, {"deny_out": ["192.0.2.0/24"]})
    assert (await sdk(sandbox.get_info)).network["deny_out"] == ["192.0.2.0/24"]
    await sdk(sandbox.update_network, {})
    assert not (await sdk(sandbox.get_info)).network["deny_out"]


async def serve(sdk, sandbox, port):
    await sdk(sandbox.commands.run, SERVER.format(port), background=True, timeout=0)
    await sdk(sandbox.wait_for_port, port)


async def test_rules_refer_to_the_identity_tokens_of_the_create(sdk, create):
    iam = {"tokens": {"aws": jiffy.Secret.iam_token(audience="sts.amazonaws.com", token_type="JWT-SVID")}}

    def rules(name):
        return {"a.example": [{"transform": lambda ctx: {"headers": {"authorization": f"Bearer {ctx.iam.tokens[name]}"}}}]}

    async def shown():
        return (await sdk(sandbox.get_info)).network["rules"]["a.example"][0]["transform"]["headers"]

    sandbox = await create(iam=iam, network={"rules": rules("aws")})
    assert await shown() == {"authorization": "Bearer ${e2b.identity.tokens.aws}"}
    await sdk(sandbox.update_network, {"rules": rules("aws")})
    assert await shown() == {"authorization": "Bearer ${e2b.identity.tokens.aws}"}
    with pytest.raises(jiffy.InvalidArgumentException):
        await create(iam=iam, network={"rules": rules("gcp")})
    with pytest.raises(jiffy.ApiError):
        await sdk(sandbox.update_network, {"rules": rules("gcp")})


async def test_a_preview_link_needs_no_key(sdk, shared):
    await sdk(shared.commands.run, "exec python3 -m http.server 8001", background=True, timeout=0)
    await sdk(shared.wait_for_port, 8001)
    preview = await sdk(shared.preview, 8001, ttl=60)
    host = preview.url.split("/")[2]
    # The name of the host is not resolved in this test.
    request = urllib.request.Request(os.environ["E2B_API_URL"] + "/", headers={"Host": host})
    answer = await asyncio.to_thread(urllib.request.urlopen, request, timeout=20)
    assert answer.status == 200 and b"Directory listing" in answer.read()


async def test_a_port_is_a_socket(sdk, shared):
    await serve(sdk, shared, 8002)
    if sdk.blocking:

        def exchange():
            with shared.port(8002) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return connection.recv(12)

        assert await asyncio.to_thread(exchange) == b"HTTP/1.0 200"
    else:
        reader, writer = await shared.port(8002)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.read(12)) == b"HTTP/1.0 200"
        writer.close()


async def test_a_closed_port_is_an_error(sdk, shared):
    with pytest.raises(error_codes.PortClosedError) as refusal:
        await sdk(shared.port, 9)
    assert refusal.value.status_code == 502 and refusal.value.request_id


async def test_wait_for_port_waits_for_a_server(sdk, shared):
    waiting = asyncio.ensure_future(sdk(shared.wait_for_port, 8003))
    await sdk(shared.commands.run, SERVER.format(8003), background=True, timeout=0)
    await waiting


async def test_wait_for_port_ends_at_its_timeout(sdk, shared):
    with pytest.raises(jiffy.TimeoutException, match="port 9 after 0.1 s"):
        await sdk(shared.wait_for_port, 9, timeout=0.1)


async def test_transfers_report_their_progress(sdk, shared, tmp_path):
    content = os.urandom(3 << 20)
    (tmp_path / "source").write_bytes(content)
    reports = []
    await sdk(shared.upload, tmp_path / "source", "/tmp/copied", lambda *report: reports.append(report))
    assert reports[-1] == (len(content), len(content)) and len(reports) > 1
    reports.clear()
    await sdk(shared.download, "/tmp/copied", tmp_path / "target", lambda *report: reports.append(report))
    assert reports[-1] == (len(content), len(content)) and len(reports) > 1
    assert (tmp_path / "target").read_bytes() == content


async def test_a_cancelled_command_is_killed(sdk, shared, eventually):
    if sdk.blocking:
        # A blocking call cannot be cancelled. Its timeout ends the command.
        with pytest.raises(jiffy.TimeoutException):
            await sdk(shared.commands.run, "exec sleep 1001", timeout=0.5)
    else:
        task = asyncio.create_task(shared.commands.run("exec sleep 1001", timeout=0))

        async def runs():
            return (await shared.commands.run("pgrep -f 'sleep 100[1]' || true")).stdout

        await eventually(runs)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def is_gone():
        return not (await sdk(shared.commands.run, "pgrep -f 'sleep 100[1]' || true")).stdout

    await eventually(is_gone)


async def test_a_function_is_deployed_called_and_removed(sdk, unique):
    function = await sdk(sdk.Function.deploy, MODULE, unique, settings={"env": {"A": "b"}})
    assert (function.name, function.version, function.state) == (unique, 1, "enabled")
    response = await sdk(function.call, "/path", body="text")
    assert (response.status, response.text) == (200, "hello from a component")
    assert unique in [one.name for one in await sdk(sdk.Function.list)]
    assert (await sdk(function.logs)).next
    assert (await sdk(function.disable)).state == "disabled"
    with pytest.raises(error_codes.FunctionDisabledError):
        await sdk(function.call, "/")
    assert (await sdk(function.enable)).state == "enabled"
    with pytest.raises(error_codes.VersionNotFoundError):
        await sdk(function.rollback, 7)
    assert await sdk(function.remove) is True
    assert await sdk(function.remove) is False


async def test_the_host_lists_engines_pools_and_limits(sdk):
    engines = await sdk(sdk.Host.engines)
    assert {"microvm", "gvisor"} >= {engine.name for engine in engines}
    assert any(engine.usable and engine.is_default for engine in engines)
    assert isinstance(await sdk(sdk.Host.pools), list)
    limits = await sdk(sdk.Host.limits)
    assert limits.used["sandboxes"] >= 0 and "diskBytes" in limits.limits
    assert (await sdk(sdk.Host.status)).version


async def test_templates_are_found(sdk, unique):
    assert await sdk(sdk.Template.exists, "base") is True
    assert await sdk(sdk.Template.exists, unique) is False


async def test_events_are_iterated_and_resumed(sdk, create):
    sandbox = await create()
    await sdk(sandbox.pause)
    await sdk(sandbox.kill)

    async def events(**selection):
        iterator = sdk.Host.events(sandbox.sandbox_id, follow=False, **selection)
        if hasattr(iterator, "__aiter__"):
            return [event async for event in iterator]
        return await asyncio.to_thread(list, iterator)

    everything = await events()
    kinds = [event.type for event in everything]
    assert kinds == ["sandbox.created", "sandbox.ready", "sandbox.paused", "sandbox.killed"]
    assert {event.sandbox_id for event in everything} == {sandbox.sandbox_id}
    assert [event.type for event in await events(after=everything[1].id)] == kinds[2:]
    assert [event.type for event in await events(types=["sandbox.killed"])] == ["sandbox.killed"]
    assert await events(since=everything[-1].time + timedelta(seconds=1)) == []

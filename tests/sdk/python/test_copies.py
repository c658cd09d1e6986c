"""Snapshots and forks are complete, independent copies."""

import pytest
from e2b import InvalidArgumentException, SandboxException, SnapshotInfo

# A server that stores a number only in memory. It increments the number and sends it to each
# client.
KEEPER = """exec python3 -uc '
import socket
server, n = socket.create_server(("127.0.0.1", 7000)), 42
print("ready")
while True:
    with server.accept()[0] as client: client.sendall(str(n).encode())
    n += 1'"""


async def keep(sdk, sandbox):
    """Starts the server in the sandbox."""
    keeper = await sdk.start(sandbox, KEEPER, timeout=0)
    await keeper.wait_for_output("ready")


async def remembered(sdk, sandbox):
    """Returns the number that the server sends."""
    return int((await sdk(sandbox.commands.run, "cat </dev/tcp/127.0.0.1/7000", timeout=20)).stdout)


async def test_sandboxes_from_a_snapshot_have_its_memory(sdk, create):
    source = await create(envs={"GREETING": "hello"})
    await keep(sdk, source)
    assert await remembered(sdk, source) == 42
    await sdk(source.files.write, "/home/user/note", "before")
    snapshot = await sdk(source.create_snapshot)
    await sdk(source.files.write, "/home/user/note", "after")

    assert (await sdk(source.commands.run, "echo still here")).stdout == "still here\n"
    copies = [await create(snapshot.snapshot_id) for _ in range(2)]
    for copy in copies:
        assert copy.sandbox_id != source.sandbox_id
        assert await sdk(copy.files.read, "/home/user/note") == "before"
        assert await remembered(sdk, copy) == 43
        assert (await sdk(copy.commands.run, "echo $GREETING")).stdout == "hello\n"
    await sdk(copies[0].files.write, "/home/user/note", "its own")
    assert await sdk(copies[1].files.read, "/home/user/note") == "before"
    assert await sdk(source.files.read, "/home/user/note") == "after"
    assert await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id) is True


async def test_a_snapshot_outlives_its_sandbox(sdk, create):
    source = await create()
    await sdk(source.files.write, "/home/user/note", "kept")
    snapshot = await sdk(source.create_snapshot)
    await sdk(source.kill)
    copy = await create(snapshot.snapshot_id)
    assert await sdk(copy.files.read, "/home/user/note") == "kept"
    await sdk(copy.kill)
    await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id)


async def test_clones_have_different_identities(sdk, create):
    source = await create()
    snapshot = await sdk(source.create_snapshot)
    copies = [source, *[await create(snapshot.snapshot_id) for _ in range(3)]]
    script = "cat /etc/machine-id /proc/sys/kernel/hostname; head -c 16 /dev/urandom | od -An -tx1"
    info = [(await sdk(copy.commands.run, script)).stdout.splitlines() for copy in copies]
    for line in range(3):
        assert len({lines[line] for lines in info}) == len(copies), f"line {line} of {info}"
    await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id)


async def test_snapshots_are_listed_in_pages_renamed_and_deleted(sdk, create, unique):
    source = await create()
    made = [await sdk(source.create_snapshot) for _ in range(2)] + [await sdk(source.create_snapshot, name=unique)]
    ids = {snapshot.snapshot_id for snapshot in made}
    assert len(ids) == 3
    pages = await sdk.pages(source.list_snapshots(limit=2))
    assert [len(page) for page in pages] == [2, 1]
    assert {snapshot.snapshot_id for page in pages for snapshot in page} == ids
    everybodys = await sdk.all(sdk.Sandbox.list_snapshots())
    assert ids <= {snapshot.snapshot_id for snapshot in everybodys}
    named = await sdk.all(sdk.Sandbox.list_snapshots(name=unique))
    assert [snapshot.snapshot_id for snapshot in named] == [made[2].snapshot_id]
    assert any(unique in name for name in named[0].names)

    by_name = await create(unique)
    assert (await sdk(by_name.commands.run, "echo by name")).stdout == "by name\n"
    await sdk(by_name.kill)

    for snapshot in made:
        assert await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id) is True
        assert await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id) is False
    assert await sdk.all(source.list_snapshots()) == []
    with pytest.raises(SandboxException) as refusal:
        await sdk(sdk.Sandbox.create, made[0].snapshot_id)
    assert refusal.value.status_code == 404


async def test_a_snapshot_in_use_can_be_deleted_and_its_sandboxes_continue(sdk, create):
    source = await create()
    await sdk(source.files.write, "/home/user/note", "kept")
    snapshot = await sdk(source.create_snapshot)
    copy = await create(snapshot.snapshot_id)
    assert isinstance(snapshot, SnapshotInfo)
    assert await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id) is True
    assert await sdk(copy.files.read, "/home/user/note") == "kept"
    with pytest.raises(SandboxException):
        await sdk(sdk.Sandbox.create, snapshot.snapshot_id)


async def test_forks_have_the_memory_of_their_parent_and_are_independent(sdk, create):
    source = await create(metadata={"of": "the source"}, timeout=100)
    await keep(sdk, source)
    assert await remembered(sdk, source) == 42
    before = await sdk(source.get_info)
    forks = await sdk(source.fork, count=4, timeout=60)
    try:
        assert len({fork.sandbox_id for fork in forks} | {source.sandbox_id}) == 5
        for number, fork in enumerate(forks):
            assert await remembered(sdk, fork) == 43
            await sdk(fork.files.write, "/tmp/own", str(number))
        for number, fork in enumerate(forks):
            assert await sdk(fork.files.read, "/tmp/own") == str(number)
        after = await sdk(source.get_info)
        assert (after.sandbox_id, after.end_at) == (before.sandbox_id, before.end_at)
        assert await remembered(sdk, source) == 43
        assert await sdk(source.files.exists, "/tmp/own") is False
        info = await sdk(forks[0].get_info)
        assert abs((info.end_at - info.started_at).total_seconds() - 60) < 5
    finally:
        for fork in forks:
            await sdk(fork.kill)


async def test_a_fork_by_id_creates_one_child_by_default(sdk, create):
    source = await create()
    forks = await sdk(sdk.Sandbox.fork, source.sandbox_id)
    assert len(forks) == 1
    assert (await sdk(forks[0].commands.run, "echo one")).stdout == "one\n"
    await sdk(forks[0].kill)


async def test_a_number_of_forks_out_of_range_is_rejected(sdk, create, web, url, api_key):
    source = await create()
    with pytest.raises(InvalidArgumentException):
        await sdk(source.fork, count=21)
    # The client checks these limits; the server must not rely on that.
    for count in (0, 101, -1, "two"):
        answer = await web.post(f"{url}/sandboxes/{source.sandbox_id}/fork", headers={"X-API-KEY": api_key}, json={"count": count})
        assert answer.status_code == 400 and answer.json()["code"] == 400

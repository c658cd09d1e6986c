"""Snapshots, rollbacks, checkpoints, forks and attempts."""

import asyncio
import threading

import jiffy
import pytest
from jiffy import error_codes

NOTE = "/home/user/note"
# A server that keeps a number only in memory, and increments it for each client.
KEEPER = """exec python3 -uc '
import socket
server, n = socket.create_server(("127.0.0.1", 7000)), 42
while True:
    with server.accept()[0] as client: client.sendall(str(n).encode())
    n += 1'"""


async def keep(sdk, sandbox):
    """Starts the server that keeps a number in memory."""
    await sdk(sandbox.commands.run, KEEPER, background=True, timeout=0)
    # The first client.
    await sdk(sandbox.wait_for_port, 7000)


async def remembered(sdk, sandbox):
    """Returns the number in memory, and increments it."""
    return int((await sdk(sandbox.commands.run, "cat </dev/tcp/127.0.0.1/7000", timeout=20)).stdout)


async def read(sdk, sandbox):
    return await sdk(sandbox.files.read, NOTE)


async def test_a_rollback_restores_files_and_memory(sdk, create):
    sandbox = await create()
    await keep(sdk, sandbox)
    assert await remembered(sdk, sandbox) == 43
    await sdk(sandbox.files.write, NOTE, "before")
    snapshot = await sdk(sandbox.snapshot)
    await sdk(sandbox.files.write, NOTE, "after")
    assert await remembered(sdk, sandbox) == 44
    assert await sdk(sandbox.rollback, snapshot) is sandbox
    assert await read(sdk, sandbox) == "before"
    assert await remembered(sdk, sandbox) == 44
    await sdk(snapshot.delete)


async def test_a_rollback_accepts_an_id_and_a_name(sdk, create, unique):
    sandbox = await create()
    await sdk(sandbox.files.write, NOTE, "before")
    snapshot = await sdk(sandbox.snapshot, unique)
    assert snapshot.names and unique in snapshot.names[0]
    for target in (snapshot.snapshot_id, unique):
        await sdk(sandbox.files.write, NOTE, "after")
        await sdk(sandbox.rollback, target)
        assert await read(sdk, sandbox) == "before"
    await sdk(snapshot.delete)


async def test_a_captured_snapshot_becomes_ready(sdk, create, eventually):
    sandbox = await create()
    snapshot = await sdk(sandbox.snapshot, ack="captured")
    assert snapshot.status in ("storing", "ready") and snapshot.sandbox_id == sandbox.sandbox_id

    async def is_ready():
        return (await sdk(snapshot.refresh)).status == "ready"

    await eventually(is_ready)
    assert (await sdk(snapshot.refresh)).bytes > 0
    assert await sdk(snapshot.delete)


async def test_snapshots_are_listed_found_and_deleted(sdk, create, unique):
    sandbox = await create()
    made = [await sdk(sandbox.snapshot), await sdk(sandbox.create_snapshot, name=unique)]
    listed = await sdk.items(sdk.Snapshot.list(sandbox_id=sandbox.sandbox_id))
    assert {item.snapshot_id for item in listed} == {item.snapshot_id for item in made}
    assert (await sdk(sdk.Snapshot.get, unique)).snapshot_id == made[1].snapshot_id
    for snapshot in made:
        assert await sdk(snapshot.delete) is True
        assert await sdk(snapshot.delete) is False
    with pytest.raises(error_codes.SnapshotNotFoundError):
        await sdk(sdk.Snapshot.get, made[0].snapshot_id)


async def test_a_snapshot_is_verified(sdk, create):
    sandbox = await create()
    snapshot = await sdk(sandbox.snapshot)
    if sandbox.engine == "gvisor":
        # Snapshots of gVisor have no checksums.
        with pytest.raises(error_codes.UnsupportedError):
            await sdk(snapshot.verify)
        await sdk(snapshot.delete)
        return
    results = await sdk(snapshot.verify)
    assert snapshot.snapshot_id in [result["id"] for result in results]
    assert all(result["damaged"] == [] for result in results)
    await sdk(snapshot.delete)


async def test_a_sandbox_from_a_snapshot_has_its_files(sdk, create):
    sandbox = await create()
    await sdk(sandbox.files.write, NOTE, "copied")
    snapshot = await sdk(sandbox.snapshot)
    copy = await create(snapshot.snapshot_id)
    assert copy.boot_mode == "snapshot" and await read(sdk, copy) == "copied"
    await sdk(snapshot.delete)


async def test_a_checkpoint_keeps_the_changes_of_a_successful_block(sdk, create):
    sandbox = await create()
    async with sdk.within(sandbox.checkpoint()):
        await sdk(sandbox.files.write, NOTE, "kept")
    assert await read(sdk, sandbox) == "kept"
    assert await sdk.items(sdk.Snapshot.list(sandbox_id=sandbox.sandbox_id)) == []


async def test_a_checkpoint_rolls_back_after_an_error(sdk, create):
    sandbox = await create()
    await sdk(sandbox.files.write, NOTE, "before")
    with pytest.raises(ZeroDivisionError):
        async with sdk.within(sandbox.checkpoint()):
            await sdk(sandbox.files.write, NOTE, "after")
            _ = 1 / 0
    assert await read(sdk, sandbox) == "before"
    assert await sdk.items(sdk.Snapshot.list(sandbox_id=sandbox.sandbox_id)) == []


async def test_checkpoints_can_be_nested(sdk, create):
    sandbox = await create()
    async with sdk.within(sandbox.checkpoint()):
        await sdk(sandbox.files.write, NOTE, "outer")
        with pytest.raises(KeyError):
            async with sdk.within(sandbox.checkpoint()):
                await sdk(sandbox.files.write, NOTE, "inner")
                raise KeyError("inner")
    assert await read(sdk, sandbox) == "outer"


async def test_a_checkpoint_of_a_killed_sandbox_reports_the_failed_rollback(sdk, create):
    sandbox = await create()
    with pytest.raises(error_codes.SandboxNotFoundError) as failure:
        async with sdk.within(sandbox.checkpoint()):
            await sdk(sandbox.kill)
            raise KeyError("in the block")
    assert isinstance(failure.value.__context__, KeyError)
    for snapshot in await sdk.items(sdk.Snapshot.list(sandbox_id=sandbox.sandbox_id)):
        await sdk(snapshot.delete)


async def test_a_cancelled_checkpoint_rolls_back(sdk, create):
    sandbox = await create()
    await sdk(sandbox.files.write, NOTE, "before")
    if sdk.blocking:
        # An interrupt is an exception that is no `Exception`.
        with pytest.raises(KeyboardInterrupt):
            async with sdk.within(sandbox.checkpoint()):
                await sdk(sandbox.files.write, NOTE, "after")
                raise KeyboardInterrupt
    else:
        written = asyncio.Event()

        async def block():
            async with sandbox.checkpoint():
                await sandbox.files.write(NOTE, "after")
                written.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await written.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await read(sdk, sandbox) == "before"


async def test_children_of_a_fork_have_the_memory_of_their_parent(sdk, create):
    sandbox = await create()
    await keep(sdk, sandbox)
    forks = await sdk(sandbox.fork, count=2)
    for fork in forks:
        assert await remembered(sdk, fork) == 43
        assert (fork.boot_mode, fork.forked_from) == ("fork", sandbox.sandbox_id)
        await sdk(fork.kill)


async def test_promote_removes_the_siblings(sdk, create, children):
    sandbox = await create()
    forks = await sdk(sandbox.fork, count=3)
    removed = await sdk(forks[1].promote)
    assert set(removed) == {forks[0].sandbox_id, forks[2].sandbox_id}
    assert children(sandbox) == [forks[1].sandbox_id]
    await sdk(forks[1].kill)


async def test_a_number_of_forks_out_of_range_is_rejected(sdk, shared):
    for count in (0, 101, True):
        with pytest.raises(jiffy.InvalidArgumentException):
            await sdk(shared.fork, count=count)


def echo(text):
    """Returns a function for `try_each` that prints and writes a text."""
    def steps(fork):
        result = yield fork.commands.run, f"echo {text}"
        yield fork.files.write, NOTE, text
        return result.stdout.strip()

    return steps


def fail(fork):
    yield fork.commands.run, "exit 3"


async def test_try_each_promotes_the_first_success_and_removes_the_others(sdk, create, children):
    sandbox = await create()
    await sdk(sandbox.files.write, NOTE, "unchanged")
    outcome = await sdk(sandbox.try_each, [sdk.function(step) for step in (fail, echo("b"), echo("c"))])
    assert (outcome.index, outcome.result, outcome.ok) == (1, "b", True)
    assert children(sandbox) == [outcome.sandbox.sandbox_id]
    assert await read(sdk, outcome.sandbox) == "b" and await read(sdk, sandbox) == "unchanged"
    await sdk(outcome.sandbox.kill)


async def test_try_each_keeps_the_selected_outcome(sdk, create, children):
    sandbox = await create()
    functions = [sdk.function(echo(text)) for text in ("1", "3", "2")]
    outcome = await sdk(sandbox.try_each, functions, lambda all_: max(all_, key=lambda one: one.result))
    assert (outcome.index, outcome.result) == (1, "3")
    await sdk(outcome.sandbox.kill)
    outcome = await sdk(sandbox.try_each, functions, keep=lambda all_: 2)
    assert (outcome.index, outcome.result) == (2, "2")
    assert children(sandbox) == [outcome.sandbox.sandbox_id]
    await sdk(outcome.sandbox.kill)


async def test_try_each_without_a_success_raises_and_leaves_no_fork(sdk, create, children):
    sandbox = await create()
    with pytest.raises(jiffy.AllFailedError, match="2 of 2 functions failed") as failure:
        await sdk(sandbox.try_each, [sdk.function(fail)] * 2)
    assert isinstance(failure.value.__cause__, jiffy.CommandExitException)
    assert [outcome.ok for outcome in failure.value.outcomes] == [False, False]
    assert children(sandbox) == []


async def test_a_failing_selection_leaves_no_fork(sdk, create, children):
    sandbox = await create()
    with pytest.raises(ZeroDivisionError):
        await sdk(sandbox.try_each, [sdk.function(echo("a"))] * 2, keep=lambda all_: 1 // 0)
    assert children(sandbox) == []


async def test_a_cancelled_try_each_leaves_no_fork(sdk, create, children, monkeypatch):
    sandbox = await create()
    started = threading.Event()

    def endless(fork):
        yield fork.commands.run, "echo started"
        started.set()
        yield lambda: fork.commands.run("sleep 1000", timeout=0),

    functions = [sdk.function(endless)] * 2
    if sdk.blocking:
        # The interrupt of a terminal arrives while the main thread waits.
        def interrupt(running):
            assert started.wait(20)
            raise KeyboardInterrupt

        monkeypatch.setattr(jiffy.sandbox.futures, "wait", interrupt)
        caught = []

        def attempt():
            try:
                sandbox.try_each(functions)
            except KeyboardInterrupt as error:
                caught.append(error)

        await asyncio.to_thread(attempt)
        assert len(caught) == 1
    else:
        task = asyncio.create_task(sandbox.try_each(functions))
        await asyncio.to_thread(started.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert children(sandbox) == []


async def test_a_fork_that_is_killed_in_between_fails_alone(sdk, create, children):
    sandbox = await create()

    def ends(fork):
        yield fork.kill,
        yield fork.commands.run, "echo late"

    outcome = await sdk(sandbox.try_each, [sdk.function(ends), sdk.function(echo("alive"))], keep=lambda all_: 1)
    assert outcome.result == "alive"
    assert children(sandbox) == [outcome.sandbox.sandbox_id]
    await sdk(outcome.sandbox.kill)


async def test_try_each_without_functions_is_rejected(sdk, shared):
    with pytest.raises(jiffy.InvalidArgumentException):
        await sdk(shared.try_each, [])

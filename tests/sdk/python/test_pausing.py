"""Sandboxes are paused and resumed: memory, processes and files are unchanged."""

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from e2b import CommandExitException, SandboxException, SandboxNotRunningException, SandboxState

# Counts in memory and prints the count for each input line. A process that lost its memory would
# restart at 0.
COUNTER = "exec python3 -uc 'n = 0\nprint(\"ready\")\nwhile True:\n  input()\n  n += 1\n  print(\"count\", n)'"


async def test_memory_processes_and_files_survive_a_pause(sdk, create):
    sandbox = await create()
    counter = await sdk.start(sandbox, COUNTER, stdin=True, timeout=0)
    await counter.wait_for_output("ready")
    await sdk(counter.handle.send_stdin, "\n")
    await counter.wait_for_output("count 1\n")
    await sdk(sandbox.files.write, "/home/user/file", "on disk")
    await sdk(sandbox.files.write, "/dev/shm/file", "in memory")

    assert await sdk(sandbox.pause) is True
    assert (await sdk(sandbox.get_info)).state is SandboxState.PAUSED
    again = await sdk(sdk.Sandbox.connect, sandbox.sandbox_id, timeout=100)
    assert (await sdk(again.get_info)).state is SandboxState.RUNNING

    resumed = await sdk.attach(again, counter.pid)
    await sdk(again.commands.send_stdin, counter.pid, "\n")
    await resumed.wait_for_output("count 2\n")
    assert await sdk(again.files.read, "/home/user/file") == "on disk"
    assert await sdk(again.files.read, "/dev/shm/file") == "in memory"


async def test_an_earlier_handle_works_after_a_reconnect(sdk, create):
    sandbox = await create()
    await sdk(sandbox.pause)
    await sdk(sandbox.connect)
    assert (await sdk(sandbox.commands.run, "echo awake")).stdout == "awake\n"


async def test_pausing_a_paused_sandbox_reports_its_state(sdk, create):
    sandbox = await create()
    assert await sdk(sandbox.pause) is True
    assert await sdk(sandbox.pause) is False
    assert await sdk(sdk.Sandbox.pause, sandbox.sandbox_id) is False


async def test_a_paused_sandbox_is_reported_as_paused(sdk, create):
    sandbox = await create()
    await sdk(sandbox.pause)
    assert await sdk(sandbox.is_running) is False
    with pytest.raises(SandboxNotRunningException):
        await sdk(sandbox.commands.run, "true")
    with pytest.raises(SandboxNotRunningException):
        await sdk(sandbox.files.write, "/tmp/x", "x")
    assert (await sdk(sandbox.get_info)).state is SandboxState.PAUSED


async def test_a_paused_sandbox_can_be_killed(sdk, create):
    sandbox = await create()
    await sdk(sandbox.pause)
    assert await sdk(sandbox.kill) is True
    assert await sdk(sandbox.kill) is False


async def test_the_clock_is_correct_after_a_pause(sdk, create):
    sandbox = await create()
    await sdk(sandbox.pause)
    await asyncio.sleep(1.5)
    await sdk(sandbox.connect)
    info = float((await sdk(sandbox.commands.run, "date +%s.%N")).stdout)
    assert abs(info - datetime.now().timestamp()) < 1


async def test_the_timeout_does_not_elapse_during_a_pause(sdk, create):
    sandbox = await create(timeout=2)
    await sdk(sandbox.pause)
    await asyncio.sleep(2.5)
    await sdk(sandbox.connect, timeout=100)
    info = await sdk(sandbox.get_info)
    assert info.state is SandboxState.RUNNING
    assert info.end_at > datetime.now(timezone.utc) + timedelta(seconds=80)


async def test_a_timed_out_sandbox_can_be_paused_instead_of_killed(sdk, create, eventually):
    sandbox = await create(timeout=1, lifecycle={"on_timeout": "pause"})
    await sdk(sandbox.files.write, "/dev/shm/kept", "kept")

    async def is_paused():
        return (await sdk(sandbox.get_info)).state is SandboxState.PAUSED

    await eventually(is_paused)
    assert (await sdk(sandbox.get_info)).lifecycle["on_timeout"] == "pause"
    with pytest.raises(SandboxNotRunningException):
        await sdk(sandbox.commands.run, "true")
    await sdk(sandbox.connect, timeout=100)
    assert await sdk(sandbox.files.read, "/dev/shm/kept") == "kept"


async def test_a_request_resumes_a_sandbox_with_auto_resume(sdk, create):
    sandbox = await create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    await sdk(sandbox.files.write, "/dev/shm/kept", "kept")
    await sdk(sandbox.pause)
    assert (await sdk(sandbox.get_info)).lifecycle == {"on_timeout": "pause", "auto_resume": True}
    assert await sdk(sandbox.files.read, "/dev/shm/kept") == "kept"
    assert (await sdk(sandbox.get_info)).state is SandboxState.RUNNING


async def test_a_request_to_its_host_name_resumes_a_sandbox(sdk, create, web, url):
    sandbox = await create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    server = await sdk.start(sandbox, "cd $(mktemp -d) && echo kept > page && exec python3 -um http.server 8080", timeout=0)
    await server.wait_for_output("Serving HTTP")
    await sdk(sandbox.pause)
    answer = await web.get(f"{url}/page", headers={"Host": sandbox.get_host(8080)})
    assert (answer.status_code, answer.text) == (200, "kept\n")
    assert (await sdk(sandbox.get_info)).state is SandboxState.RUNNING


async def test_a_hundred_requests_resume_a_sandbox_once(sdk, create):
    sandbox = await create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    boot = (await sdk(sandbox.commands.run, "cat /proc/1/stat | cut -d' ' -f22; echo up > /dev/shm/up")).stdout
    await sdk(sandbox.pause)
    answers = await asyncio.gather(*(sdk(sandbox.files.read, "/dev/shm/up") for _ in range(40)))
    assert set(answers) == {"up\n"}
    assert (await sdk(sandbox.commands.run, "cat /proc/1/stat | cut -d' ' -f22")).stdout == boot


async def test_a_sandbox_can_be_paused_many_times(sdk, create):
    sandbox = await create()
    for turn in range(5):
        await sdk(sandbox.commands.run, f"echo {turn} >> /tmp/turns")
        assert await sdk(sandbox.pause) is True
        await sdk(sandbox.connect)
    assert await sdk(sandbox.files.read, "/tmp/turns") == "0\n1\n2\n3\n4\n"


async def test_a_command_during_a_pause_ends_for_its_client_and_continues_in_the_guest(sdk, create):
    sandbox = await create()
    command = await sdk.start(sandbox, "echo begun; read -r line; echo $line > /tmp/answer", stdin=True, timeout=0)
    await command.wait_for_output("begun")
    await sdk(sandbox.pause)
    with pytest.raises(SandboxNotRunningException):
        await command.end()
    await sdk(sandbox.connect)
    again = await sdk.attach(sandbox, command.pid)
    await sdk(sandbox.commands.send_stdin, command.pid, "after the pause\n")
    assert (await again.end()).exit_code == 0
    assert await sdk(sandbox.files.read, "/tmp/answer") == "after the pause\n"


async def test_exit_codes_survive_a_pause(sdk, create):
    sandbox = await create()
    await sdk(sandbox.pause)
    await sdk(sandbox.connect)
    with pytest.raises(CommandExitException) as ended:
        await sdk(sandbox.commands.run, "exit 9")
    assert ended.value.exit_code == 9


async def is_gvisor(sdk, sandbox):
    """Returns whether the engine stores the disk only together with the memory."""
    return (await sdk(sandbox.commands.run, "uname -r")).stdout.strip().endswith("-gvisor")


async def test_a_pause_without_memory_keeps_files_and_boots(sdk, create):
    sandbox = await create(metadata={"kept": "yes"})
    if await is_gvisor(sdk, sandbox):
        with pytest.raises(SandboxException, match="without the memory"):
            await sdk(sandbox.pause, keep_memory=False)
        return
    await sdk(sandbox.files.write, "/home/user/file", "on disk")
    await sdk(sandbox.files.write, "/dev/shm/file", "in memory")
    assert await sdk(sandbox.pause, keep_memory=False) is True
    again = await sdk(sdk.Sandbox.connect, sandbox.sandbox_id, timeout=100)
    assert again.sandbox_id == sandbox.sandbox_id
    assert await sdk(again.files.read, "/home/user/file") == "on disk"
    assert await sdk(again.files.exists, "/dev/shm/file") is False
    assert (await sdk(again.get_info)).metadata == {"kept": "yes"}
    # Memory that was stored is discarded on request.
    await sdk(again.files.write, "/dev/shm/file", "in memory")
    await sdk(again.files.write, "/home/user/file", "newer")
    assert await sdk(again.pause) is True
    booted = await sdk(sdk.Sandbox.connect, sandbox.sandbox_id, on_resume="reboot")
    assert await sdk(booted.files.exists, "/dev/shm/file") is False
    assert await sdk(booted.files.read, "/home/user/file") == "newer"


async def test_a_snapshot_without_memory_boots(sdk, create):
    sandbox = await create()
    if await is_gvisor(sdk, sandbox):
        return
    await sdk(sandbox.files.write, "/home/user/file", "on disk")
    await sdk(sandbox.files.write, "/dev/shm/file", "in memory")
    snapshot = await sdk(sandbox.create_snapshot, mode="filesystem")
    assert await sdk(sandbox.files.read, "/dev/shm/file") == "in memory"
    copy = await create(snapshot.snapshot_id)
    assert await sdk(copy.files.read, "/home/user/file") == "on disk"
    assert await sdk(copy.files.exists, "/dev/shm/file") is False
    assert await sdk(sdk.Sandbox.delete_snapshot, snapshot.snapshot_id) is True


async def test_a_timeout_pauses_without_memory(sdk, create):
    if await is_gvisor(sdk, await create()):
        return
    lifecycle = {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    sandbox = await create(timeout=60, lifecycle=lifecycle)
    await sdk(sandbox.files.write, "/dev/shm/file", "in memory")
    await sdk(sandbox.set_timeout, 0)
    while (await sdk(sandbox.get_info)).state is not SandboxState.PAUSED:
        await asyncio.sleep(0.05)
    again = await sdk(sandbox.connect)
    assert await sdk(again.files.exists, "/dev/shm/file") is False

"""`jiffy-openai-agents`: agents of the OpenAI Agents SDK in sandboxes, with snapshot, resume and fork."""

import asyncio
import io
from pathlib import Path

import jiffy
import pytest
from agents import OpenAIResponsesModel, RunConfig, Runner
from agents.sandbox import (
    ExecTimeoutError,
    LocalSnapshotSpec,
    Manifest,
    SandboxAgent,
    SandboxRunConfig,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.capabilities import Filesystem, Shell
from agents.sandbox.entries import File
from agents.sandbox.snapshot import NoopSnapshotSpec
from jiffy_openai_agents import JiffySandboxClient, JiffySandboxClientOptions
from openai import AsyncOpenAI

MANIFEST = Manifest(root="/home/user/work", entries={"task.txt": File(content=b"first\n")})


@pytest.fixture
def client():
    return JiffySandboxClient()


@pytest.fixture
async def session(client):
    options = JiffySandboxClientOptions(timeout=120, max_output=2000, exposed_ports=(8000,))
    session = await client.create(manifest=MANIFEST, options=options)
    async with session:
        yield session
    await client.forget(session.state)


async def run(server, **settings):
    """Runs an agent whose model is `server`."""
    model = OpenAIResponsesModel("m", AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0))
    agent = SandboxAgent("worker", model=model, capabilities=[Shell(), Filesystem()])
    config = RunConfig(sandbox=SandboxRunConfig(**settings), tracing_disabled=True)
    return await Runner.run(agent, "start", run_config=config)


async def text(session, command):
    result = await session.exec(command)
    return (result.stdout + result.stderr).decode()


async def test_the_tools_of_an_agent_use_the_files_of_the_sandbox(model, client):
    patch = "*** Begin Patch\n*** Update File: task.txt\n@@\n-first\n+second\n*** End Patch"
    server = model(
        [("exec_command", {"cmd": "cat task.txt; pwd; echo lost >&2; exit 3"})],
        [("apply_patch", patch)],
        [("exec_command", {"cmd": "cat task.txt"})],
    )
    options = JiffySandboxClientOptions(timeout=120)
    result = await run(server, client=client, manifest=MANIFEST, options=options, snapshot=NoopSnapshotSpec())
    assert result.final_output == "done"
    first, _, last = server.results
    assert all(word in first for word in ("first\n/home/user/work", "lost", "code 3")), first
    assert "second" in last


async def test_an_agent_continues_with_the_files_and_processes_of_a_killed_sandbox(model, client, tmp_path):
    storage = LocalSnapshotSpec(base_path=tmp_path)
    session = await client.create(manifest=MANIFEST, snapshot=storage, options=JiffySandboxClientOptions(timeout=120))
    async with session:
        await session.exec("echo 1 >state; (sleep 1000 & echo $! >pid) >/dev/null 2>&1")
    await client.delete(session)
    payload = client.serialize_session_state(session.state)
    sandboxes = jiffy.AsyncSandbox.list()
    assert session.state.sandbox_id not in [item.sandbox_id for item in await sandboxes.next_items()]

    server = model([("exec_command", {"cmd": "cat state; kill -0 $(cat pid) && echo alive; echo 2 >state"})])
    state = client.deserialize_session_state(payload)
    await run(server, client=JiffySandboxClient(), session_state=state)
    assert "1\nalive" in server.results[-1]
    # The run has persisted the workspace again.
    resumed = await client.resume(state)
    async with resumed:
        assert await text(resumed, "cat state") == "2\n"
    await client.forget(resumed.state)


async def test_a_resume_returns_a_changed_sandbox_to_the_persisted_state(client, tmp_path):
    options = JiffySandboxClientOptions(timeout=120, pause_on_exit=True)
    session = await client.create(manifest=MANIFEST, snapshot=LocalSnapshotSpec(base_path=tmp_path), options=options)
    async with session:
        await session.exec("echo persisted >state")
    await client.delete(session)
    sandbox = await jiffy.AsyncSandbox.connect(session.state.sandbox_id)
    await sandbox.files.write("/home/user/work/state", "changed")
    resumed = await client.resume(session.state)
    async with resumed:
        assert resumed.state.sandbox_id == sandbox.sandbox_id
        assert await text(resumed, "cat state") == "persisted\n"
    await client.forget(resumed.state)


async def test_forks_continue_independently_with_files_and_processes(client, session):
    await session.exec("(sleep 1000 & echo $! >pid) >/dev/null 2>&1")
    forks = await client.fork(session, count=2)
    for number, fork in enumerate(forks):
        async with fork:
            assert await text(fork, f"cat task.txt; kill -0 $(cat pid) && echo alive; echo {number} >task.txt") == (
                "first\nalive\n"
            )
            assert await text(fork, "cat task.txt") == f"{number}\n"
    assert await text(session, "cat task.txt") == "first\n"
    assert len({session.state.session_id, *(fork.state.session_id for fork in forks)}) == 3


async def test_commands_end_at_their_timeout_and_if_they_are_cancelled(session):
    with pytest.raises(ExecTimeoutError):
        await session.exec("exec sleep 1000", timeout=1)
    task = asyncio.create_task(session.exec("touch begun; exec sleep 1000"))
    while not (await session.exec("test -e begun")).ok():
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await text(session, "pgrep -x sleep") == ""


async def test_the_output_of_a_command_is_bounded(session):
    result = await session.exec("echo first; yes | head -c 5000000; echo last")
    assert result.exit_code == 0 and len(result.stdout) < 2100
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")


async def test_files_are_confined_to_the_workspace(session):
    await session.write(Path("a/b.bin"), io.BytesIO(bytes(range(256))))
    assert (await session.read(Path("a/b.bin"))).read() == bytes(range(256))
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("missing"))
    await session.exec("ln -s /etc link")
    for path in ("../outside", "link/passwd"):
        with pytest.raises(Exception, match="escape|root|outside"):
            await session.read(Path(path))


async def test_an_exposed_port_has_a_link(session):
    endpoint = await session.resolve_exposed_port(8000)
    assert endpoint.host.startswith("8000-") and endpoint.url_for("http").startswith("http://8000-")


async def test_a_foreign_or_deleted_snapshot_is_an_error_that_names_it(session):
    for content, words in ((b"a tar archive", "not persisted by"), (b'{"jiffySnapshot": "missing"}', "snapshot missing")):
        with pytest.raises(WorkspaceArchiveWriteError) as error:
            await session.hydrate_workspace(io.BytesIO(content))
        assert words in str(error.value.context["detail"])

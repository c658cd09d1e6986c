"""The E2B client of the OpenAI Agents SDK, unmodified."""

import e2b
import pytest
from agents import OpenAIResponsesModel, RunConfig, Runner
from agents.extensions.sandbox import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.snapshot import NoopSnapshotSpec
from openai import AsyncOpenAI

MANIFEST = Manifest(root="/home/user/work", entries={"task.txt": File(content=b"first\n")})


def options(**settings):
    return E2BSandboxClientOptions(E2BSandboxType.E2B, timeout=120, on_timeout="kill", auto_resume=False, **settings)


async def test_an_agent_uses_shell_and_files(model):
    server = model([("exec_command", {"cmd": "cat task.txt; pwd; exit 3"})], [("exec_command", {"cmd": "tty", "tty": True})])
    agent = SandboxAgent(
        "worker", capabilities=[Shell()],
        model=OpenAIResponsesModel("m", AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0)),
    )
    sandbox = SandboxRunConfig(
        client=E2BSandboxClient(), manifest=MANIFEST, options=options(), snapshot=NoopSnapshotSpec()
    )
    result = await Runner.run(agent, "start", run_config=RunConfig(sandbox=sandbox, tracing_disabled=True))
    assert result.final_output == "done"
    assert "first\n/home/user/work" in server.results[0] and "code 3" in server.results[0]
    assert "/dev/pts/" in server.results[1]


@pytest.mark.parametrize("persistence", ["tar", "snapshot"])
async def test_a_session_is_persisted_and_resumed(tmp_path, persistence):
    client = E2BSandboxClient()
    session = await client.create(
        manifest=MANIFEST, snapshot=LocalSnapshotSpec(base_path=tmp_path),
        options=options(workspace_persistence=persistence),
    )
    async with session:
        await session.exec("echo persisted >state")
    await client.delete(session)
    state = client.deserialize_session_state(client.serialize_session_state(session.state))
    resumed = await client.resume(state)
    async with resumed:
        assert resumed.state.sandbox_id != session.state.sandbox_id
        assert (await resumed.exec("cat state task.txt")).stdout == b"persisted\nfirst\n"
    snapshots = e2b.Sandbox.list_snapshots()
    for snapshot in snapshots.next_items():
        e2b.Sandbox.delete_snapshot(snapshot.snapshot_id)

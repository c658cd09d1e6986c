"""`langchain-jiffy`: agents of deepagents in a sandbox, with a checkpoint for each step."""

import asyncio

import jiffy
import pytest
from deepagents import create_deep_agent
from langchain_anthropic import ChatAnthropic
from langchain_jiffy import JiffyCheckpoints, JiffySandbox
from langgraph.checkpoint.memory import InMemorySaver

THREAD = {"configurable": {"thread_id": "t"}}
TASK = {"messages": [("user", "start")]}


@pytest.fixture
def backend():
    with JiffySandbox(jiffy.Sandbox.create(timeout=120)) as backend:
        yield backend


@pytest.fixture
def checkpoints(backend):
    checkpoints = JiffyCheckpoints(backend)
    yield checkpoints
    checkpoints.delete_snapshots()


def agent(model, backend, *middleware, saver=None):
    """Returns an agent of deepagents that uses a sandbox."""
    chat = ChatAnthropic(model="m", base_url=model.url, api_key="k", max_retries=0)
    return create_deep_agent(chat, backend=backend, middleware=middleware, checkpointer=saver or InMemorySaver())


def run(command):
    """Returns a turn of the model that runs a command."""
    return [("execute", {"command": command})]


def test_the_tools_of_an_agent_use_the_files_of_the_sandbox(model, backend):
    place = "/home/user/notes/a.txt"
    server = model(
        [("write_file", {"file_path": place, "content": "one\ntwo\n"})],
        run(f"cat {place}; pwd; echo lost >&2; exit 3"),
        [("edit_file", {"file_path": place, "old_string": "two", "new_string": "three"})],
        [("read_file", {"file_path": place}), ("grep", {"pattern": "three", "path": "/home/user/notes"})],
    )
    agent(server, backend).invoke(TASK, THREAD)
    executed, read, found = server.results[1], server.results[3], server.results[4]
    assert all(word in executed for word in ("one\ntwo", "/home/user", "lost", "3")), executed
    assert "three" in read and "two" not in read
    assert place in found
    assert backend.sandbox.files.read(place) == "one\nthree\n"


def test_a_thread_that_continues_from_an_earlier_step_rolls_the_sandbox_back(model, backend, checkpoints):
    server = model(
        run("echo 1 >step; (sleep 100 & echo $! >pid) >/dev/null 2>&1"), run("echo 2 >step; rm pid"), "end",
        run("cat step; kill -0 $(cat pid) && echo alive"),
    )
    graph = agent(server, backend, checkpoints)
    graph.invoke(TASK, THREAD)
    assert backend.execute("cat step").output == "2\n"
    # The state after the first command, with which the model is called again.
    after = next(item for item in reversed(list(graph.get_state_history(THREAD))) if len(item.values["messages"]) == 3)
    graph.invoke(None, after.config)
    assert "1\nalive" in server.results[-1]


def test_a_thread_continues_in_another_process(model, backend, checkpoints):
    saver = InMemorySaver()
    server = model(run("echo 1 >step"), run("echo 2 >step"), "end", run("cat step"), "end", run("cat step"))
    agent(server, backend, checkpoints, saver=saver).invoke(TASK, THREAD)
    graph = agent(server, backend, JiffyCheckpoints(backend), saver=saver)
    graph.invoke({"messages": [("user", "continue")]}, THREAD)
    assert "2\n" in server.results[-1]
    after = next(item for item in reversed(list(graph.get_state_history(THREAD))) if len(item.values["messages"]) == 3)
    checkpoints = JiffyCheckpoints(backend)
    agent(server, backend, checkpoints, saver=saver).invoke(None, after.config)
    assert "1\n" in server.results[-1]
    checkpoints.delete_snapshots()


async def test_a_tool_that_is_repeated_starts_from_the_state_before_it(model, backend, checkpoints):
    server = model(run("echo x >>log; cat log"), "end")
    graph = agent(server, backend, checkpoints)
    await graph.ainvoke(TASK, THREAD)
    assert "x\n" in server.results[-1]
    async for item in graph.aget_state_history(THREAD):
        if item.next == ("tools",):
            await graph.ainvoke(None, item.config)
            break
    assert backend.execute("cat log").output == "x\n"


def test_only_the_latest_snapshots_are_retained(model, backend):
    checkpoints = JiffyCheckpoints(backend, retained=2)
    server = model(*[run(f"echo {n} >step") for n in range(6)])
    graph = agent(server, backend, checkpoints)
    graph.invoke(TASK, THREAD)
    steps = [item.values["jiffy_snapshot"] for item in graph.get_state_history(THREAD) if "jiffy_snapshot" in item.values]
    stored = {item.snapshot_id for item in jiffy.Snapshot.list(sandbox_id=backend.id)}
    assert steps[0] in stored and len(stored) < 6
    with pytest.raises(jiffy.NotFoundException, match="increase `retained`"):
        checkpoints.rollback("missing")
    first = list(graph.get_state_history(THREAD))[-1]
    with pytest.raises(jiffy.NotFoundException, match="increase `retained`"):
        graph.invoke(None, first.config)
    checkpoints.rollback(steps[0])
    assert backend.execute("cat step").output == "5\n"
    checkpoints.delete_snapshots()
    assert not list(jiffy.Snapshot.list(sandbox_id=backend.id))


def test_a_command_that_exceeds_its_timeout_is_killed(backend):
    result = backend.execute("echo begun; exec sleep 1000", timeout=3)
    assert result.exit_code == 124 and result.output.startswith("begun") and "after 3 s" in result.output
    # The call ends at the timeout, and the agent kills the command at the same time.
    assert any(backend.execute("pgrep -x sleep").exit_code == 1 for _ in range(100))


def test_the_output_of_a_command_is_bounded(backend):
    backend._max_output = 2000
    result = backend.execute("echo first; yes | head -c 5000000; echo last")
    assert result.truncated and len(result.output) < 2100
    assert result.output.startswith("first\n") and result.output.endswith("last\n")
    assert result.exit_code == 0


def test_errors_of_files_and_of_a_killed_sandbox_are_results(backend):
    download, upload = backend.download_files, backend.upload_files
    assert [item.error for item in download(["/missing", "/etc", "relative"])] == [
        "file_not_found", "is_directory", "invalid_path"
    ]
    assert [item.error for item in upload([("/etc", b"x"), ("relative", b"x"), ("/tmp/a/b", b"x")])] == [
        "is_directory", "invalid_path", None
    ]
    assert download(["/tmp/a/b"])[0].content == b"x"
    backend.sandbox.kill()
    result = backend.execute("true")
    assert result.exit_code is None and backend.id in result.output


async def test_cancelling_an_agent_leaves_a_usable_sandbox(model, backend):
    server = model(run("touch begun; exec sleep 1000"))
    task = asyncio.create_task(agent(server, backend).ainvoke(TASK, THREAD))
    while not await asyncio.to_thread(backend.sandbox.files.exists, "begun"):
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.execute("pgrep -x sleep").exit_code == 1

"""Sandboxes are created, found, listed, timed out and killed."""

import os
from datetime import datetime, timedelta, timezone

import pytest
from e2b import SandboxException, SandboxNotFoundException, SandboxNotRunningException, SandboxQuery, SandboxState


async def test_a_created_sandbox_runs_commands_immediately(sdk, create):
    sandbox = await create()
    result = await sdk(sandbox.commands.run, "id -un; pwd; uname -r")
    user, directory, release = result.stdout.split()
    assert (user, directory) == ("user", "/home/user")
    assert release.endswith(("-jiffy", "-gvisor"))
    assert await sdk(sandbox.is_running)


async def test_information_contains_the_requested_settings(sdk, create):
    before = datetime.now(timezone.utc)
    sandbox = await create("base", timeout=200, metadata={"purpose": "information", "ünï": "c=ö&d"})
    info = await sdk(sandbox.get_info)
    assert info.sandbox_id == sandbox.sandbox_id
    assert "-" not in info.sandbox_id
    assert info.name == "base" or info.template_id == "base"
    assert info.state is SandboxState.RUNNING
    assert info.metadata == {"purpose": "information", "ünï": "c=ö&d"}
    assert before - timedelta(seconds=2) <= info.started_at <= datetime.now(timezone.utc) + timedelta(seconds=1)
    assert abs((info.end_at - info.started_at).total_seconds() - 200) < 5
    assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}
    real = await sdk(sandbox.commands.run, "nproc; awk '/MemTotal/ {print $2}' /proc/meminfo")
    cores, kilobytes = map(int, real.stdout.split())
    assert info.cpu_count == cores
    assert kilobytes / 1024 <= info.memory_mb < kilobytes / 1024 * 1.5 + 100
    assert tuple(map(int, info.envd_version.split("."))) >= (0, 6, 4)


async def test_a_sandbox_without_a_timeout_gets_the_default_of_five_minutes(sdk):
    sandbox = await sdk(sdk.Sandbox.create)
    try:
        info = await sdk(sandbox.get_info)
        assert abs((info.end_at - info.started_at).total_seconds() - 300) < 5
    finally:
        await sdk(sandbox.kill)


async def test_commands_have_the_environment_of_the_sandbox_and_can_override_it(sdk, create):
    sandbox = await create(envs={"SHARED": "from create", "BOTH": "from create"})
    result = await sdk(sandbox.commands.run, 'echo "$SHARED/$BOTH/$OWN"', envs={"BOTH": "own", "OWN": "o'w\nn"})
    assert result.stdout == "from create/own/o'w\nn\n"


async def test_a_sandbox_can_be_reconnected_by_its_id(sdk, create):
    sandbox = await create()
    await sdk(sandbox.files.write, "/tmp/note", "still here")
    again = await sdk(sdk.Sandbox.connect, sandbox.sandbox_id)
    assert again.sandbox_id == sandbox.sandbox_id
    assert await sdk(again.files.read, "/tmp/note") == "still here"


async def test_connecting_to_a_running_sandbox_never_shortens_its_timeout(sdk, create):
    sandbox = await create(timeout=100)
    await sdk(sdk.Sandbox.connect, sandbox.sandbox_id, timeout=10)
    unchanged = (await sdk(sandbox.get_info)).end_at
    assert unchanged > datetime.now(timezone.utc) + timedelta(seconds=60)
    await sdk(sandbox.connect, timeout=500)
    assert (await sdk(sandbox.get_info)).end_at > unchanged + timedelta(seconds=300)


async def test_set_timeout_counts_from_now_and_may_shorten(sdk, create):
    sandbox = await create(timeout=100)
    for seconds in (1000, 30):
        await sdk(sandbox.set_timeout, seconds)
        left = (await sdk(sandbox.get_info)).end_at - datetime.now(timezone.utc)
        assert abs(left.total_seconds() - seconds) < 5
    await sdk(sdk.Sandbox.set_timeout, sandbox.sandbox_id, 60)
    left = (await sdk(sandbox.get_info)).end_at - datetime.now(timezone.utc)
    assert abs(left.total_seconds() - 60) < 5


async def test_a_timed_out_sandbox_no_longer_exists(sdk, create, eventually):
    sandbox = await create(timeout=1)

    async def no_longer_exists():
        try:
            await sdk(sandbox.get_info)
        except SandboxNotFoundException:
            return True

    await eventually(no_longer_exists)
    assert await sdk(sandbox.is_running) is False
    with pytest.raises(SandboxNotRunningException):
        await sdk(sandbox.commands.run, "true")


async def test_a_killed_sandbox_no_longer_exists_and_a_second_kill_reports_it(sdk, create):
    sandbox = await create()
    assert await sdk(sandbox.kill) is True
    assert await sdk(sandbox.is_running) is False
    assert await sdk(sandbox.kill) is False
    assert await sdk(sdk.Sandbox.kill, sandbox.sandbox_id) is False
    with pytest.raises(SandboxNotFoundException):
        await sdk(sandbox.get_info)
    with pytest.raises(SandboxNotRunningException):
        await sdk(sandbox.files.read, "/etc/hostname")


async def test_a_command_in_a_killed_sandbox_ends_with_the_reason(sdk, create):
    sandbox = await create()
    command = await sdk.start(sandbox, "echo started; sleep 1000")
    await command.wait_for_output("started")
    await sdk(sandbox.kill)
    with pytest.raises(SandboxNotRunningException):
        await command.end()


async def test_a_sandbox_is_killed_at_the_end_of_its_with_block(sdk):
    if sdk.blocking:
        with sdk.Sandbox.create(timeout=60) as sandbox:
            assert sandbox.is_running()
    else:
        async with await sdk.Sandbox.create(timeout=60) as sandbox:
            assert await sandbox.is_running()
    assert await sdk(sandbox.is_running) is False


async def test_creates_with_one_idempotency_key_create_one_sandbox(sdk, create, unique):
    first = await create(idempotency_key=unique)
    second = await create(idempotency_key=unique)
    other = await create(idempotency_key=unique + "-2")
    assert first.sandbox_id == second.sandbox_id != other.sandbox_id


async def test_lists_can_be_filtered_by_metadata(sdk, create, unique):
    awkward = "a&b=c d/é+%"
    wanted = await create(metadata={"run": unique, "kind": awkward})
    await create(metadata={"run": unique, "kind": "another"})
    query = SandboxQuery(metadata={"run": unique, "kind": awkward})
    found = await sdk.all(sdk.Sandbox.list(query=query))
    assert [info.sandbox_id for info in found] == [wanted.sandbox_id]
    assert found[0].metadata == {"run": unique, "kind": awkward}
    assert await sdk.all(sdk.Sandbox.list(query=SandboxQuery(metadata={"run": unique + "x"}))) == []


async def test_lists_have_pages_in_the_requested_order(sdk, create, unique):
    made = [(await create(metadata={"run": unique})).sandbox_id for _ in range(5)]
    query = SandboxQuery(metadata={"run": unique})
    for order, expected in (("asc", made), ("desc", made[::-1])):
        pages = await sdk.pages(sdk.Sandbox.list(query=query, limit=2, order=order))
        assert [len(page) for page in pages] == [2, 2, 1]
        assert [info.sandbox_id for page in pages for info in page] == expected


async def test_a_sandbox_that_ends_between_two_pages_affects_neither(sdk, create, unique):
    made = [await create(metadata={"run": unique}) for _ in range(4)]
    paginator = sdk.Sandbox.list(query=SandboxQuery(metadata={"run": unique}), limit=2, order="asc")
    first = await sdk(paginator.next_items)
    await sdk(made[1].kill)
    second = await sdk(paginator.next_items)
    ids = [sandbox.sandbox_id for sandbox in made]
    assert [info.sandbox_id for info in first] == ids[:2]
    assert [info.sandbox_id for info in second] == ids[2:]
    assert not paginator.has_next


async def test_lists_can_be_filtered_by_state_template_and_age(sdk, create, unique):
    metadata = {"run": unique}
    running = await create(metadata=metadata)
    paused = await create(metadata=metadata)
    await sdk(paused.pause)

    async def ids(**query):
        found = await sdk.all(sdk.Sandbox.list(query=SandboxQuery(metadata=metadata, **query)))
        return {info.sandbox_id for info in found}

    both = {running.sandbox_id, paused.sandbox_id}
    assert await ids() == both
    assert await ids(state=[SandboxState.RUNNING]) == {running.sandbox_id}
    assert await ids(state=[SandboxState.PAUSED]) == {paused.sandbox_id}
    assert await ids(state=[SandboxState.PAUSED, SandboxState.RUNNING]) == both
    assert await ids(template="base") == both
    assert await ids(template="no-such-template") == set()
    now = datetime.now(timezone.utc)
    assert await ids(started_after=now - timedelta(minutes=5)) == both
    assert await ids(started_after=now + timedelta(minutes=5)) == set()


async def test_an_unknown_sandbox_is_not_found_by_any_call(sdk):
    missing = "i0000000000000000000"
    for call in (
        lambda: sdk(sdk.Sandbox.get_info, missing),
        lambda: sdk(sdk.Sandbox.connect, missing),
        lambda: sdk(sdk.Sandbox.set_timeout, missing, 10),
        lambda: sdk(sdk.Sandbox.pause, missing),
        lambda: sdk(sdk.Sandbox.create_snapshot, missing),
        lambda: sdk(sdk.Sandbox.fork, missing),
        lambda: sdk(sdk.Sandbox.get_metrics, missing),
        lambda: sdk(sdk.Sandbox.update_network, missing, {"deny_out": ["0.0.0.0/0"]}),
    ):
        with pytest.raises(SandboxNotFoundException):
            await call()
    assert await sdk(sdk.Sandbox.kill, missing) is False
    assert await sdk(sdk.Sandbox.delete_snapshot, missing) is False


async def test_an_unknown_template_is_rejected_with_its_name(sdk):
    with pytest.raises(SandboxException, match="no-such-template") as refusal:
        await sdk(sdk.Sandbox.create, "no-such-template")
    assert refusal.value.status_code == 404


@pytest.mark.parametrize(
    "options",
    [{"timeout": -5}, {"timeout": 10**9}, {"envs": {"NOT=A NAME": "x"}}, {"network": {"deny_out": ["not an address"]}}],
    ids=["negative timeout", "endless timeout", "bad variable", "bad address"],
)
async def test_invalid_options_are_rejected_with_400(sdk, options):
    with pytest.raises(SandboxException) as refusal:
        await sdk(sdk.Sandbox.create, **options)
    assert refusal.value.status_code == 400


async def test_environment_variables_configure_a_client_completely():
    assert {"E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"} <= os.environ.keys()
    assert "E2B_DOMAIN" not in os.environ and "E2B_DEBUG" not in os.environ

"""Creates, connections to daemons, and the calls of E2B."""

import os
import subprocess
import sys

import jiffy
import pytest
from jiffy import Sandbox, error_codes
from servers import PROGRAM, install_program, prepare


async def test_a_sandbox_is_an_instance_of_the_class_of_e2b(sdk, shared):
    assert isinstance(shared, sdk.base)
    assert issubclass(jiffy.Snapshot, jiffy.models.E2bSnapshotInfo)


async def test_code_for_e2b_works_after_its_import_is_changed(sdk, create):
    sandbox = await create(envs={"GREETING": "hello"}, metadata={"of": "e2b"})
    await sdk(sandbox.files.write, "/home/user/note", "text")
    assert await sdk(sandbox.files.read, "/home/user/note") == "text"
    assert (await sdk(sandbox.commands.run, "echo $GREETING")).stdout == "hello\n"
    with pytest.raises(jiffy.CommandExitException):
        await sdk(sandbox.commands.run, "exit 3")
    assert await sdk(sandbox.is_running) is True
    assert await sdk(sdk.Sandbox.kill, sandbox.sandbox_id) is True
    assert await sdk(sandbox.kill) is False


async def test_a_create_has_a_name_a_size_and_metadata(sdk, create, unique):
    sandbox = await create(name=unique, cpu_count=1, memory_mb=256, disk_mb=2048, metadata={"a": "b"})
    info = await sdk(sandbox.get_info)
    assert (info.cpu_count, info.memory_mb, info.metadata, sandbox.name) == (1, 256, {"a": "b"}, unique)


async def test_a_sandbox_is_found_by_its_name(sdk, create, unique):
    sandbox = await create(name=unique)
    found = await sdk(sdk.Sandbox.connect, unique)
    assert found.sandbox_id == sandbox.sandbox_id
    assert (await sdk(found.commands.run, "echo found")).stdout == "found\n"


async def test_the_origin_of_a_guest_is_known(sdk, create):
    sandbox = await create()
    assert sandbox.boot_mode in ("cold", "snapshot", "warm-pool") and sandbox.boot_ms > 0
    expected = os.environ["JIFFY_ENGINE"]
    assert sandbox.engine == expected or (expected == "auto" and sandbox.engine in ("microvm", "gvisor"))
    assert sandbox.forked_from is None


async def test_a_context_kills_its_sandbox(sdk):
    async with sdk.within(await sdk(sdk.Sandbox.create)) as sandbox:
        assert await sdk(sandbox.is_running)
    with pytest.raises(error_codes.SandboxNotFoundError):
        await sdk(sandbox.get_info)


async def test_a_context_kills_its_sandbox_after_an_error(sdk):
    sandbox = await sdk(sdk.Sandbox.create)
    with pytest.raises(KeyError):
        async with sdk.within(sandbox):
            raise KeyError("in the block")
    with pytest.raises(error_codes.SandboxNotFoundError):
        await sdk(sandbox.get_info)


async def test_information_and_timeout_are_those_of_e2b(sdk, create):
    sandbox = await create(timeout=100)
    await sdk(sandbox.set_timeout, 500)
    info = await sdk(sdk.Sandbox.get_info, sandbox.sandbox_id)
    assert isinstance(info, jiffy.SandboxInfo) and info.state == jiffy.SandboxState.RUNNING
    assert 490 < (info.end_at - info.started_at).total_seconds() < 600
    assert isinstance(await sdk(sandbox.get_metrics), list)


async def test_lists_have_pages(sdk, create, unique):
    made = {(await create(metadata={"list": unique})).sandbox_id for _ in range(3)}
    paginator = sdk.Sandbox.list(query=jiffy.SandboxQuery(metadata={"list": unique}), limit=2)
    pages = []
    while paginator.has_next:
        pages.append([item.sandbox_id for item in await sdk(paginator.next_items)])
    assert [len(page) for page in pages] == [2, 1] and {item for page in pages for item in page} == made


async def test_a_repeated_create_with_one_key_returns_one_sandbox(create, unique):
    made = [await create(idempotency_key=unique) for _ in range(2)]
    assert made[0].sandbox_id == made[1].sandbox_id


async def test_a_paused_sandbox_is_resumed_by_connect(sdk, create):
    sandbox = await create()
    await sdk(sandbox.files.write, "/dev/shm/note", "in memory")
    assert await sdk(sandbox.pause) is True
    assert await sdk(sandbox.pause) is False
    assert (await sdk(sandbox.connect)) is sandbox
    assert await sdk(sandbox.files.read, "/dev/shm/note") == "in memory"


async def test_variables_of_jiffy_precede_those_of_e2b(sdk, without_variables):
    url, key = os.environ["JIFFY_TEST_URL"], os.environ["JIFFY_TEST_KEY"]
    without_variables.setenv("E2B_API_URL", "http://127.0.0.1:9")
    without_variables.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    without_variables.setenv("JIFFY_URL", url + "/")
    without_variables.setenv("JIFFY_API_KEY", key)
    async with sdk.within(await sdk(sdk.Sandbox.create)) as sandbox:
        assert (await sdk(sandbox.commands.run, "echo yes")).stdout == "yes\n"


async def test_variables_of_e2b_select_the_daemon(sdk, without_variables):
    without_variables.setenv("E2B_API_URL", os.environ["JIFFY_TEST_URL"])
    without_variables.setenv("E2B_API_KEY", os.environ["JIFFY_TEST_KEY"])
    async with sdk.within(await sdk(sdk.Sandbox.create)) as sandbox:
        assert (await sdk(sandbox.commands.run, "echo yes")).stdout == "yes\n"


async def test_files_of_a_volume_have_the_address_of_the_daemon(sdk, without_variables, unique):
    without_variables.setenv("JIFFY_URL", os.environ["JIFFY_TEST_URL"])
    without_variables.setenv("JIFFY_API_KEY", os.environ["JIFFY_TEST_KEY"])
    volume = await sdk(sdk.Volume.create, unique)
    try:
        await sdk(volume.write_file, "/a/text", "content", force=True)
        found = await sdk(sdk.Volume.connect, volume.volume_id)
        assert await sdk(found.read_file, "/a/text") == "content"
    finally:
        assert await sdk(sdk.Volume.destroy, volume.volume_id) is True


async def test_volumes_are_stored_listed_and_restored(sdk, daemon, without_variables, tmp_path):
    # Without variables, the files have the address of the connection.
    with_store = daemon("--store", f"file://{tmp_path}/bucket")
    connection = {"api_url": with_store.url, "api_key": with_store.key}
    volume = await sdk(sdk.Volume.create, "first", **connection)
    await sdk(volume.write_file, "/text", "content")
    snapshot = await sdk(volume.snapshot)
    assert (snapshot.volume_id, snapshot.name) == (volume.volume_id, "first")
    assert await sdk(sdk.Volume.snapshots, **connection) == [snapshot]
    await sdk(volume.write_file, "/text", "changed")
    restored = await sdk(sdk.Volume.restore, snapshot, "second", **connection)
    assert isinstance(restored, sdk.Volume)
    assert await sdk(restored.read_file, "/text") == "content"
    assert await sdk(sdk.Volume.delete_snapshot, snapshot, **connection) is True
    assert await sdk(sdk.Volume.delete_snapshot, snapshot.snapshot_id, **connection) is False
    with pytest.raises(jiffy.ApiError):
        await sdk(sdk.Volume.restore, snapshot, "third", **connection)


async def test_the_daemon_of_the_host_is_found_without_variables(sdk, without_variables):
    without_variables.setenv("JIFFY_HOME", os.environ["JIFFY_SDK_HOME"])
    async with sdk.within(await sdk(sdk.Sandbox.create)) as sandbox:
        assert (await sdk(sandbox.commands.run, "echo yes")).stdout == "yes\n"


async def test_an_error_without_a_daemon_names_the_missing_package(sdk, without_variables, tmp_path):
    without_variables.setenv("JIFFY_HOME", str(tmp_path))
    without_variables.setenv("PATH", str(tmp_path))
    with pytest.raises(jiffy.NoDaemonError, match=r"pip install 'jiffy-sandbox\[host\]'"):
        await sdk(sdk.Sandbox.create)


async def test_the_daemon_of_the_host_is_started_if_none_runs(sdk, without_variables, tmp_path):
    home = tmp_path / "home"
    prepare(home)
    install_program(tmp_path / "bin")
    without_variables.setenv("JIFFY_HOME", str(home))
    without_variables.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    try:
        async with sdk.within(await sdk(sdk.Sandbox.create)) as sandbox:
            assert (await sdk(sandbox.commands.run, "echo started")).stdout == "started\n"
    finally:
        subprocess.run([PROGRAM, "daemon", "stop", "--kill-sandboxes"], check=True, capture_output=True)


TLS = """
import asyncio
from jiffy import AsyncSandbox, Sandbox
with Sandbox.create(request_timeout=20) as sandbox:
    print(sandbox.commands.run("echo trusted").stdout, end="")
    sandbox.commands.run("python3 -m http.server 8000 --bind 127.0.0.1", background=True)
    sandbox.wait_for_port(8000)
async def main():
    async with await AsyncSandbox.create() as sandbox:
        print((await sandbox.commands.run("echo trusted")).stdout, end="")
asyncio.run(main())
"""


def test_the_authority_in_a_variable_is_trusted(daemon, tmp_path):
    secure = daemon("--tls", "--domain", "sandboxes.test")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    variables |= {"JIFFY_URL": secure.url, "JIFFY_API_KEY": secure.key}
    untrusting = subprocess.run([sys.executable, "-c", TLS], env=variables, capture_output=True, text=True, timeout=50)
    assert untrusting.returncode != 0 and "UnreachableError" in untrusting.stderr
    variables["JIFFY_CA"] = str(secure.home / "tls" / "authority.pem")
    trusting = subprocess.run([sys.executable, "-c", TLS], env=variables, capture_output=True, text=True, timeout=50)
    assert trusting.stdout == "trusted\ntrusted\n", trusting.stderr


async def test_sandboxes_of_another_key_are_not_found(sdk, create, unique):
    sandbox = await create(name=unique)
    command = [os.environ["JIFFY_BIN_DIR"] + "/jiffy", "key", "create", "--name", unique, "--scope", "create"]
    variables = os.environ | {"JIFFY_HOME": os.environ["JIFFY_SDK_HOME"]}
    made = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    key = next(word for word in made.stdout.split() if word.startswith("e2b_"))
    for name in (sandbox.sandbox_id, unique):
        with pytest.raises(error_codes.SandboxNotFoundError):
            await sdk(sdk.Sandbox.connect, name, api_key=key)
    assert await sdk(sdk.Sandbox.kill, sandbox.sandbox_id, api_key=key) is False
    with pytest.raises(error_codes.UnauthenticatedError) as refusal:
        await sdk(sdk.Sandbox.connect, unique, api_key="e2b_" + "0" * 40)
    assert isinstance(refusal.value, jiffy.AuthenticationException)


def test_calls_work_after_a_restart_of_the_daemon(daemon):
    first = daemon()
    options = {"api_url": first.url, "api_key": first.key}
    sandbox = Sandbox.create(**options)
    sandbox.files.write("/home/user/note", "kept")
    address = first.url.removeprefix("http://")
    first.stop()
    daemon(listen=address)
    assert sandbox.files.read("/home/user/note") == "kept"
    assert sandbox.get_info().state == jiffy.SandboxState.RUNNING
    snapshot = sandbox.snapshot()
    sandbox.rollback(snapshot)
    assert (sandbox.commands.run("echo again")).stdout == "again\n"
    assert snapshot.delete() and sandbox.kill()

"""API keys: authentication, ownership and limits."""

import asyncio
import os
from pathlib import Path

import pytest
from e2b import AuthenticationException, SandboxException, SandboxNotFoundException, SandboxQuery


async def jiffy(*words):
    """Runs a command of the operator."""
    program = Path(os.environ["JIFFY_BIN_DIR"], "jiffy")
    environment = os.environ | {"JIFFY_HOME": os.environ["JIFFY_SDK_HOME"]}
    process = await asyncio.create_subprocess_exec(program, *words, stdout=asyncio.subprocess.PIPE, env=environment)
    out, _ = await process.communicate()
    assert process.returncode == 0, words
    return out.decode().split()[-1]


@pytest.fixture
async def new_key(unique):
    """Creates keys and revokes them after the test. Requested before `sandbox`, so that sandboxes
    are killed first."""
    made = set()

    async def revoke(name):
        made.remove(name)
        await jiffy("key", "revoke", name)

    async def make(*limits):
        name = f"{unique}-{len(made)}"
        secret = await jiffy("key", "create", "--name", name, *limits)
        made.add(name)
        return secret, lambda: revoke(name)

    yield make
    for name in list(made):
        await revoke(name)


@pytest.mark.parametrize("key", ["e2b_0000000000000000000000000000000000000000", "x"])
async def test_a_wrong_key_is_rejected_everywhere(sdk, sandbox, key):
    wrong = {"api_key": key}
    for call in (
        lambda: sdk(sdk.Sandbox.create, **wrong),
        lambda: sdk(sdk.Sandbox.get_info, sandbox.sandbox_id, **wrong),
        lambda: sdk(sdk.Sandbox.connect, sandbox.sandbox_id, **wrong),
        lambda: sdk(sdk.Sandbox.kill, sandbox.sandbox_id, **wrong),
        lambda: sdk(sdk.Sandbox.pause, sandbox.sandbox_id, **wrong),
        lambda: sdk(sdk.Sandbox.list(query=SandboxQuery(), **wrong).next_items),
        lambda: sdk(sdk.Sandbox.list_snapshots(**wrong).next_items),
        lambda: sdk(sdk.Sandbox.delete_snapshot, "x", **wrong),
    ):
        with pytest.raises(AuthenticationException):
            await call()
    assert await sdk(sandbox.is_running)


async def test_a_key_is_also_accepted_as_a_bearer_token(sandbox, web, url, api_key):
    answer = await web.get(f"{url}/sandboxes/{sandbox.sandbox_id}", headers={"Authorization": f"Bearer {api_key}"})
    assert answer.status_code == 200 and answer.json()["sandboxID"] == sandbox.sandbox_id
    assert (await web.get(f"{url}/sandboxes/{sandbox.sandbox_id}")).status_code == 401


async def test_a_key_has_access_only_to_its_own_sandboxes(new_key, sdk, sandbox, create):
    key, _ = await new_key()
    own = await create(api_key=key)
    assert [info.sandbox_id for info in await sdk.all(sdk.Sandbox.list(api_key=key))] == [own.sandbox_id]
    with pytest.raises(SandboxNotFoundException):
        await sdk(sdk.Sandbox.connect, sandbox.sandbox_id, api_key=key)
    assert await sdk(sdk.Sandbox.kill, sandbox.sandbox_id, api_key=key) is False
    assert await sdk(sandbox.is_running)


async def test_a_revoked_key_is_rejected_immediately_and_its_sandboxes_continue(new_key, sdk):
    key, revoke = await new_key()
    own = await sdk(sdk.Sandbox.create, api_key=key, timeout=120)
    await revoke()
    with pytest.raises(AuthenticationException):
        await sdk(own.get_info)
    with pytest.raises(AuthenticationException):
        await sdk(sdk.Sandbox.create, api_key=key)
    assert (await sdk(own.commands.run, "echo on")).stdout == "on\n"
    assert await sdk(sdk.Sandbox.kill, own.sandbox_id) is True


async def test_the_limit_of_a_key_counts_sandboxes_created_by_any_method(new_key, sdk, create):
    key, _ = await new_key("--max-sandboxes", "1")
    sleeper = await create(api_key=key, lifecycle={"on_timeout": "pause", "auto_resume": True})
    await sdk(sleeper.files.write, "/dev/shm/kept", "kept")
    await sdk(sleeper.pause)
    other = await create(api_key=key)
    for more in (
        lambda: sdk(sdk.Sandbox.create, api_key=key, request_timeout=5),
        lambda: sdk(sleeper.connect, request_timeout=5),
        # Auto-resume by traffic must not bypass the limit.
        lambda: sdk(sleeper.files.read, "/dev/shm/kept", request_timeout=5),
    ):
        with pytest.raises(SandboxException, match="running sandboxes"):
            await more()
    await sdk(other.kill)
    assert await sdk(sleeper.files.read, "/dev/shm/kept") == "kept"

"""Who may ask."""

import pytest
from e2b import AuthenticationException, SandboxQuery


@pytest.mark.parametrize("key", ["e2b_0000000000000000000000000000000000000000", "x"])
async def test_a_wrong_key_is_refused_everywhere(sdk, sandbox, key):
    wrong = {"api_key": key}
    for ask in (
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
            await ask()
    assert await sdk(sandbox.is_running)


async def test_a_key_is_taken_as_a_bearer_token_too(sandbox, web, url, api_key):
    answer = await web.get(f"{url}/sandboxes/{sandbox.sandbox_id}", headers={"Authorization": f"Bearer {api_key}"})
    assert answer.status_code == 200 and answer.json()["sandboxID"] == sandbox.sandbox_id
    assert (await web.get(f"{url}/sandboxes/{sandbox.sandbox_id}")).status_code == 401

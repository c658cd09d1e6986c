"""Secrets are written, listed without values, changed and removed by the unmodified package."""

import uuid

import pytest
from e2b import AsyncSecret, SandboxException, Secret, SecretException, SecretNotFoundException


@pytest.fixture
def secrets(sdk):
    return AsyncSecret if not sdk.blocking else Secret


@pytest.fixture
def name():
    return f"token-{uuid.uuid4().hex[:8]}"


async def names(sdk, secrets):
    """Returns the names of all secrets."""
    found, pages = [], secrets.list(limit=2)
    while pages.has_next:
        found += [secret.name for secret in await sdk(pages.next_items)]
    return found


async def test_a_secret_is_created_changed_and_destroyed(sdk, secrets, name):
    created = await sdk(secrets.create, name.upper(), "first value", metadata={"team": "a"})
    assert (created.name, created.version, created.metadata) == (name, 1, {"team": "a"})
    try:
        assert name in await names(sdk, secrets)
        changed = await sdk(secrets.update, name, "second value")
        assert (changed.secret_id, changed.version, changed.metadata) == (created.secret_id, 2, {"team": "a"})
        info = await sdk(secrets.get_info, created.secret_id)
        assert info.updated_at >= info.created_at
        assert "value" not in repr(info)
        with pytest.raises(SecretException):
            await sdk(secrets.create, name, "another")
    finally:
        assert await sdk(secrets.destroy, name) is True
    assert await sdk(secrets.exists, name) is False
    assert await sdk(secrets.destroy, name) is False
    with pytest.raises(SecretNotFoundException):
        await sdk(secrets.update, name, "x")


async def test_rules_add_headers_with_secrets_that_are_not_returned(sdk, secrets, create, name):
    await sdk(secrets.create, name, "the value")

    def rules(secret):
        return {"api.example.com": [{"transform": {"headers": {"authorization": f"Bearer ${{e2b.secrets.{secret}}}"}}}]}

    try:
        literal = {"b.example.com": [{"transform": {"headers": {"x-key": "text"}}}]}
        sandbox = await create(network={"rules": {**rules(name), **literal}})
        shown = (await sdk(sandbox.get_info)).network["rules"]
        assert {**rules(name), "b.example.com": [{"transform": {"headers": {"x-key": "***"}}}]} == shown
        await sdk(sandbox.update_network, {"rules": rules(name)})
        assert (await sdk(sandbox.get_info)).network["rules"] == rules(name)
        with pytest.raises(SandboxException) as refusal:
            await sdk(sandbox.update_network, {"rules": rules("missing")})
        assert refusal.value.status_code == 400
    finally:
        await sdk(secrets.destroy, name)

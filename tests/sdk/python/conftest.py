"""Fixtures. `tests/sdk/run` starts the daemon and sets the environment variables that users set."""

import os

import httpx
import pytest
from fixtures import create, eventually, unique  # noqa: F401
from flavour import Flavour


@pytest.fixture(scope="session")
def url():
    return os.environ["E2B_API_URL"]


@pytest.fixture(scope="session")
def api_key():
    return os.environ["E2B_API_KEY"]


@pytest.fixture(scope="session", params=["sync", "async"])
def sdk(request):
    return Flavour(request.param)


@pytest.fixture(scope="session")
async def web():
    """An HTTP client without an SDK, like a browser."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
async def sandbox(sdk):
    """A sandbox shared by the tests of one file, which do not disturb each other."""
    sandbox = await sdk(sdk.Sandbox.create, timeout=600)
    yield sandbox
    await sdk(sandbox.kill)


@pytest.fixture(scope="module")
async def interpreter(sdk):
    """A shared sandbox with the code interpreter."""
    sandbox = await sdk(sdk.Interpreter.create, timeout=600)
    yield sandbox
    await sdk(sandbox.kill)

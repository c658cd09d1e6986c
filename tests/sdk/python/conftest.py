"""Fixtures. `tests/sdk/run` starts the daemon and sets the environment variables that users set."""

import asyncio
import os
import time
import uuid

import httpx
import pytest
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


@pytest.fixture
async def create(sdk):
    """Creates sandboxes and kills them after the test."""
    made = []

    async def make(template=None, **options):
        options.setdefault("timeout", 120)
        sandbox = await sdk(sdk.Sandbox.create, template, **options)
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        await sdk(sandbox.kill)


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


@pytest.fixture
def unique():
    """A unique word."""
    return uuid.uuid4().hex[:12]


@pytest.fixture(scope="session")
def eventually():
    """Polls the API until a condition holds or a time limit is reached."""

    async def wait(question, limit=20):
        end = time.monotonic() + limit
        while not (answer := await question()):
            assert time.monotonic() < end, f"not within {limit} s; the last answer was {answer!r}"
            await asyncio.sleep(0.05)
        return answer

    return wait

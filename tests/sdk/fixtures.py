"""Fixtures of the tests of all Python clients. The fixture `sdk` calls the client."""

import asyncio
import time
import uuid

import pytest


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


@pytest.fixture
def unique():
    """A unique word."""
    return uuid.uuid4().hex[:12]


@pytest.fixture(scope="session")
def eventually():
    """Polls until a condition holds or a time limit is reached."""

    async def wait(question, limit=20):
        end = time.monotonic() + limit
        while not (answer := await question()):
            assert time.monotonic() < end, f"not within {limit} s; the last answer was {answer!r}"
            await asyncio.sleep(0.05)
        return answer

    return wait

"""Fixtures. `tests/sdk/run` starts the daemon and sets the variables of E2B."""

import json
import os
import re
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from fixtures import create, eventually, unique  # noqa: F401
from flavour import Flavour
from servers import Daemon

SCENARIOS = Path(__file__).parent.parent / "scenarios.txt"


def pytest_collection_finish(session):
    """Fails if the tests differ from the list of scenarios, unless a part was selected."""
    listed = {re.sub(r"\W+", "_", line) for line in SCENARIOS.read_text().splitlines()}
    found = {item.originalname.removeprefix("test_") for item in session.items}
    is_complete = not session.config.option.keyword and all("::" not in arg for arg in session.config.args)
    if is_complete and found != listed:
        raise pytest.UsageError(f"missing: {sorted(listed - found)}; not listed: {sorted(found - listed)}")


@pytest.fixture(scope="session", params=["sync", "async"])
def sdk(request):
    return Flavour(request.param)


@pytest.fixture(scope="session")
async def shared(sdk):
    """A sandbox for tests that do not disturb each other."""
    sandbox = await sdk(sdk.Sandbox.create, timeout=600)
    yield sandbox
    await sdk(sandbox.kill)


@pytest.fixture
def daemon(tmp_path):
    """Starts daemons of a single test, and stops them after the test."""
    started = []

    def start(*options, **settings):
        started.append(Daemon(tmp_path / "home", *options, **settings))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.stop()


@pytest.fixture
def without_variables(monkeypatch):
    """Removes the variables that select a daemon."""
    for name in list(os.environ):
        if name.startswith(("E2B_", "JIFFY_URL", "JIFFY_API_KEY", "JIFFY_CA", "JIFFY_HOME")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def children():
    """Returns the ids of the running forks of a sandbox.

    The lists of the packages lack the origin, and a connection would affect the sandboxes of others.
    """

    def running():
        page = {"limit": 100, "state": "running"}
        while True:
            address = os.environ["E2B_API_URL"] + "/v2/sandboxes?" + urllib.parse.urlencode(page)
            request = urllib.request.Request(address, headers={"X-API-Key": os.environ["E2B_API_KEY"]})
            with urllib.request.urlopen(request, timeout=30) as response:
                yield from json.load(response)
                page["nextToken"] = response.headers.get("x-next-token")
            if not page["nextToken"]:
                return

    def forks_of(sandbox):
        return [listed["sandboxID"] for listed in running() if listed.get("forkedFrom") == sandbox.sandbox_id]

    return forks_of

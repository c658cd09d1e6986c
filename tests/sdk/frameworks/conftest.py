"""Model servers, and a check that each test removes its sandboxes and snapshots."""

import json
import os
import time
import urllib.request

import pytest
from fixtures import unique  # noqa: F401
from models import Model

# No framework may send measurements or traces.
os.environ.update({
    "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true", "INSPECT_DISPLAY": "none",
})


@pytest.fixture
def model():
    """Starts scripted models."""
    models = []

    def start(*turns):
        models.append(Model(*turns))
        return models[-1]

    yield start
    for one in models:
        one.close()


def call(path, method="GET", body=None):
    """Result of a call of the API."""
    headers = {"X-API-KEY": os.environ["JIFFY_TEST_KEY"], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["JIFFY_TEST_URL"] + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read() or b"null")


def owned(path):
    """Ids of the key's sandboxes or snapshots."""
    return {item.get("snapshotID") or item["sandboxID"] for item in call(path)}


@pytest.fixture
def templates():
    """Removes the templates that a test builds."""
    before = {item["templateID"] for item in call("/templates")}
    yield
    for item in call("/templates"):
        if item["templateID"] not in before:
            call(f"/pools/{item['aliases'][0]}", "PUT", {"size": 0})
            call(f"/templates/{item['templateID']}", "DELETE")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fails if a test leaves a sandbox or snapshot. Other suites use the same daemon in turn."""
    before = {path: owned(path) for path in ("/v2/sandboxes", "/snapshots")}
    yield
    for path, ids in before.items():
        end = time.monotonic() + 10
        while left := owned(path) - ids:
            assert time.monotonic() < end, f"left in {path}: {left}"
            time.sleep(0.05)

"""The document describes every path, parameter and field that the client packages can send.

The packages' own request builders are called with all of their options. A new version of a package
with a new call, parameter or field fails by its name.
"""

import json
import re
import subprocess
from pathlib import Path

import client_calls
import pytest

HERE = Path(__file__).parent
# Calls of the agent in the guest, which are not part of the API of the daemon.
OF_THE_AGENT = {"GET /envs", "GET /files", "POST /files", "POST /files/compose", "GET /metrics"}
PYTHON, NPM, CUBE = "e2b", "npm e2b", "cubesandbox"
# Requests that the document does not describe, by package, with the reason.
NO_TEAMS = "the API has no teams: the key determines the owner, and the field is ignored"
ALL_BUILDS = "the response has all builds of the template, so that there are no pages"
LIST_OF_RULES = "accepted; the document describes the form by host, which clients generated from it can express"
UNSUPPORTED = {
    "GET /templates: query teamID": ({PYTHON, NPM}, NO_TEAMS),
    "GET /v2/templates: query teamID": ({PYTHON, NPM}, NO_TEAMS),
    "POST /v3/templates: body.teamID": ({PYTHON, NPM}, NO_TEAMS),
    "GET /templates/{}: query limit": ({PYTHON, CUBE}, ALL_BUILDS),
    "GET /templates/{}: query nextToken": ({PYTHON, CUBE}, ALL_BUILDS),
    "GET /templates/{templateID}: query limit": ({NPM}, ALL_BUILDS),
    "GET /templates/{templateID}: query nextToken": ({NPM}, ALL_BUILDS),
    "GET /teams/{teamID}/metrics": ({NPM}, NO_TEAMS),
    "GET /teams/{teamID}/metrics/max": ({NPM}, NO_TEAMS),
    **{
        f"{call}[].{field}": ({CUBE}, LIST_OF_RULES)
        for call in ("POST /sandboxes: body.network.rules", "PUT /sandboxes/{}/network: body.rules")
        for field in (
            "name", "match", "match.host", "match.method", "match.path", "match.port", "match.scheme", "match.sni",
            "action", "action.allow", "action.audit", "action.inject", "action.inject[].format",
            "action.inject[].header", "action.inject[].secret",
        )
    },
}


@pytest.fixture(scope="module")
def document():
    # A test of the API compares this file with the document of the daemon.
    return json.loads((HERE.parents[2] / "web/openapi.json").read_text())


def folded(name):
    """The daemon accepts names in camel case and in snake case."""
    return name.replace("_", "").lower()


def unnamed(path):
    """Returns a path whose parameters have no names."""
    return re.sub(r"{[^}]*}", "{}", path)


def variants(document, schema):
    """Returns the schema without references and alternatives."""
    if "$ref" in schema:
        target = document
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return variants(document, target)
    several = [one for kind in ("allOf", "anyOf", "oneOf") for one in schema.get(kind, [])]
    own = [schema] if not several or "properties" in schema else []
    return own + [found for one in several for found in variants(document, one)]


def has_field(document, schema, names):
    """Returns whether a schema describes the field with the path `names`."""
    if not names:
        return True
    for one in variants(document, schema):
        inner = None
        if names[0] == "[]":
            inner = one.get("items")
        elif names[0] == "*":
            inner = one.get("additionalProperties")
        else:
            known = {folded(name): inner for name, inner in one.get("properties", {}).items()}
            inner = known.get(folded(names[0]))
            if inner is None and isinstance(one.get("additionalProperties"), dict):
                inner = one["additionalProperties"]
        if inner is True or inner == {}:
            return True
        if isinstance(inner, dict) and has_field(document, inner, names[1:]):
            return True
    return False


def missing(document, calls):
    """Returns the requests, parameters and fields of `calls` that the document does not describe."""
    described = {
        f"{method.upper()} {unnamed(path)}": {**call, "parameters": [*item.get("parameters", []), *call.get("parameters", [])]}
        for path, item in document["paths"].items()
        for method, call in item.items()
        if method != "parameters"
    }
    found = set()
    for name, call in calls.items():
        if name in OF_THE_AGENT:
            continue
        operation = described.get(unnamed(name))
        if operation is None:
            found.add(name)
            continue
        parameters = [variants(document, parameter)[0] for parameter in operation["parameters"]]
        known = {parameter["name"] for parameter in parameters if parameter["in"] == "query"}
        found |= {f"{name}: query {query}" for query in set(call["query"]) - known}
        body = variants(document, operation["requestBody"])[0] if "requestBody" in operation else {"content": {}}
        schema = body["content"].get("application/json", {}).get("schema")
        for path in call["body"]:
            names = re.findall(r"\[\]|[^.\[\]]+", path)[1:]
            if schema is None or not has_field(document, schema, names):
                found.add(f"{name}: {path}")
    return found


def check(document, calls, package):
    """Checks that exactly the unsupported requests of a package are not described."""
    unsupported = {name for name, (packages, _) in UNSUPPORTED.items() if package in packages}
    found = missing(document, calls)
    missing_now, described_now = sorted(found - unsupported), sorted(unsupported - found)
    assert found == unsupported, f"not described: {missing_now}, described by now: {described_now}"


def test_the_document_describes_all_requests_of_e2b_in_python(document):
    calls = client_calls.e2b_calls()
    # The recorder finds fields inside of objects, lists and maps.
    assert "body.network.egressProxy.address" in calls["POST /sandboxes"]["body"]
    assert "body.volumeMounts[].path" in calls["POST /sandboxes"]["body"]
    check(document, calls, PYTHON)


def test_the_document_describes_all_requests_of_e2b_in_javascript(document):
    command = ["node", HERE / "client_calls.mjs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)
    assert "body.network.egressProxy.address" in calls["POST /sandboxes"]["body"]
    check(document, calls, NPM)


def test_the_document_describes_all_requests_of_cubesandbox(document, monkeypatch):
    calls = client_calls.cubesandbox_calls(monkeypatch)
    assert "body.network.rules[].action.inject[].header" in calls["POST /sandboxes"]["body"]
    check(document, calls, CUBE)


def test_an_unknown_call_parameter_or_field_is_reported(document):
    calls = {
        "GET /unknown": {"query": [], "body": []},
        "GET /v2/sandboxes": {"query": ["limit", "unknown"], "body": []},
        "POST /sandboxes": {"query": [], "body": ["body.templateID", "body.network.unknown", "body.volumeMounts[].unknown"]},
    }
    assert missing(document, calls) == {
        "GET /unknown", "GET /v2/sandboxes: query unknown", "POST /sandboxes: body.network.unknown",
        "POST /sandboxes: body.volumeMounts[].unknown",
    }

"""Makes Schemathesis use ids of existing sandboxes, snapshots and templates in half of its requests."""

import os
import random

import requests
import schemathesis

URL, KEY = os.environ["E2B_API_URL"], {"X-API-KEY": os.environ["E2B_API_KEY"]}
# Maximum number of objects created by requests. Older ones are removed above it.
MOST = 8
STOCK = ("base", "code-interpreter-v1")


def call(method, path, **options):
    return requests.request(method, URL + path, headers=KEY, timeout=30, **options)


def some_sandbox():
    living = call("GET", "/v2/sandboxes", params={"limit": 100}).json()
    for surplus in living[MOST:]:
        call("DELETE", f"/sandboxes/{surplus['sandboxID']}")
    if not living:
        living = [call("POST", "/sandboxes", json={"templateID": "base", "timeout": 300}).json()]
    return random.choice(living[:MOST])["sandboxID"]


def some_snapshot():
    there = call("GET", "/snapshots", params={"limit": 100}).json()
    for surplus in there[MOST:]:
        call("DELETE", f"/templates/{surplus['snapshotID']}")
    if not there:
        there = [call("POST", f"/sandboxes/{some_sandbox()}/snapshots", json={}).json()]
    return random.choice(there[:MOST])["snapshotID"]


def some_key():
    return call("POST", "/keys", json={"name": f"contract-{random.getrandbits(64):x}"}).json()["key"]["keyID"]


# Keys that exist before the test: among them is the key of these requests.
OWN_KEYS = [key["keyID"] for key in call("GET", "/keys").json()]


@schemathesis.hook
def before_call(context, case, **kwargs):
    # Schemathesis learns names from responses. Stock templates are not removed, because building
    # them again takes minutes.
    name = (case.path_parameters or {}).get("templateID", "")
    if case.method.upper() == "DELETE" and str(name).partition(":")[0] in STOCK:
        case.path_parameters["templateID"] = some_snapshot()
    # The schema does not express that one of the timeouts is required.
    if case.path.endswith("/timeout") and isinstance(case.body, dict):
        if case.body.get("timeout") is None and case.body.get("idleTimeout") is None:
            case.body["timeout"] = 300
    # A rotated or revoked key of these requests would be rejected from then on.
    key = (case.path_parameters or {}).get("keyID")
    if key is not None and (random.random() < 0.5 or any(own.startswith(str(key)) for own in OWN_KEYS)):
        case.path_parameters["keyID"] = some_key()
    if random.random() < 0.5:
        return
    real = {"sandboxID": some_sandbox, "templateID": some_snapshot, "snapshotID": some_snapshot}
    for name in case.path_parameters or {}:
        if name in real:
            case.path_parameters[name] = real[name]()
    if isinstance(case.body, dict):
        if "templateID" in case.body:
            case.body["templateID"] = random.choice(["base", some_snapshot()])
        if "snapshotID" in case.body:
            case.body["snapshotID"] = some_snapshot()

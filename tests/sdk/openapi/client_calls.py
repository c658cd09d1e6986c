"""Requests that the packages `e2b` (Python) and `cubesandbox` can send, with all of their options.

A call is a dictionary with `query` (names of parameters) and `body` (paths of fields), by method and
path, for example {"POST /sandboxes": {"query": [], "body": ["body.network.allowOut"]}}. In a path of
a field, `*` is a key of a map and `[]` is an item of a list. In the path of a call, `{}` is a
parameter.
"""

import datetime
import enum
import importlib
import inspect
import json
import pkgutil
import types
import typing

import requests

# Number of alternatives of a union that are tried.
ALTERNATIVES = 4
# Stands for a parameter of a path, and for a key of a map.
PARAMETER, KEY = "PARAMETER", "KEY"


class Calls(dict):
    def add(self, method, path, query, body):
        call = self.setdefault(f"{method.upper()} {path}", {"query": set(), "body": set()})
        call["query"].update(query)
        call["body"].update(fields(body, "body"))


def fields(value, prefix):
    """Returns the paths of all fields of a JSON value."""
    if isinstance(value, list):
        return {path for item in value for path in fields(item, f"{prefix}[]")}
    if not isinstance(value, dict):
        return set()
    found = set()
    for key, inner in value.items():
        path = f"{prefix}.{'*' if key == KEY else key}"
        found |= ({path} if key != KEY else set()) | fields(inner, path)
    return found


# ---- The generated client of `e2b`
def sample(annotation, names, number):
    """Returns a value of a type. `number` selects the alternative of each union."""
    from e2b.api.client.types import Unset

    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        options = [one for one in arguments if one not in (Unset, type(None))]
        return sample(options[number % len(options)], names, number)
    if origin is list:
        return [sample(arguments[0], names, number)]
    if origin is dict:
        return {KEY: sample(arguments[1], names, number)}
    if origin is typing.Literal:
        return arguments[0]
    if annotation is typing.Any:
        return {KEY: "text"}
    if annotation is datetime.datetime:
        return datetime.datetime.now(datetime.timezone.utc)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return next(iter(annotation))
    if hasattr(annotation, "to_dict"):
        return model(annotation, names, number)
    return {str: "text", int: 1, float: 1.0, bool: True}[annotation]


def model(kind, names, number):
    """Returns an object of a generated class with all of its fields."""
    hints = typing.get_type_hints(kind, localns=names)
    extra = hints.pop("additional_properties", None)
    values = {name: sample(hint, names, number) for name, hint in hints.items()}
    made = kind(**values)
    # Classes without fields of their own are maps. The others accept any further field.
    if extra and not values:
        made.additional_properties = sample(extra, names, number)
    return made


def e2b_calls():
    import e2b.api.client.api as api
    from e2b.api.client import models

    calls = Calls()
    for found in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        build = getattr(importlib.import_module(found.name), "_get_kwargs", None)
        if build is None:
            continue
        signature = inspect.signature(build)
        hints = typing.get_type_hints(build, localns=vars(models))
        for number in range(ALTERNATIVES):
            values = {
                # Parameters of the path are positional.
                name: PARAMETER if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else sample(hints[name], vars(models), number)
                for name, parameter in signature.parameters.items()
            }
            request = build(**values)
            path = request["url"].replace(PARAMETER, "{}")
            calls.add(request["method"], path, request.get("params", {}), request.get("json"))
    return calls


# ---- `cubesandbox`, which is written by hand
# Parameters that do not become fields of a request.
WITHOUT_FIELD = {"self", "cls", "config", "kwargs", "extra", "wait", "interval", "concurrency"}


def cubesandbox_calls(monkeypatch):
    """Returns the requests of all methods, called with all options. A new option fails by its name."""
    from cubesandbox import Config, Sandbox, Template, Volume, VolumeMount
    from cubesandbox._policy import Action, Inject, Match, Rule

    calls, origin = Calls(), "http://127.0.0.1:1"
    config = Config(api_url=origin, api_key="key")
    answer = {"sandboxID": PARAMETER, "templateID": PARAMETER, "snapshotID": PARAMETER, "volumeID": PARAMETER,
              "name": "name", "state": "paused", "domain": "sandboxes.example"}

    def send(session, request, **options):
        path, _, query = request.url.removeprefix(origin).partition("?")
        names = [part.partition("=")[0] for part in query.split("&") if part]
        calls.add(request.method, path.replace(PARAMETER, "{}"), names, json.loads(request.body or "null"))
        response = requests.Response()
        is_list = request.method == "GET" and path.rsplit("/", 1)[-1] in ("sandboxes", "templates", "volumes", "snapshots")
        response.status_code, response._content = 200, json.dumps([answer] if is_list else answer).encode()
        return response

    monkeypatch.setattr(requests.Session, "send", send)

    def call(method, *unsent, **options):
        """Calls a method. `unsent` are options that the package does not send."""
        known = set(inspect.signature(method).parameters) - WITHOUT_FIELD
        changed = known ^ (set(options) | set(unsent))
        assert not changed, f"{method.__qualname__}: options of a new version: {changed}"
        if "config" in inspect.signature(method).parameters:
            options["config"] = config
        return method(**options)

    match = Match(sni="a.example", host="a.example", method=["GET"], path="/", scheme="https", port=443)
    inject = [Inject(header="x", secret="y", format="${SECRET}")]
    rules = [Rule(name="rule", match=match, action=Action(allow=True, inject=inject, audit="full"))]
    network = {"allow_out": ["10.0.0.0/8"], "deny_out": ["0.0.0.0/0"], "rules": rules,
               "allow_public_traffic": True, "mask_request_host": "a.example"}
    assert set(inspect.signature(Rule).parameters) == {"name", "match", "action"}
    sandbox = call(
        Sandbox.create, "mcp", "env_vars", template="base", timeout=60, envs={KEY: "value"}, metadata={KEY: "value"},
        distribution_scope=["node"], allow_internet_access=False, network=network,
        lifecycle={"on_timeout": "pause", "auto_resume": True},
        volume_mounts={"/data": VolumeMount("volume", read_only=True)},
    )
    call(Sandbox.connect, sandbox_id=PARAMETER, timeout=60)
    for method in (Sandbox.list, Sandbox.list_v2, Sandbox.health):
        call(method)
    call(sandbox.pause, "timeout")
    call(sandbox.resume, timeout=60)
    call(sandbox.set_timeout, timeout=60)
    call(sandbox.update_network, network={**network, "allow_internet_access": True})
    call(sandbox.get_info)
    call(sandbox.create_snapshot, name="name")
    call(Sandbox.list_snapshots, sandbox_id=PARAMETER, limit=1, next_token="token")
    call(Sandbox.delete_snapshot, snapshot_id=PARAMETER)
    call(sandbox.rollback, snapshot_id=PARAMETER)
    call(sandbox.kill)

    call(Template.list)
    call(Template.get, template_id=PARAMETER, limit=1, next_token="token")
    call(
        Template.build, "template_id", "dockerfile", "start_cmd", name="name", image="python:3.12",
        instance_type="small", writable_layer_size="1G", exposed_ports=[80], probe_port=80, probe_path="/",
        cpu_count=1, memory_mb=512, envs={"NAME": "value"}, allow_internet_access=True, network_type="tap",
        nodes=["node"], registry_username="user", registry_password="password", command=["sh"], args=["-c"],
        dns=["1.1.1.1"], allow_out=["10.0.0.0/8"], deny_out=["0.0.0.0/0"], enable_ivshmem=True,
    )
    call(Template.rebuild, template_id=PARAMETER)
    call(Template.get_build_status, template_id=PARAMETER, build_id=PARAMETER)
    call(Template.get_build_logs, template_id=PARAMETER, build_id=PARAMETER)
    call(Template.delete, template_id=PARAMETER)
    call(Template.set_alias, template_id=PARAMETER, alias="alias")

    volume = call(Volume.create, name="name", driver="driver")
    call(Volume.list)
    call(Volume.get_info, volume_id=PARAMETER)
    call(Volume.connect, volume_id=PARAMETER)
    call(Volume.destroy, volume_id=PARAMETER)
    assert volume.volume_id == PARAMETER
    return calls

"""Calls of the control plane: requests, and parsers of their results."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from e2b.api.client.models.sandbox_detail import SandboxDetail
from e2b.api.client.types import Unset
from e2b.exceptions import InvalidArgumentException, SandboxNotFoundException
from e2b.sandbox.sandbox_api import (
    SandboxInfo,
    SandboxMetrics,
    resolve_connect_memory,
    resolve_snapshot_memory,
)
from e2b.sandbox.sandbox_api import SnapshotInfo as E2bSnapshotInfo

from jiffy.errors import api_error
from jiffy.models import (
    Ack,
    AwaitedState,
    Connection,
    Connections,
    Created,
    Difference,
    Engine,
    Event,
    EventPage,
    FunctionInfo,
    FunctionLog,
    FunctionResponse,
    HostStatus,
    Limits,
    Lineage,
    LogEntry,
    Pool,
    Preview,
    SnapshotInfo,
    Stats,
    time_of,
)
from jiffy.transport import Call, Reply
from jiffy.volume_snapshots import VolumeSnapshot

# Maximum time in seconds of one call of `wait`.
WAIT_SECONDS = 10
# Maximum time in seconds for which a call waits for events.
EVENT_WAIT_SECONDS = 20
# Delay in seconds before an iterator of events resumes after a lost connection.
RESUME_SECONDS = 0.5
MAX_FORKS = 100
# Time in seconds for which the files of a volume are copied to or from the store.
VOLUME_SECONDS = 600
# Maximum number of differences on a page.
MAX_DIFFERENCES = 10_000
# Maximum duration of a comparison in seconds.
MAX_COMPARE_SECONDS = 60
# States from which a sandbox can still reach an awaited state.
CHANGING: Mapping[AwaitedState, tuple[str, ...]] = {
    "ended": ("creating", "running", "paused"),
    "running": ("creating", "paused"),
    "paused": ("creating", "running"),
}


def _path(*parts: str) -> str:
    return "".join("/" + quote(part, safe="") for part in parts)


def _sandbox(sandbox_id: str, *parts: str) -> str:
    return _path("sandboxes", sandbox_id, *parts)


def _set(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _given(value: bool | Unset) -> bool | None:
    return value if isinstance(value, bool) else None


def _nothing(reply: Reply) -> None:
    del reply


def _created(reply: Reply) -> Created:
    return Created.of(reply.json())


def create(body: Mapping[str, Any], idempotency_key: str | None) -> Call[Created]:
    """A repeated request has the same key, and creates nothing again."""
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    return Call("POST", "/v2/sandboxes", _created, body=body, headers=headers)


def connect(sandbox_id: str, timeout: int | None, on_resume: Any) -> Call[Created]:
    body = _set(timeout=timeout, memory=_given(resolve_connect_memory(on_resume)))
    return Call("POST", "/v2" + _sandbox(sandbox_id, "connect"), _created, body=body)


def _forked(reply: Reply) -> list[Created | Exception]:
    def one(entry: Mapping[str, Any]) -> Created | Exception:
        if entry.get("sandbox"):
            return Created.of(entry["sandbox"])
        error = entry.get("error") or {"code": 500, "message": "the child was not created"}
        return api_error(int(error["code"]), json.dumps(error).encode(), reply.headers)

    return [one(entry) for entry in reply.json()]


def fork(sandbox_id: str, timeout: int | None, count: int | None) -> Call[list[Created | Exception]]:
    is_integer = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (is_integer and 1 <= count <= MAX_FORKS):
        raise InvalidArgumentException(f"count must be an integer from 1 to {MAX_FORKS}, got {count!r}")
    body = _set(timeout=timeout, count=count)
    return Call("POST", _sandbox(sandbox_id, "fork"), _forked, body=body, repeatable=False)


def kill(sandbox_id: str) -> Call[bool]:
    return Call("DELETE", _sandbox(sandbox_id), lambda reply: reply.status != 404, accepts=(404,))


def info(sandbox_id: str) -> Call[SandboxInfo]:
    def parse(reply: Reply) -> SandboxInfo:
        info: SandboxInfo = SandboxInfo._from_sandbox_detail(SandboxDetail.from_dict(reply.json()))
        return info

    return Call("GET", _sandbox(sandbox_id), parse)


def set_timeout(sandbox_id: str, timeout: int) -> Call[None]:
    return Call("POST", _sandbox(sandbox_id, "timeout"), _nothing, body={"timeout": timeout})


def set_idle_timeout(sandbox_id: str, seconds: int) -> Call[None]:
    return Call("POST", _sandbox(sandbox_id, "timeout"), _nothing, body={"idleTimeout": seconds})


def set_network(sandbox_id: str, body: Mapping[str, Any]) -> Call[None]:
    return Call("PUT", _sandbox(sandbox_id, "network"), _nothing, body=body)


def metrics(sandbox_id: str, start: datetime | None, end: datetime | None) -> Call[list[SandboxMetrics]]:
    def seconds(time: datetime | None) -> int | None:
        return int(time.timestamp()) if time else None

    def parse(reply: Reply) -> list[SandboxMetrics]:
        return [Stats.of(item) for item in reply.json()]

    return Call("GET", _sandbox(sandbox_id, "metrics"), parse, query=_set(start=seconds(start), end=seconds(end)))


def stats(sandbox_id: str) -> Call[Stats]:
    def parse(reply: Reply) -> Stats:
        usage = reply.json()["sandboxes"].get(sandbox_id)
        if not usage:
            raise SandboxNotFoundException(f"sandbox {sandbox_id} is not running")
        return Stats.of(usage)

    return Call("GET", "/sandboxes/metrics", parse, query={"sandbox_ids": sandbox_id, "now": "true"})


def pause(sandbox_id: str, keep_memory: bool | None, mode: Any, strict: bool) -> Call[bool]:
    memory = resolve_snapshot_memory("mode", mode, keep_memory)
    body = _set(memory=_given(memory), requireHealthyGuest=strict or None)

    def parse(reply: Reply) -> bool:
        if reply.status == 409:
            error = api_error(reply.status, reply.content, reply.headers)
            if error.error_code != "already_paused":
                raise error
        return reply.status != 409

    return Call("POST", _sandbox(sandbox_id, "pause"), parse, body=body, repeatable=False, accepts=(409,))


def _snapshot(reply: Reply) -> dict[str, Any]:
    return SnapshotInfo.fields_of(reply.json())


def snapshot(
    sandbox_id: str, name: str | None, ack: Ack | None = None, durable: bool | None = None, mode: Any = None
) -> Call[dict[str, Any]]:
    body = _set(name=name, ack=ack, durable=durable, memory=_given(resolve_snapshot_memory("mode", mode)))
    return Call("POST", _sandbox(sandbox_id, "snapshots"), _snapshot, body=body, repeatable=False)


def get_snapshot(snapshot_id: str) -> Call[dict[str, Any]]:
    return Call("GET", _path("snapshots", snapshot_id), _snapshot)


def list_snapshots(
    sandbox_id: str | None, name: str | None, token: str | None
) -> Call[tuple[list[dict[str, Any]], str | None]]:
    def parse(reply: Reply) -> tuple[list[dict[str, Any]], str | None]:
        return [SnapshotInfo.fields_of(item) for item in reply.json()], reply.headers.get("x-next-token") or None

    return Call("GET", "/snapshots", parse, query=_set(sandboxID=sandbox_id, name=name, nextToken=token))


def delete_snapshot(snapshot_id: str) -> Call[bool]:
    return Call("DELETE", _path("templates", snapshot_id), lambda reply: reply.status != 404, accepts=(404,))


def verify_snapshot(snapshot_id: str) -> Call[list[dict[str, Any]]]:
    return Call("POST", _path("snapshots", snapshot_id, "verify"), lambda reply: list(reply.json()))


def snapshot_volume(volume_id: str) -> Call[VolumeSnapshot]:
    path = _path("volumes", volume_id, "snapshots")
    return Call("POST", path, lambda reply: VolumeSnapshot.of(reply.json()), repeatable=False, waits=VOLUME_SECONDS)


def list_volume_snapshots(token: str | None) -> Call[tuple[list[VolumeSnapshot], str | None]]:
    def parse(reply: Reply) -> tuple[list[VolumeSnapshot], str | None]:
        return [VolumeSnapshot.of(item) for item in reply.json()], reply.headers.get("x-next-token") or None

    return Call("GET", "/volumesnapshots", parse, query=_set(nextToken=token))


def restore_volume(snapshot: str | VolumeSnapshot, name: str) -> Call[str]:
    body = {"name": name, "volumeSnapshotID": _volume_snapshot_id(snapshot)}

    def parse(reply: Reply) -> str:
        return str(reply.json()["volumeID"])

    return Call("POST", "/volumes", parse, body=body, repeatable=False, waits=VOLUME_SECONDS)


def delete_volume_snapshot(snapshot: str | VolumeSnapshot) -> Call[bool]:
    path = _path("volumesnapshots", _volume_snapshot_id(snapshot))
    return Call("DELETE", path, lambda reply: reply.status != 404, accepts=(404,))


def _volume_snapshot_id(snapshot: str | VolumeSnapshot) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.snapshot_id


def rollback(sandbox_id: str, snapshot: str | E2bSnapshotInfo) -> Call[None]:
    body = {"snapshotID": snapshot if isinstance(snapshot, str) else snapshot.snapshot_id}
    return Call("POST", _sandbox(sandbox_id, "rollback"), _nothing, body=body, repeatable=False)


def lineage(sandbox_id: str) -> Call[Lineage]:
    return Call("GET", "/lineage", lambda reply: Lineage.of(reply.json()), query={"sandboxID": sandbox_id})


def compare(
    a: str | E2bSnapshotInfo, b: str | E2bSnapshotInfo, limit: int, token: str | None
) -> Call[tuple[list[Difference], str | None]]:
    def parse(reply: Reply) -> tuple[list[Difference], str | None]:
        found = [Difference.of(item) for item in reply.json()["changes"]]
        return found, reply.headers.get("x-next-token") or None

    ids = [item if isinstance(item, str) else item.snapshot_id for item in (a, b)]
    query = _set(a=ids[0], b=ids[1], limit=max(1, min(limit, MAX_DIFFERENCES)), nextToken=token)
    return Call("GET", "/compare", parse, query=query, waits=MAX_COMPARE_SECONDS)


def promote(sandbox_id: str) -> Call[list[str]]:
    return Call("POST", _sandbox(sandbox_id, "promote"), lambda reply: list(reply.json()["removed"]))


def restart(sandbox_id: str, grace: float | None) -> Call[None]:
    body = _set(graceMs=None if grace is None else round(grace * 1000))
    return Call("POST", _sandbox(sandbox_id, "restart"), _nothing, body=body, repeatable=False, waits=grace or 10)


def rename(sandbox_id: str, name: str | None) -> Call[None]:
    return Call("PATCH", _sandbox(sandbox_id), _nothing, body={"name": name})


def wait(sandbox_id: str, state: AwaitedState, seconds: int) -> Call[str]:
    query = {"for": state, "seconds": seconds}
    return Call(
        "GET", _sandbox(sandbox_id, "wait"), lambda reply: str(reply.json()["state"]), query=query, waits=seconds
    )


def preview(sandbox_id: str, port: int, ttl: int | None) -> Call[Preview]:
    def parse(reply: Reply) -> Preview:
        data = reply.json()
        return Preview(data["url"], time_of(data["expiresAt"]))

    return Call("GET", _sandbox(sandbox_id, "preview"), parse, query=_set(port=port, ttl=ttl))


def connections(sandbox_id: str, limit: int | None) -> Call[Connections]:
    def parse(reply: Reply) -> Connections:
        data = reply.json()
        items = [Connection.of(item) for item in data["connections"]]
        since = time_of(data["since"]) if data["since"] else None
        return Connections(items, since, data["missing"], list(data["untold"]))

    return Call("GET", _sandbox(sandbox_id, "connections"), parse, query=_set(limit=limit))


def host() -> Call[HostStatus]:
    return Call("GET", "/host", lambda reply: HostStatus.of(reply.json()))


def engines() -> Call[list[Engine]]:
    return Call("GET", "/engines", lambda reply: [Engine.of(item) for item in reply.json()])


def pools() -> Call[list[Pool]]:
    return Call("GET", "/pools", lambda reply: [Pool.of(item) for item in reply.json()])


def set_pool(template: str, size: int) -> Call[Pool]:
    return Call("PUT", _path("pools", template), lambda reply: Pool.of(reply.json()), body={"size": size})


def limits(key: str | None) -> Call[Limits]:
    return Call("GET", "/limits", lambda reply: Limits.of(reply.json()), query=_set(key=key))


@dataclass(frozen=True)
class EventSelection:
    """Events that an iterator returns."""

    sandbox_id: str | None
    types: Iterable[str] | None
    since: datetime | None
    after: str | None
    follow: bool


def events(selection: EventSelection, after: str | None) -> Call[EventPage]:
    """A page of events after the position `after`. Waits for the first event if the iterator follows."""

    def parse(reply: Reply) -> EventPage:
        data = reply.json()
        # Later pages report the same gap again only if events were removed meanwhile.
        gap = [Event.gap(data["dropped"])] if after is not None and data.get("dropped") else []
        return EventPage(gap + [Event.of(item) for item in data["events"]], data.get("next"), data["more"])

    wait = EVENT_WAIT_SECONDS if selection.follow else 0
    types = ",".join(selection.types) if selection.types is not None else None
    since = selection.since.astimezone(UTC).isoformat() if selection.since else None
    query = _set(sandboxID=selection.sandbox_id, types=types, since=since, after=after, wait=wait, limit=1000)
    return Call("GET", "/events", parse, query=query, waits=wait)


def _function(reply: Reply) -> dict[str, Any]:
    return FunctionInfo.fields_of(reply.json())


def deploy(module: str | Path | bytes, name: str | None, settings: Mapping[str, Any] | None) -> Call[dict[str, Any]]:
    """A repeated deployment of the same module could create a second version."""
    if name is None:
        if isinstance(module, bytes):
            raise InvalidArgumentException("a module without a path requires name=")
        name = Path(module).stem
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="settings"\r\n'.encode(),
        b"Content-Type: application/json\r\n\r\n",
        json.dumps(dict(settings or {})).encode(),
        f'\r\n--{boundary}\r\nContent-Disposition: form-data; name="module"; filename="module.wasm"\r\n'.encode(),
        b"Content-Type: application/wasm\r\n\r\n",
        module if isinstance(module, bytes) else Path(module).read_bytes(),
        f"\r\n--{boundary}--\r\n".encode(),
    ]
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    return Call("POST", _path("functions", name), _function, content=b"".join(parts), headers=headers, repeatable=False)


def get_function(name: str) -> Call[dict[str, Any]]:
    return Call("GET", _path("functions", name), _function)


def list_functions() -> Call[list[dict[str, Any]]]:
    return Call("GET", "/functions", lambda reply: [FunctionInfo.fields_of(item) for item in reply.json()])


def remove_function(name: str) -> Call[bool]:
    return Call("DELETE", _path("functions", name), lambda reply: reply.status != 404, accepts=(404,))


def switch_function(name: str, action: str, version: int | None = None) -> Call[dict[str, Any]]:
    body = {"version": version} if version is not None else None
    repeatable = action != "rollback" or version is not None
    return Call("POST", _path("functions", name, action), _function, body=body, repeatable=repeatable)


def function_log(name: str, after: str | None, wait: int | None) -> Call[FunctionLog]:
    def parse(reply: Reply) -> FunctionLog:
        data = reply.json()
        return FunctionLog([LogEntry.of(item) for item in data["entries"]], data["next"])

    query = _set(after=after, wait=wait)
    return Call("GET", _path("functions", name, "logs"), parse, query=query, waits=wait or 0)


def invoke(
    name: str, path: str, method: str | None, body: bytes | str | None, headers: Mapping[str, str] | None
) -> Call[FunctionResponse]:
    """The response of the function is the result, also if its status is an error."""

    def parse(reply: Reply) -> FunctionResponse:
        if reply.status >= 400:
            error = api_error(reply.status, reply.content, reply.headers)
            if error.code:
                raise error
        return FunctionResponse(reply.status, reply.headers, reply.content)

    content = body.encode() if isinstance(body, str) else body
    verb = (method or ("GET" if content is None else "POST")).upper()
    return Call(
        verb,
        _path("functions", name, "invoke") + "/" + path.lstrip("/"),
        parse,
        content=content,
        headers=headers or {},
        repeatable=verb in ("GET", "HEAD", "OPTIONS"),
        accepts=range(400, 600),
    )


def request_build(name: str) -> Call[tuple[str, str]]:
    """The result has the ids of template and build."""

    def parse(reply: Reply) -> tuple[str, str]:
        requested = reply.json()
        return requested["templateID"], requested["buildID"]

    return Call("POST", "/v3/templates", parse, body={"name": name})


def _build(template: str, build: str, *parts: str) -> str:
    return _path("templates", template, "builds", build, *parts)


def start_import(template: str, build: str, image: str) -> Call[None]:
    body = {"fromImage": image, "steps": []}
    return Call("POST", "/v2" + _build(template, build), _nothing, body=body, repeatable=False)


def build_status(template: str, build: str, lines: int) -> Call[Any]:
    """The result has the log after `lines` lines."""
    return Call("GET", _build(template, build, "status"), lambda reply: reply.json(), query={"logsOffset": lines})


def has_template(name: str) -> Call[bool]:
    path = _path("templates", "aliases", name)
    return Call("GET", path, lambda reply: reply.status != 404, accepts=(404,))

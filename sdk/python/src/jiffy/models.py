"""Results of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from e2b.sandbox.sandbox_api import SandboxMetrics
from e2b.sandbox.sandbox_api import SnapshotInfo as E2bSnapshotInfo

SandboxT = TypeVar("SandboxT")

BootMode = Literal["cold", "snapshot", "warm-pool", "fork"]
State = Literal["creating", "running", "paused", "broken", "killed"]
AwaitedState = Literal["ended", "running", "paused"]
EngineName = Literal["microvm", "gvisor"]
Ack = Literal["captured", "stored"]


def time_of(text: Any) -> datetime:
    """Parses a time of the API."""
    return datetime.fromisoformat(str(text).replace("Z", "+00:00"))


@dataclass(frozen=True)
class Origin:
    """Origin of a sandbox's guest."""

    template_id: str
    boot_mode: BootMode | None = None
    boot_ms: float | None = None
    """Time from the request to the response of the agent, in milliseconds."""
    engine: str | None = None
    name: str | None = None
    forked_from: str | None = None
    snapshot_id: str | None = None
    """Latest snapshot that the sandbox descends from."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Origin:
        """Parses a response of the API."""
        return cls(
            template_id=data["templateID"],
            boot_mode=data.get("bootMode"),
            boot_ms=data.get("bootMs"),
            engine=data.get("engine"),
            name=data.get("name"),
            forked_from=data.get("forkedFrom"),
            snapshot_id=data.get("snapshotID"),
        )


@dataclass(frozen=True)
class Created:
    """Response to a request that creates a sandbox or connects to it."""

    sandbox_id: str
    domain: str | None
    envd_version: str
    envd_access_token: str | None
    traffic_access_token: str | None
    origin: Origin

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Created:
        """Parses a response of the API."""
        return cls(
            sandbox_id=data["sandboxID"],
            domain=data.get("domain"),
            envd_version=data["envdVersion"],
            envd_access_token=data.get("envdAccessToken"),
            traffic_access_token=data.get("trafficAccessToken"),
            origin=Origin.of(data),
        )


@dataclass
class SnapshotInfo(E2bSnapshotInfo):
    """A snapshot."""

    status: Literal["storing", "ready"] = "ready"
    """`storing`: captured in memory and not yet complete on disk."""
    sandbox_id: str | None = None
    """Sandbox from which the snapshot was taken."""
    parent_id: str | None = None
    template_id: str = ""
    created_at: datetime | None = None
    stopped_ms: float = 0
    """Time for which the guest was stopped, in milliseconds."""
    total_ms: float = 0
    """Time from the request to completion in milliseconds. 0 until the snapshot is complete."""
    bytes: int = 0
    """Disk space of the snapshot without its ancestors."""
    store_state: Literal["local", "uploading", "stored"] | None = None
    """State in the store. `None` without a store."""

    @classmethod
    def fields_of(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Parses a response of the API."""
        return {
            "snapshot_id": data["snapshotID"],
            "names": list(data["names"]),
            "status": data["status"],
            "sandbox_id": data.get("originSandboxID"),
            "parent_id": data.get("parentSnapshotID"),
            "template_id": data["templateID"],
            "created_at": time_of(data["createdAt"]),
            "stopped_ms": data["stoppedMs"],
            "total_ms": data["totalMs"],
            "bytes": data["jiffy"]["bytes"],
            "store_state": data.get("storeState"),
        }


@dataclass(frozen=True)
class Change:
    """File that differs from the template."""

    kind: Literal["A", "C", "D"]
    """`A`: added, `C`: changed, `D`: deleted."""
    path: str


@dataclass(frozen=True)
class Difference:
    """File that differs between two sandboxes or snapshots."""

    kind: Literal["added", "changed", "removed"]
    path: str
    size_before: int | None = None
    """Size in the first object in bytes. `None` for an added file."""
    size: int | None = None
    """Size in the second object in bytes. `None` for a removed file."""
    verified: bool = True
    """False if the contents have the same size and could not be compared."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Difference:
        """Parses a response of the API."""
        return cls(
            kind=data["kind"],
            path=data["path"],
            size_before=data["a"]["size"] if "a" in data else None,
            size=data["b"]["size"] if "b" in data else None,
            verified=data["verified"],
        )


@dataclass(frozen=True)
class LineageNode:
    """Sandbox or snapshot of a lineage."""

    id: str
    """Id. For several consecutive snapshots: id of the newest one."""
    kind: Literal["sandbox", "snapshot"]
    state: Literal["creating", "running", "paused", "broken", "storing", "ready", "removed"]
    name: str | None = None
    created_at: datetime | None = None
    purpose: str | None = None
    """Purpose of a snapshot: `asked`, `fork` or `pause`."""
    sandbox_id: str | None = None
    """Sandbox of which the snapshot was taken."""
    parent_id: str | None = None
    """Nearest ancestor of the snapshot."""
    bytes: int | None = None
    """Disk space of a snapshot without its ancestors."""
    count: int = 1
    """Number of snapshots that the node represents."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LineageNode:
        """Parses a response of the API."""
        return cls(
            id=data["id"],
            kind=data["kind"],
            state=data["state"],
            name=data.get("name"),
            created_at=time_of(data["createdAt"]) if "createdAt" in data else None,
            purpose=data.get("purpose"),
            sandbox_id=data.get("sandboxID"),
            parent_id=data.get("parentSnapshotID"),
            bytes=data.get("bytes"),
            count=data["count"],
        )


@dataclass(frozen=True)
class LineageEdge:
    """Relation between a sandbox and a snapshot."""

    source: str
    """Id of the node that has the relation."""
    target: str
    """Id of the related node."""
    relation: Literal["snapshot_of", "started_from", "rolled_back_to"]
    at: datetime | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LineageEdge:
        """Parses a response of the API."""
        at = time_of(data["at"]) if "at" in data else None
        return cls(source=data["from"], target=data["to"], relation=data["relation"], at=at)


@dataclass(frozen=True)
class Lineage:
    """Sandboxes and snapshots that are connected with a sandbox."""

    nodes: list[LineageNode]
    edges: list[LineageEdge]
    truncated: bool
    """True if the lineage has more than 5,000 nodes, of which the nearest ones are listed."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Lineage:
        """Parses a response of the API."""
        nodes = [LineageNode.of(item) for item in data["nodes"]]
        edges = [LineageEdge.of(item) for item in data["edges"]]
        return cls(nodes, edges, data["truncated"])


@dataclass(frozen=True)
class Connection:
    """Connection of a sandbox, or a DNS query."""

    timestamp: datetime
    protocol: str
    address: str | None
    port: int | None
    host: str | None
    """Queried name, or the name that the connection sent."""
    question: str | None
    bytes_out: int | None
    bytes_in: int | None
    verdict: Literal["allowed", "refused"]
    reason: str | None
    times: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Connection:
        """Parses a response of the API."""
        same = {name: data[name] for name in ("protocol", "address", "port", "host", "question")}
        return cls(
            timestamp=time_of(data["timestamp"]),
            bytes_out=data["bytesOut"],
            bytes_in=data["bytesIn"],
            verdict=data["verdict"],
            reason=data["reason"],
            times=data["times"],
            **same,
        )


@dataclass(frozen=True)
class Connections:
    """Newest connections of a sandbox, oldest first."""

    items: list[Connection]
    since: datetime | None
    """Time at which recording started. `None` if the sandbox has no network."""
    missing: int
    """Number of further connections, as far as known."""
    untold: list[str]
    """Information that the host's kernel does not provide."""


@dataclass(frozen=True)
class Preview:
    """Link to a port of a sandbox. Requests need no key."""

    url: str
    expires_at: datetime


@dataclass
class Stats(SandboxMetrics):
    """Present usage of a sandbox."""

    net_bytes_in: int | None = None
    """Bytes received since the guest started. `None` without a network."""
    net_bytes_out: int | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Stats:
        """Parses a response of the API."""
        return cls(
            cpu_count=data["cpuCount"],
            cpu_used_pct=data["cpuUsedPct"],
            disk_total=data["diskTotal"],
            disk_used=data["diskUsed"],
            mem_total=data["memTotal"],
            mem_used=data["memUsed"],
            mem_cache=data["memCache"],
            timestamp=time_of(data["timestamp"]),
            net_bytes_in=data.get("netBytesIn"),
            net_bytes_out=data.get("netBytesOut"),
        )


@dataclass(frozen=True)
class Outcome(Generic[SandboxT]):
    """Result of one function of `try_each`."""

    index: int
    """Position of the function."""
    sandbox: SandboxT
    """Fork in which the function ran."""
    result: Any = None
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """True if the function returned."""
        return self.error is None


@dataclass(frozen=True)
class Engine:
    """An engine that isolates sandboxes."""

    name: str
    usable: bool
    is_default: bool
    version: str | None
    why: str | None
    """Reason why the engine does not work. Only the host's owner receives it."""
    capabilities: dict[str, bool]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Engine:
        """Parses a response of the API."""
        return cls(
            data["name"], data["usable"], data["default"], data["version"], data["why"], dict(data["capabilities"])
        )


@dataclass(frozen=True)
class Pool:
    """A warm pool: guests of a template that are ready to become sandboxes."""

    template_id: str
    size: int
    ready: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Pool:
        """Parses a response of the API."""
        return cls(data["templateID"], data["size"], data["ready"])


@dataclass(frozen=True)
class Limits:
    """Limits and usage of an API key, with the names of the API, for example `memoryMB`."""

    key_id: str
    name: str
    limits: dict[str, int | None]
    used: dict[str, Any]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Limits:
        """Parses a response of the API."""
        return cls(data["keyID"], data["name"], dict(data["limits"]), dict(data["used"]))


@dataclass(frozen=True)
class HostStatus:
    """Status and free resources of a daemon."""

    version: str
    running: int
    """Number of running sandboxes."""
    warm: int
    """Number of guests in warm pools."""
    network: str
    memory_total_mb: int | None
    memory_available_mb: int | None
    disk_total_mb: int | None
    disk_free_mb: int | None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> HostStatus:
        """Parses a response of the API."""
        return cls(
            version=data["version"],
            running=data["running"],
            warm=data["warm"],
            network=data["network"],
            memory_total_mb=data["memoryTotalMB"],
            memory_available_mb=data["memoryAvailableMB"],
            disk_total_mb=data["diskTotalMB"],
            disk_free_mb=data["diskFreeMB"],
        )


@dataclass(frozen=True)
class Event:
    """Event of a sandbox, a build or a key."""

    id: str | None
    """Position for `after`. None for `gap`."""
    type: str
    """Type, for example `sandbox.killed`. `gap`: earlier events are no longer retained."""
    time: datetime
    """Time of the event, or of the newest missing event."""
    sandbox_id: str | None
    cause: str | None
    data: dict[str, Any] = field(repr=False)
    """Complete event of the API."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Event:
        """Parses an event of the API."""
        time = time_of(data["time"])
        return cls(data["id"], data["type"], time, data.get("sandboxID"), data.get("cause"), dict(data))

    @classmethod
    def gap(cls, data: Mapping[str, Any]) -> Event:
        """Parses the description of missing events."""
        return cls(None, "gap", time_of(data["until"]), None, None, dict(data))


@dataclass(frozen=True)
class EventPage:
    """Page of events."""

    events: list[Event]
    next: str | None
    """Position after the page."""
    more: bool
    """True if the log continues."""


@dataclass(frozen=True)
class FunctionInfo:
    """A deployed function."""

    name: str
    version: int
    state: Literal["enabled", "disabled"]
    public: bool
    path: str
    """Path for requests at the address of the daemon."""
    url: str | None
    digest: str | None
    data: dict[str, Any] = field(repr=False)
    """Complete response of the API."""

    @classmethod
    def fields_of(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Parses a response of the API."""
        same = {name: data[name] for name in ("name", "version", "state", "public", "path", "digest")}
        return {**same, "url": data.get("url"), "data": dict(data)}


@dataclass(frozen=True)
class LogEntry:
    """Entry of a function's log."""

    timestamp: datetime
    request_id: str
    sequence: int
    stream: str
    text: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LogEntry:
        """Parses a response of the API."""
        return cls(time_of(data["timestamp"]), data["requestID"], data["sequence"], data["stream"], data["text"])


@dataclass(frozen=True)
class FunctionLog:
    """Page of a function's log."""

    entries: list[LogEntry]
    next: str
    """Position after the last entry: the next value of `after`."""


@dataclass(frozen=True)
class FunctionResponse:
    """Response of a function."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Body as text."""
        return self.body.decode(errors="replace")

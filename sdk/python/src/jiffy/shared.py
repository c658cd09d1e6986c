"""Functions of arguments and results that the blocking and the asynchronous classes share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from e2b.api.client.models.sandbox_network_config import SandboxNetworkConfig
from e2b.api.client.types import Unset
from e2b.connection_config import ApiParams, ConnectionConfig
from e2b.exceptions import TimeoutException
from e2b.sandbox.sandbox_api import build_iam_config, build_lifecycle_config, build_network_config
from e2b.sandbox.utils import class_method_variant
from packaging.version import Version

from jiffy import calls
from jiffy.error_codes import PortClosedError, UnavailableError
from jiffy.errors import AllFailedError, UnreachableError, api_error
from jiffy.models import AwaitedState, Change, Created, EngineName, Origin, Outcome
from jiffy.transport import Call

S = TypeVar("S")
Keep = Callable[[list[Outcome[S]]], "Outcome[S] | int | None"]

# Errors of a connection to a port on which a program may listen later.
NOT_LISTENING = (PortClosedError, UnavailableError, UnreachableError)
# Interval between attempts to connect to a port, in seconds.
PORT_POLL_SECONDS = 0.05


def own(name: str) -> Any:
    """Returns a method that calls the class method `name` with the id of the sandbox.

    The methods of `e2b` call the class methods of its own classes.
    """

    def method(self: Any, *args: Any, **options: Any) -> Any:
        api = {key: options.pop(key) for key in list(options) if key in ApiParams.__annotations__}
        params = self.connection_config.get_api_params(**api)
        return getattr(type(self), name)(self.sandbox_id, *args, **options, **params)

    variant: Any = class_method_variant
    return variant(name)(method)


def new_sandbox(cls: type[S], created: Created, params: Mapping[str, Any], logger: Any = None) -> S:
    """Returns the object of a sandbox."""
    headers = {"E2b-Sandbox-Id": created.sandbox_id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
    if created.envd_access_token:
        headers["X-Access-Token"] = created.envd_access_token
    if logger is not None:
        params = {**params, "logger": logger}
    sandbox = cast(Any, cls)(
        sandbox_id=created.sandbox_id,
        sandbox_domain=created.domain,
        envd_version=Version(created.envd_version),
        envd_access_token=created.envd_access_token,
        traffic_access_token=created.traffic_access_token,
        connection_config=ConnectionConfig(extra_sandbox_headers=headers, **params),
    )
    sandbox._origin = created.origin
    return cast(S, sandbox)


def new_sandboxes(
    cls: type[S], entries: Iterable[Created | Exception], params: Mapping[str, Any], logger: Any = None
) -> list[S | Exception]:
    """Returns the objects of the children of a fork, and the errors of children that were not created."""
    return [entry if isinstance(entry, Exception) else new_sandbox(cls, entry, params, logger) for entry in entries]


def _network_body(network: Any, iam: Any, join: str | None) -> dict[str, Any] | None:
    fields = build_network_config(network, iam)
    body: dict[str, Any] = SandboxNetworkConfig(**fields).to_dict() if fields else {}
    if join is not None:
        body["join"] = join
    return body or None


def create_body(
    template: str,
    *,
    timeout: int | None,
    metadata: Mapping[str, str] | None,
    envs: Mapping[str, str] | None,
    allow_internet_access: bool | None,
    network: Any,
    lifecycle: Any,
    mcp: Any,
    iam: Any,
    volume_mounts: Any,
    name: str | None,
    engine: EngineName | None,
    cpu_count: int | None,
    memory_mb: int | None,
    disk_mb: int | None,
    ca_certificates: str | None,
    egress_proxy: Mapping[str, Any] | None,
    join: str | None,
    idle_timeout: int | None,
) -> dict[str, Any]:
    """Returns the body of a create."""
    behaviour = build_lifecycle_config(lifecycle)
    identity = build_iam_config(iam)
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "metadata": dict(metadata or {}),
        "envVars": dict(envs or {}),
        "allow_internet_access": allow_internet_access,
        "network": _network_body(network, identity, join),
        "iam": identity.to_dict() if identity else None,
        # The daemon rejects this option of `e2b`.
        "mcp": mcp,
        "volumeMounts": volume_mounts,
        # Options of Jiffy.
        "name": name,
        "engine": engine,
        "cpuCount": cpu_count,
        "memoryMB": memory_mb,
        "diskSizeMB": disk_mb,
        "caCertificates": ca_certificates,
        "proxy": egress_proxy,
        "idleTimeout": idle_timeout,
    }
    for field, value in (
        ("autoPause", behaviour.auto_pause),
        ("autoPauseMemory", behaviour.auto_pause_memory),
    ):
        if isinstance(value, bool):
            body[field] = value
    if not isinstance(behaviour.auto_resume, Unset):
        body["autoResume"] = behaviour.auto_resume.to_dict()
    return {field: value for field, value in body.items() if value is not None}


class StateWait:
    """A wait for a state of a sandbox, as a sequence of calls of limited duration."""

    def __init__(self, sandbox_id: str, state: AwaitedState, timeout: float | None) -> None:
        self._sandbox_id, self._timeout = sandbox_id, timeout
        self._state: AwaitedState = state
        self._end = None if timeout is None else time.monotonic() + timeout

    def next_call(self) -> Call[str]:
        """Returns a call that waits for the remaining time, and at most for `calls.WAIT_SECONDS`."""
        left = calls.WAIT_SECONDS if self._end is None else max(0.0, self._end - time.monotonic())
        seconds = min(calls.WAIT_SECONDS, int(left) + 1 if left else 0)
        return calls.wait(self._sandbox_id, self._state, seconds)

    def is_over(self, now: str) -> bool:
        """Returns whether the present state `now` is the awaited state or prevents it.

        :raises TimeoutException: If the state may still be reached and the timeout has expired.
        """
        if now == self._state or now not in calls.CHANGING[self._state]:
            return True
        if self._end is not None and time.monotonic() >= self._end:
            raise TimeoutException(f"sandbox {self._sandbox_id} is {now} after {self._timeout} s")
        return False


def changes_query(limit: int) -> dict[str, str | int]:
    """Returns the query of a request for the changes of a sandbox."""
    return {"username": "root", "limit": limit}


def changes_of(status: int, content: bytes, headers: Mapping[str, str]) -> list[Change]:
    """Parses the changes of a sandbox."""
    if status >= 400:
        raise api_error(status, content, headers)
    return [Change(item["kind"], item["path"]) for item in json.loads(content)["changes"]]


def first_success(outcomes: list[Outcome[S]]) -> Outcome[S] | None:
    """Selects the first function that returned. The default of `try_each`."""
    return next((outcome for outcome in outcomes if outcome.ok), None)


def select(outcomes: list[Outcome[S]], keep: Keep[S]) -> Outcome[S]:
    """Returns the outcome that `keep` selects.

    :raises AllFailedError: If `keep` selects none. Its cause is the first error.
    """
    chosen = keep(outcomes)
    if isinstance(chosen, int):
        chosen = outcomes[chosen]
    if chosen is None:
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        text = f"{len(errors)} of {len(outcomes)} functions failed, and no fork was selected"
        raise AllFailedError(text, list(outcomes)) from (errors[0] if errors else None)
    return chosen


def only_sandboxes(entries: Sequence[S | Exception]) -> tuple[list[S], Exception | None]:
    """Returns the created children of a fork, and the first error."""
    sandboxes = [entry for entry in entries if not isinstance(entry, Exception)]
    return sandboxes, next((entry for entry in entries if isinstance(entry, Exception)), None)


class OriginProperties:
    """Properties of the guest's origin, as they were when the object was created."""

    _origin: Origin | None = None

    @property
    def boot_mode(self) -> str | None:
        """Origin of the guest: `cold`, `snapshot`, `warm-pool` or `fork`."""
        return self._origin.boot_mode if self._origin else None

    @property
    def boot_ms(self) -> float | None:
        """Time from the request to the response of the agent, in milliseconds."""
        return self._origin.boot_ms if self._origin else None

    @property
    def engine(self) -> str | None:
        """Engine that isolates the sandbox: `microvm` or `gvisor`."""
        return self._origin.engine if self._origin else None

    @property
    def name(self) -> str | None:
        """Name of the sandbox."""
        return self._origin.name if self._origin else None

    @property
    def forked_from(self) -> str | None:
        """Id of the sandbox that this sandbox was forked from."""
        return self._origin.forked_from if self._origin else None

"""Parts that the blocking and the asynchronous classes share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from e2b.api.client.models.sandbox_network_config import SandboxNetworkConfig
from e2b.api.client.types import Unset
from e2b.connection_config import ApiParams, ConnectionConfig
from e2b.exceptions import InvalidArgumentException
from e2b.sandbox.sandbox_api import build_lifecycle_config, build_network_config
from e2b.sandbox.utils import class_method_variant
from packaging.version import Version

from jiffy.errors import AllFailedError, api_error
from jiffy.models import Change, Created, Origin, Outcome

S = TypeVar("S")
Keep = Callable[[list[Outcome[S]]], "Outcome[S] | int | None"]

MAX_FORKS = 100
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


def _network_body(network: Any) -> dict[str, Any] | None:
    fields = build_network_config(network)
    return SandboxNetworkConfig(**fields).to_dict() if fields else None


def create_body(
    template: str,
    *,
    timeout: int | None,
    metadata: Mapping[str, str] | None,
    envs: Mapping[str, str] | None,
    allow_internet_access: bool | None,
    network: Any,
    lifecycle: Any,
    rejected: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the body of a create.

    `rejected` has the options of `e2b` that the daemon rejects, `extra` the options of Jiffy.
    """
    behaviour = build_lifecycle_config(lifecycle)
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "metadata": dict(metadata or {}),
        "envVars": dict(envs or {}),
        "allow_internet_access": allow_internet_access,
        "network": _network_body(network),
        **rejected,
        **extra,
    }
    for name, value in (
        ("autoPause", behaviour.auto_pause),
        ("autoPauseMemory", behaviour.auto_pause_memory),
    ):
        if isinstance(value, bool):
            body[name] = value
    if not isinstance(behaviour.auto_resume, Unset):
        body["autoResume"] = behaviour.auto_resume.to_dict()
    return {name: value for name, value in body.items() if value is not None}


def check_fork_count(count: int | None) -> None:
    """Rejects a number of forks that the daemon does not accept."""
    is_integer = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (is_integer and 1 <= count <= MAX_FORKS):
        raise InvalidArgumentException(f"count must be an integer from 1 to {MAX_FORKS}, got {count!r}")


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

    # Errors
    `AllFailedError` if `keep` selects none. Its cause is the first error.
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
    errors: Iterable[Exception] = (entry for entry in entries if isinstance(entry, Exception))
    return sandboxes, next(iter(errors), None)


class OriginProperties:
    """Properties of the guest's origin, as they were when the object was created."""

    _origin: Origin | None = None

    @property
    def boot_mode(self) -> str | None:
        """Origin of the guest: `cold`, `snapshot`, `warm-pool` or `fork`."""
        return self._origin.boot_mode if self._origin else None

    @property
    def boot_ms(self) -> float | None:
        """Time from the request to the agent's answer, in milliseconds."""
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

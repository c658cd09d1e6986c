"""Blocking classes of snapshots, functions, templates and the host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self, Unpack

import e2b
from e2b.connection_config import ApiParams
from e2b.exceptions import TimeoutException

from jiffy import calls
from jiffy.connection import Bound, Connected
from jiffy.error_codes import InUseError
from jiffy.errors import UnreachableError
from jiffy.models import (
    Engine,
    Event,
    FunctionInfo,
    FunctionLog,
    FunctionResponse,
    HostStatus,
    Limits,
    Pool,
    SnapshotInfo,
)
from jiffy.transport import send

# Interval between attempts to delete a snapshot that is being stored, in seconds.
DISCARD_POLL_SECONDS = 0.02


class Template(Connected, e2b.Template):
    """Templates. Has all methods of `e2b.Template`."""


@dataclass
class Snapshot(Bound, SnapshotInfo):
    """A snapshot of a sandbox."""

    _params: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def get(cls, snapshot: str, **opts: Unpack[ApiParams]) -> Self:
        """Returns a snapshot by id or name."""
        return cls(**send(cls._config(**opts), calls.get_snapshot(snapshot)), _params=opts)

    @classmethod
    def list(cls, sandbox_id: str | None = None, name: str | None = None, **opts: Unpack[ApiParams]) -> Iterator[Self]:
        """Iterates over snapshots, newest first."""
        token: str | None = None
        while True:
            items, token = send(cls._config(**opts), calls.list_snapshots(sandbox_id, name, token))
            for item in items:
                yield cls(**item, _params=opts)
            if token is None:
                return

    def refresh(self) -> Self:
        """Returns the present state of the snapshot."""
        return type(self).get(self.snapshot_id, **self._bound_params())

    def delete(self) -> bool:
        """Deletes the snapshot. Returns false if it does not exist."""
        return send(self._bound_config(), calls.delete_snapshot(self.snapshot_id))

    def _discard(self) -> None:
        """Deletes the snapshot after its files are complete."""
        was_ready = False
        while True:
            try:
                self.delete()
                return
            except InUseError:
                if was_ready:
                    raise
                was_ready = self.refresh().status == "ready"
            time.sleep(DISCARD_POLL_SECONDS)

    def verify(self) -> list[dict[str, Any]]:  # type: ignore[valid-type]
        """Compares the snapshot and its ancestors with their checksums."""
        return send(self._bound_config(), calls.verify_snapshot(self.snapshot_id))


@dataclass(frozen=True)
class Function(Bound, FunctionInfo):
    """A WebAssembly function."""

    _params: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def deploy(
        cls,
        module: str | Path | bytes,
        name: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        **opts: Unpack[ApiParams],
    ) -> Self:
        """Deploys a module as a new version.

        :param module: Path of a WebAssembly module, or its bytes.
        :param name: Name of the function. Defaults to the name of the file.
        :param settings: Fields of `DeploySettings` in the API, for example `{"public": True}`.
        """
        call = calls.deploy(module, name, settings)
        return cls(**send(cls._config(**opts), call), _params=opts)

    @classmethod
    def get(cls, name: str, **opts: Unpack[ApiParams]) -> Self:
        """Returns a function."""
        return cls(**send(cls._config(**opts), calls.get_function(name)), _params=opts)

    @classmethod
    def list(cls, **opts: Unpack[ApiParams]) -> list[Self]:
        """Returns the functions of the key."""
        return [cls(**item, _params=opts) for item in send(cls._config(**opts), calls.list_functions())]

    def call(
        self,
        path: str = "/",
        *,
        method: str | None = None,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> FunctionResponse:
        """Sends a request to the function. Its response is returned also if its status is an error.

        :param method: Defaults to `POST` with a body, and to `GET` without.
        """
        call = calls.invoke(self.name, path, method, body, headers)
        return send(self._bound_config(), call)

    def logs(self, after: str | None = None, wait: int | None = None) -> FunctionLog:
        """Returns a page of the log.

        :param after: `next` of the previous page.
        :param wait: Maximum time in seconds to wait for the first entry.
        """
        return send(self._bound_config(), calls.function_log(self.name, after, wait))

    def rollback(self, version: int | None = None) -> Self:
        """Activates an earlier version. Defaults to the previous one."""
        return self._switch("rollback", version)

    def enable(self) -> Self:
        """Enables the function."""
        return self._switch("enable")

    def disable(self) -> Self:
        """Rejects requests until the function is enabled."""
        return self._switch("disable")

    def _switch(self, action: str, version: int | None = None) -> Self:
        fields = send(self._bound_config(), calls.switch_function(self.name, action, version))
        return type(self)(**fields, _params=self._params)

    def remove(self) -> bool:
        """Removes the function with all versions. Returns false if it does not exist."""
        return send(self._bound_config(), calls.remove_function(self.name))


class Host(Connected):
    """The daemon and its host."""

    @classmethod
    def status(cls, **opts: Unpack[ApiParams]) -> HostStatus:
        """Returns status and free resources."""
        return send(cls._config(**opts), calls.host())

    @classmethod
    def engines(cls, **opts: Unpack[ApiParams]) -> list[Engine]:
        """Returns the engines and their capabilities."""
        return send(cls._config(**opts), calls.engines())

    @classmethod
    def pools(cls, **opts: Unpack[ApiParams]) -> list[Pool]:
        """Returns the warm pools."""
        return send(cls._config(**opts), calls.pools())

    @classmethod
    def set_pool(cls, template: str, size: int, **opts: Unpack[ApiParams]) -> Pool:
        """Sets the size of a template's warm pool."""
        return send(cls._config(**opts), calls.set_pool(template, size))

    @classmethod
    def events(
        cls,
        sandbox_id: str | None = None,
        types: Iterable[str] | None = None,
        *,
        after: str | None = None,
        since: datetime | None = None,
        follow: bool = True,
        **opts: Unpack[ApiParams],
    ) -> Iterator[Event]:
        """Iterates over events, oldest first. Resumes after a lost connection and a restart of the daemon.

        :param sandbox_id: Only events of this sandbox, by its id.
        :param types: Only events of these types, for example `["sandbox.killed"]`.
        :param after: Only events after this `id`: continues an earlier iteration.
        :param since: Only events from this time on.
        :param follow: Wait for further events. Without it, the iteration ends with the newest event.
        """
        selection = calls.EventSelection(sandbox_id, types, since, after, follow)
        while True:
            try:
                page = send(cls._config(**opts), calls.events(selection, after))
            except (UnreachableError, TimeoutException):
                if not follow or after is None:
                    raise
                time.sleep(calls.RESUME_SECONDS)
                continue
            yield from page.events
            after = page.next or after
            if not page.more and not follow:
                return

    @classmethod
    def limits(cls, key: str | None = None, **opts: Unpack[ApiParams]) -> Limits:
        """Returns limits and usage of a key. Defaults to the key of the request."""
        return send(cls._config(**opts), calls.limits(key))

"""Asynchronous sandboxes."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

import e2b
from e2b.connection_config import ApiParams
from e2b.exceptions import InvalidArgumentException, TimeoutException
from e2b.sandbox.sandbox_api import build_network_update_body

from jiffy import calls
from jiffy.async_commands import AsyncCommands
from jiffy.async_resources import AsyncSnapshot
from jiffy.connection import Connected
from jiffy.error_codes import SandboxNotFoundError
from jiffy.images import ImageLog, check_source, import_image_async
from jiffy.models import (
    Ack,
    AwaitedState,
    Change,
    Connections,
    Difference,
    EngineName,
    Lineage,
    Outcome,
    Preview,
    Stats,
)
from jiffy.ports import open_port_async
from jiffy.progress import Progress, counted
from jiffy.shared import (
    NOT_LISTENING,
    PORT_POLL_SECONDS,
    Keep,
    OriginProperties,
    StateWait,
    changes_of,
    changes_query,
    create_body,
    first_success,
    new_sandbox,
    new_sandboxes,
    only_sandboxes,
    own,
    select,
)
from jiffy.transport import Call, send_async

T = TypeVar("T")


class AsyncSandbox(Connected, OriginProperties, e2b.AsyncSandbox):
    """A sandbox. Has all methods of `e2b.AsyncSandbox`, and the operations of Jiffy."""

    if not TYPE_CHECKING:
        kill = own("_cls_kill")
        get_info = own("_cls_get_info")
        set_timeout = own("_cls_set_timeout")
        update_network = own("_cls_update_network")
        get_metrics = own("_cls_get_metrics")
        pause = own("_cls_pause")
        beta_pause = own("_cls_pause")
        create_snapshot = own("_cls_create_snapshot")

    def __init__(self, **opts: Any) -> None:
        super().__init__(**opts)
        self._commands = AsyncCommands(self.envd_api_url, self.connection_config, self._envd_version, self._envd_api)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self.kill()

    @classmethod
    async def create(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        template: str | None = None,
        timeout: int | None = None,
        metadata: dict[str, str] | None = None,
        envs: dict[str, str] | None = None,
        secure: bool | None = None,
        allow_internet_access: bool | None = None,
        mcp: Any = None,
        network: Any = None,
        iam: Any = None,
        lifecycle: Any = None,
        volume_mounts: Any = None,
        logger: logging.Logger | None = None,
        idempotency_key: str | None = None,
        *,
        name: str | None = None,
        engine: EngineName | None = None,
        cpu_count: int | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        ca_certificates: str | None = None,
        egress_proxy: dict[str, Any] | None = None,
        join: str | None = None,
        idle_timeout: int | None = None,
        image: str | None = None,
        on_image_log: ImageLog | None = None,
        **opts: Unpack[ApiParams],
    ) -> Self:
        """Creates a sandbox.

        :param template: Name of a template, or id or name of a snapshot. Defaults to `base`.
        :param image: Image of a registry, for example `python:3.12`, instead of a template. It is
            imported first, unless it is unchanged since its last import.
        :param on_image_log: Receives the lines of the log of an import.
        :param timeout: Timeout in seconds. -1 means no limit. Defaults to 300.
        :param name: Name, unique among the key's sandboxes. Calls accept the name instead of the id.
        :param engine: `microvm` or `gvisor`. Defaults to the snapshot's or the host's engine.
        :param cpu_count: Virtual CPUs. Defaults to the template's number.
        :param memory_mb: Memory in MiB. Defaults to the template's size.
        :param disk_mb: Writable disk in MiB. Defaults to the template's size.
        :param ca_certificates: Authorities that the sandbox's programs trust, in PEM.
        :param egress_proxy: Proxy of the sandbox's programs, with the fields of `Proxy` in the API.
        :param join: Private network to join. Sandboxes of the same key in a network reach each other
            by name.
        :param idle_timeout: Time in seconds without use after which the sandbox is paused. The next
            request resumes it. 0 means never. Defaults to the template's or the key's.
        :param idempotency_key: A repeated create with the same key returns the same sandbox.
            Defaults to a random key.

        The other options are the options of `e2b.AsyncSandbox.create`.
        """
        check_source(template, image)
        params = cls._resolve_api_params(**opts)
        if image is not None:
            template = await import_image_async(cls._config(**params), image, on_image_log)
        body = create_body(
            template or cls.default_template,
            timeout=timeout,
            metadata=metadata,
            envs=envs,
            allow_internet_access=allow_internet_access,
            network=network,
            lifecycle=lifecycle,
            mcp=mcp,
            iam=iam,
            volume_mounts=volume_mounts,
            name=name,
            engine=engine,
            cpu_count=cpu_count,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            ca_certificates=ca_certificates,
            egress_proxy=egress_proxy,
            join=join,
            idle_timeout=idle_timeout,
        )
        created = await send_async(cls._config(**params), calls.create(body, idempotency_key))
        return new_sandbox(cls, created, cast(Any, params), logger)

    # ---- Calls of `e2b` with the errors and retries of Jiffy
    @classmethod
    async def _call(cls, call: Call[T], opts: Any) -> T:
        return await send_async(cls._config(**opts), call)

    async def _send(self, call: Call[T], **opts: Unpack[ApiParams]) -> T:
        return await self._call(call, self.connection_config.get_api_params(**opts))

    @classmethod
    async def _cls_kill(cls, sandbox_id: str, **opts: Any) -> bool:
        return await cls._call(calls.kill(sandbox_id), opts)

    @classmethod
    async def _cls_get_info(cls, sandbox_id: str, **opts: Any) -> e2b.SandboxInfo:
        return await cls._call(calls.info(sandbox_id), opts)

    @classmethod
    async def _cls_set_timeout(cls, sandbox_id: str, timeout: int, **opts: Any) -> None:
        await cls._call(calls.set_timeout(sandbox_id, timeout), opts)

    @classmethod
    async def _cls_update_network(cls, sandbox_id: str, network: Any, **opts: Any) -> None:
        await cls._call(calls.set_network(sandbox_id, build_network_update_body(network).to_dict()), opts)

    @classmethod
    async def _cls_get_metrics(
        cls,
        sandbox_id: str,
        start: datetime.datetime | None = None,
        end: datetime.datetime | None = None,
        **opts: Any,
    ) -> list[e2b.SandboxMetrics]:
        return await cls._call(calls.metrics(sandbox_id, start, end), opts)

    @classmethod
    async def _cls_pause(
        cls, sandbox_id: str, keep_memory: bool | None = None, *, mode: Any = None, strict: bool = False, **opts: Any
    ) -> bool:
        return await cls._call(calls.pause(sandbox_id, keep_memory, mode, strict), opts)

    @classmethod
    async def _cls_create_snapshot(
        cls, sandbox_id: str, name: str | None = None, *, mode: Any = None, **opts: Any
    ) -> AsyncSnapshot:
        fields = await cls._call(calls.snapshot(sandbox_id, name, mode=mode), opts)
        return AsyncSnapshot(**fields, _params=opts)

    @classmethod
    async def _cls_delete_snapshot(cls, snapshot_id: str, **opts: Any) -> bool:
        return await cls._call(calls.delete_snapshot(snapshot_id), opts)

    @classmethod
    async def _cls_connect_sandbox(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, sandbox_id: str, timeout: int | None = None, logger: Any = None, *, on_resume: Any = "restore", **opts: Any
    ) -> Self:
        params = cls._resolve_api_params(**opts)
        call = calls.connect(sandbox_id, timeout, on_resume)
        return new_sandbox(cls, await cls._call(call, params), cast(Any, params), logger)

    @classmethod
    async def _cls_fork_sandbox(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, sandbox_id: str, timeout: int | None = None, count: int | None = None, logger: Any = None, **opts: Any
    ) -> list[Self | Exception]:
        call = calls.fork(sandbox_id, timeout, count)
        params = cls._resolve_api_params(**opts)
        entries = await cls._call(call, params)
        return new_sandboxes(cls, entries, cast(Any, params), logger)

    if not TYPE_CHECKING:

        async def _reconnect(self, timeout=None, *, on_resume="restore", **opts):
            created = await self._send(calls.connect(self.sandbox_id, timeout, on_resume), **opts)
            self._origin = created.origin
            return self

        connect = e2b.sandbox.utils.class_method_variant("_cls_connect_sandbox")(_reconnect)

    # ---- Snapshots and forks
    async def snapshot(
        self,
        name: str | None = None,
        ack: Ack | None = None,
        durable: bool | None = None,
        **opts: Unpack[ApiParams],
    ) -> AsyncSnapshot:
        """Takes a snapshot. The sandbox continues to run.

        :param name: Name of the snapshot.
        :param ack: `captured` returns when the memory is frozen (milliseconds), `stored` when the
            files are complete. Defaults to `stored`.
        :param durable: Wait until the store has the snapshot.
        """
        params = self.connection_config.get_api_params(**opts)
        return AsyncSnapshot(
            **await self._call(calls.snapshot(self.sandbox_id, name, ack, durable), params), _params=params
        )

    async def rollback(self, snapshot: str | e2b.SnapshotInfo, **opts: Unpack[ApiParams]) -> Self:
        """Rolls the sandbox back to a snapshot. The id remains; running commands end.

        :param snapshot: Snapshot, or its id or name.
        """
        await self._send(calls.rollback(self.sandbox_id, snapshot), **opts)
        return self

    async def promote(self, **opts: Unpack[ApiParams]) -> list[str]:
        """Retains this child of a fork and removes its siblings. Returns their ids."""
        return await self._send(calls.promote(self.sandbox_id), **opts)

    @asynccontextmanager
    async def checkpoint(self, **opts: Unpack[ApiParams]) -> AsyncIterator[AsyncSnapshot]:
        """Rolls the sandbox back if the block raises or is cancelled.

        The exception continues after the rollback. If the rollback fails, its error is raised with
        the exception of the block as context, and the snapshot remains.
        """
        snapshot = await self.snapshot(ack="captured", **opts)
        try:
            yield snapshot
        except BaseException:
            # A second cancellation must not leave the sandbox between two states.
            await asyncio.shield(self._undo(snapshot, **opts))
            raise
        await snapshot._discard()

    async def _undo(self, snapshot: AsyncSnapshot, **opts: Unpack[ApiParams]) -> None:
        await self.rollback(snapshot, **opts)
        await snapshot._discard()

    async def try_each(
        self,
        functions: Iterable[Callable[[Self], Awaitable[Any]]],
        keep: Keep[Self] = first_success,
        *,
        timeout: int | None = None,
        **opts: Unpack[ApiParams],
    ) -> Outcome[Self]:
        """Runs each function in a fork of its own, in parallel, and promotes the selected fork.

        The other forks are removed, also if a function fails, `keep` raises, or the call is
        cancelled. This sandbox continues to run unchanged.

        :param functions: Functions that receive their fork.
        :param keep: Receives all outcomes, and returns one of them, its index, or `None`. Defaults
            to the first function that returned.
        :param timeout: Timeout of the forks in seconds.
        :raises AllFailedError: If `keep` selects none.
        """
        attempts = list(functions)
        if not attempts:
            raise InvalidArgumentException("try_each requires at least one function")
        params = self.connection_config.get_api_params(**opts)
        call = type(self)._cls_fork_sandbox(self.sandbox_id, timeout=timeout, count=len(attempts), **params)
        forks, failure = only_sandboxes(await _complete(call))
        try:
            if failure is not None:
                raise failure
            running = [_attempt(*item) for item in enumerate(zip(attempts, forks, strict=True))]
            chosen = select(list(await asyncio.gather(*running)), keep)
            await chosen.sandbox.promote()
            return chosen
        except BaseException:
            await asyncio.shield(_kill_all(forks))
            raise

    async def lineage(self, **opts: Unpack[ApiParams]) -> Lineage:
        """Returns the sandboxes and snapshots that are connected with this sandbox."""
        return await self._send(calls.lineage(self.sandbox_id), **opts)

    @overload
    async def diff(self, a: None = None, b: None = None, limit: int = 10_000) -> list[Change]: ...

    @overload
    async def diff(
        self,
        a: str | e2b.SnapshotInfo,
        b: str | e2b.SnapshotInfo | None = None,
        limit: int = 10_000,
        **opts: Unpack[ApiParams],
    ) -> list[Difference]: ...

    async def diff(
        self,
        a: str | e2b.SnapshotInfo | None = None,
        b: str | e2b.SnapshotInfo | None = None,
        limit: int = 10_000,
        **opts: Unpack[ApiParams],
    ) -> list[Change] | list[Difference]:
        """Returns the files that differ, sorted by path. At most `limit` files.

        :param a: Snapshot, or id or name of a snapshot or a sandbox. Without it, this sandbox is
            compared with its template, by the names of the changed files.
        :param b: Like `a`. Defaults to this sandbox. The contents of the files are compared.
        """
        if a is not None:
            found: list[Difference] = []
            token: str | None = None
            while True:
                call = calls.compare(a, b or self.sandbox_id, limit - len(found), token)
                page, token = await self._send(call, **opts)
                found += page
                if token is None or len(found) >= limit:
                    return found[:limit]
        response = await self._envd_api.get("/changes", params=changes_query(limit))
        return changes_of(response.status_code, response.content, response.headers)

    # ---- Operation
    async def rename(self, name: str | None, **opts: Unpack[ApiParams]) -> None:
        """Renames the sandbox. `None` removes the name."""
        await self._send(calls.rename(self.sandbox_id, name), **opts)

    async def set_idle_timeout(self, seconds: int, **opts: Unpack[ApiParams]) -> None:
        """Sets the time without use after which the sandbox is paused, counted from now.

        The next request resumes the sandbox.

        :param seconds: Time in seconds. 0 means never.
        """
        await self._send(calls.set_idle_timeout(self.sandbox_id, seconds), **opts)

    async def wait(self, state: AwaitedState = "ended", timeout: float | None = None, **opts: Unpack[ApiParams]) -> str:
        """Waits until the sandbox is in a state, or can never reach it. Returns the state.

        :param state: `ended`, `running` or `paused`.
        :param timeout: Maximum time in seconds. Defaults to no limit.
        :raises TimeoutException: If the time is over.
        """
        waiting = StateWait(self.sandbox_id, state, timeout)
        while True:
            try:
                now = await self._send(waiting.next_call(), **opts)
            except SandboxNotFoundError:
                # Calls do not find a killed sandbox.
                return "killed"
            if waiting.is_over(now):
                return now

    async def restart(self, grace: float | None = None, **opts: Unpack[ApiParams]) -> Self:
        """Stops all processes and runs the start command of the template.

        :param grace: Time in seconds between SIGTERM and SIGKILL. Defaults to 10.
        """
        await self._send(calls.restart(self.sandbox_id, grace), **opts)
        return self

    async def stats(self, **opts: Unpack[ApiParams]) -> Stats:
        """Returns the present usage of the running sandbox."""
        return await self._send(calls.stats(self.sandbox_id), **opts)

    async def connections(self, limit: int | None = None, **opts: Unpack[ApiParams]) -> Connections:
        """Returns the newest allowed and rejected connections and DNS queries."""
        return await self._send(calls.connections(self.sandbox_id, limit), **opts)

    async def preview(self, port: int, ttl: int | None = None, **opts: Unpack[ApiParams]) -> Preview:
        """Creates a link to a port that needs no key.

        :param ttl: Validity in seconds. Defaults to 3600.
        """
        return await self._send(calls.preview(self.sandbox_id, port, ttl), **opts)

    async def port(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Returns streams that are connected to a TCP port, also on the loopback interface."""
        return await open_port_async(self.connection_config, self.sandbox_id, port)

    async def wait_for_port(self, port: int, timeout: float = 30) -> None:
        """Waits until a program listens on a TCP port.

        :raises TimeoutException: If no program listens within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                _, writer = await self.port(port)
                writer.close()
                return
            except NOT_LISTENING as error:
                if time.monotonic() >= end:
                    raise TimeoutException(f"no program listens on port {port} after {timeout} s") from error
            await asyncio.sleep(PORT_POLL_SECONDS)

    async def upload(self, source: str | os.PathLike[str], path: str, on_progress: Progress | None = None) -> None:
        """Copies a local file into the sandbox.

        :param on_progress: Receives the number of copied bytes and the size of the file.
        """
        size = Path(source).stat().st_size
        with open(source, "rb") as file:
            await self.files.write(path, counted(file, size, on_progress))

    async def download(self, path: str, target: str | os.PathLike[str], on_progress: Progress | None = None) -> None:
        """Copies a file of the sandbox to a local file.

        :param on_progress: Receives the number of copied bytes and the size of the file.
        """
        size = (await self.files.get_info(path)).size
        done = 0
        with open(target, "wb") as file:
            async for piece in await self.files.read(path, format="stream"):
                file.write(piece)
                done += len(piece)
                if on_progress:
                    on_progress(done, size)


async def _attempt(index: int, item: tuple[Callable[[Any], Awaitable[Any]], Any]) -> Outcome[Any]:
    function, fork = item
    try:
        return Outcome(index, fork, await function(fork))
    except Exception as error:
        return Outcome(index, fork, error=error)


async def _complete(call: Awaitable[Sequence[Any]]) -> list[Any]:
    """Waits for a fork. If the caller is cancelled meanwhile, kills the children."""
    task = asyncio.ensure_future(call)
    try:
        return list(await asyncio.shield(task))
    except asyncio.CancelledError:
        children, _ = only_sandboxes(await task)
        await _kill_all(children)
        raise


async def _kill_all(sandboxes: Sequence[AsyncSandbox]) -> None:
    """Kills sandboxes. Errors are ignored, because the original error is more important."""
    results = await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes), return_exceptions=True)
    for sandbox, result in zip(sandboxes, results, strict=True):
        if isinstance(result, BaseException):
            logging.getLogger("jiffy").warning("cannot kill fork %s: %s", sandbox.sandbox_id, result)

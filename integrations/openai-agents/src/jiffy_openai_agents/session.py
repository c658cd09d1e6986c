"""Session of the OpenAI Agents SDK in a sandbox of Jiffy."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import jiffy
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.workspace_paths import sandbox_path_str
from jiffy.bounded_output import BoundedOutput

# Content of a persisted workspace that is a snapshot of Jiffy.
REFERENCE = "jiffySnapshot"
MAX_REFERENCE_BYTES = 512
NOT_RUNNING = (jiffy.SandboxNotRunningException, jiffy.SandboxUnreachableException)
FAILURES = (jiffy.SandboxException, jiffy.ApiError)


def snapshot_of(workspace: io.IOBase) -> str | None:
    """Returns the snapshot that a persisted workspace refers to."""
    try:
        return str(json.loads(workspace.read(MAX_REFERENCE_BYTES))[REFERENCE])
    except (ValueError, LookupError, TypeError):
        return None


class JiffySandboxClientOptions(BaseSandboxClientOptions):
    """Options of new sandboxes.

    `timeout` is the lifetime in seconds, after which the sandbox is killed, or paused with
    `pause_on_exit`. `exec_timeout` is the default timeout of a command in seconds, and `max_output`
    the maximum number of characters of each of its output streams.
    """

    type: Literal["jiffy"] = "jiffy"
    template: str | None = None
    timeout: int = 3600
    envs: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    cpu_count: int | None = None
    memory_mb: int | None = None
    allow_internet_access: bool = True
    exposed_ports: tuple[int, ...] = ()
    pause_on_exit: bool = False
    exec_timeout: float = 3600
    max_output: int = 1_000_000


class JiffySandboxSessionState(SandboxSessionState):
    """Serializable state of a session, from which `resume` continues it."""

    type: Literal["jiffy"] = "jiffy"
    sandbox_id: str
    options: JiffySandboxClientOptions


class JiffySandboxSession(BaseSandboxSession):
    """Session whose workspace is persisted as a snapshot of the sandbox."""

    state: JiffySandboxSessionState

    def __init__(self, state: JiffySandboxSessionState, sandbox: jiffy.AsyncSandbox) -> None:
        self.state = state
        self.sandbox = sandbox
        self._snapshot_id: str | None = None

    async def _prepare_backend_workspace(self) -> None:
        root = self.state.manifest.root
        command = f"mkdir -p {shlex.quote(root)} && chown user: {shlex.quote(root)}"
        await self.sandbox.commands.run(command, user="root", cwd="/")

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def running(self) -> bool:
        try:
            return bool(await self.sandbox.is_running())
        except FAILURES:
            return False

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        words, user = [str(word) for word in command], None
        # Prefix of commands of another user, as `exec` writes it.
        if words[:2] == ["sudo", "-u"] and words[3:4] == ["--"]:
            user, words = words[2], words[4:]
        limit = self.state.options.exec_timeout if timeout is None else max(timeout, 1)
        stdout, stderr = (BoundedOutput(self.state.options.max_output) for _ in range(2))
        envs = await self.state.manifest.environment.resolve()
        try:
            result = await self.sandbox.commands.run(
                shlex.join(words),
                user=user,
                cwd=self.state.manifest.root,
                envs=envs,
                timeout=limit,
                on_stdout=stdout,
                on_stderr=stderr,
                retain_output=False,
            )
            code = result.exit_code
        except jiffy.CommandExitException as error:
            code = error.exit_code
        except FAILURES as error:
            if isinstance(error, jiffy.TimeoutException) and not isinstance(error, NOT_RUNNING):
                raise ExecTimeoutError(command=command, timeout_s=limit, cause=error) from error
            message = f"cannot run a command in sandbox {self.state.sandbox_id}: {error}"
            raise ExecTransportError(command=command, message=message, cause=error) from error
        return ExecResult(stdout=stdout.text.encode(), stderr=stderr.text.encode(), exit_code=code)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        place = sandbox_path_str(await self._validate_path_access(path))
        try:
            return io.BytesIO(await self.sandbox.files.read(place, format="bytes"))
        except jiffy.FileNotFoundException as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except FAILURES as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        content = data.read()
        if not isinstance(content, str | bytes | bytearray):
            raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
        target = await self._validate_path_access(path, for_write=True)
        content = content.encode() if isinstance(content, str) else bytes(content)
        try:
            await self.sandbox.files.write(sandbox_path_str(target), content)
        except FAILURES as error:
            raise WorkspaceArchiveWriteError(path=target, cause=error) from error

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            url = urlsplit((await self.sandbox.preview(port)).url)
        except FAILURES as error:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=error
            ) from error
        tls = url.scheme == "https"
        return ExposedPortEndpoint(host=url.hostname or "", port=url.port or (443 if tls else 80), tls=tls)

    # ---- Snapshots
    async def persist_workspace(self) -> io.IOBase:
        """Takes a snapshot of the sandbox and returns a reference. Deletes the previous snapshot."""
        previous = self._snapshot_id
        try:
            snapshot = await self.sandbox.snapshot(f"openai-agents-{self.state.session_id.hex}")
            self._snapshot_id = snapshot.snapshot_id
            if previous is not None:
                await jiffy.AsyncSandbox.delete_snapshot(previous)
        except FAILURES as error:
            raise WorkspaceArchiveReadError(path=self._workspace_root_path(), cause=error) from error
        return io.BytesIO(json.dumps({REFERENCE: self._snapshot_id}).encode())

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Rolls the sandbox back to a snapshot."""
        root, snapshot_id = self._workspace_root_path(), snapshot_of(data)
        if snapshot_id is None:
            detail = "the workspace was not persisted by JiffySandboxClient: create a new session"
            raise WorkspaceArchiveWriteError(path=root, context={"detail": detail})
        try:
            await self.sandbox.rollback(snapshot_id)
        except FAILURES as error:
            detail = f"cannot roll back sandbox {self.state.sandbox_id} to snapshot {snapshot_id}: {error}"
            raise WorkspaceArchiveWriteError(path=root, context={"detail": detail}, cause=error) from error
        self._snapshot_id = snapshot_id

    async def _clear_workspace_root_on_resume(self) -> None:
        """Removes no files, because a rollback replaces all of them."""

    def _should_compute_snapshot_fingerprint_on_persist(self) -> bool:
        return False

    async def _shutdown_backend(self) -> None:
        if self.state.options.pause_on_exit:
            await self.sandbox.pause()
        else:
            await self.sandbox.kill()

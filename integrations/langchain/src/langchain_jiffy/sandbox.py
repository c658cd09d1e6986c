"""Backend of deepagents that runs commands in a sandbox of Jiffy."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Self

import jiffy
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from jiffy.bounded_output import BoundedOutput

# Exit status of `timeout` for a command that did not end in time.
TIMED_OUT = 124
NOT_RUNNING = (jiffy.SandboxNotRunningException, jiffy.SandboxUnreachableException)
FAILURES = (jiffy.SandboxException, jiffy.ApiError)


class JiffySandbox(BaseSandbox):
    """Runs the tools of an agent in a sandbox. The sandbox is killed at the end of `with`.

    :param sandbox: Sandbox in which commands run.
    :param workdir: Working directory of commands.
    :param timeout: Default timeout of a command in seconds. 0 means no limit.
    :param max_output: Maximum number of characters of a command's output.
    """

    def __init__(
        self,
        sandbox: jiffy.Sandbox,
        *,
        workdir: str = "/home/user",
        timeout: int = 30 * 60,
        max_output: int = 1_000_000,
    ) -> None:
        self.sandbox = sandbox
        self._workdir = workdir
        self._timeout = timeout
        self._max_output = max_output

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.sandbox.kill()

    @property
    def id(self) -> str:
        return self.sandbox.sandbox_id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command. At the timeout, the command is killed."""
        return self._run(command, timeout, threading.Event(), [])

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command. At the timeout, and if the call is cancelled, the command is killed."""
        cancelled, handles = threading.Event(), list[Any]()
        running = asyncio.create_task(asyncio.to_thread(self._run, command, timeout, cancelled, handles))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            if handles:
                await asyncio.to_thread(handles[0].kill)
            await running
            raise

    def _run(
        self, command: str, timeout: int | None, cancelled: threading.Event, handles: list[Any]
    ) -> ExecuteResponse:
        limit = self._timeout if timeout is None else timeout
        output = BoundedOutput(self._max_output)
        code: int | None
        try:
            handles.append(
                self.sandbox.commands.run(
                    command, background=True, cwd=self._workdir, timeout=limit, retain_output=False
                )
            )
            if cancelled.is_set():
                handles[0].kill()
            code = handles[0].wait(on_stdout=output, on_stderr=output).exit_code
        except jiffy.CommandExitException as error:
            code = error.exit_code
        except NOT_RUNNING as error:
            output(f"cannot run the command in sandbox {self.id}: {error}")
            code = None
        except jiffy.TimeoutException:
            output(f"\ncommand killed after {limit} s: pass a larger timeout, or run it in the background")
            code = TIMED_OUT
        except FAILURES as error:
            output(f"cannot run the command in sandbox {self.id}: {error}")
            code = None
        return ExecuteResponse(output.text, code, truncated=output.omitted > 0)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, self._write(path, content)) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._read(path) for path in paths]

    def _write(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            self.sandbox.files.write(path, content)
        except FAILURES as error:
            return self._file_error(path, error)
        return None

    def _read(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path, error="invalid_path")
        try:
            return FileDownloadResponse(path, bytes(self.sandbox.files.read(path, format="bytes")))
        except FAILURES as error:
            return FileDownloadResponse(path, error=self._file_error(path, error))

    def _file_error(self, path: str, error: Exception) -> str:
        """Returns the code of deepagents for an error, or its text."""
        if isinstance(error, jiffy.FileNotFoundException):
            return "file_not_found"
        try:
            if self.sandbox.files.get_info(path).type == jiffy.FileType.DIR:
                return "is_directory"
        except FAILURES:
            pass
        text = str(error)
        return "permission_denied" if "permission denied" in text.lower() else text

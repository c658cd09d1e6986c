"""Environment whose trials start from one snapshot per task."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
import tempfile
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any, override

import jiffy
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.environments.tar_transfer import (
    extract_dir_from_file,
    pack_dir_to_file,
    remote_pack_command,
    remote_unpack_command,
    tar_pack_succeeded,
)
from harbor.models.task.config import NetworkMode, NetworkPolicy
from jiffy.bounded_output import BoundedOutput

from jiffy_harbor import templates
from jiffy_harbor.options import JiffyOptions

# Restores the PATH of the image, which `/etc/profile` replaces in login shells.
IMAGE_PATH = (
    "while IFS= read -rd '' _v; do case $_v in PATH=*) PATH=${_v#PATH=} ;; esac; done </proc/$$/environ; unset _v\n"
)
TRANSFER_SECONDS = 600
NOT_RUNNING = (jiffy.SandboxNotRunningException, jiffy.SandboxUnreachableException)

# One trial of a process prepares the snapshot of a task, and the others wait for it.
_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
_prepared: set[str] = set()


class JiffyEnvironment(BaseEnvironment):
    """Runs each trial in a sandbox of its own.

    The first trial of a task builds its template, uploads its files, executes `setup`, waits for the
    health check and takes a snapshot. All further trials start from the snapshot, with running
    processes. The snapshot remains for later jobs, until `force_build`.
    """

    options_model = JiffyOptions
    options: JiffyOptions
    _sandbox: jiffy.AsyncSandbox | None = None

    @staticmethod
    @override
    def type() -> str:
        return "jiffy"

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, cpu_request=True, memory_limit=True, memory_request=True)

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            dynamic_network_policy=True,
        )

    @classmethod
    @override
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        try:
            jiffy.Host.status()
        except (jiffy.SandboxException, jiffy.ApiError) as error:
            raise SystemExit(f"cannot use the Jiffy daemon: {error}") from error

    @override
    def _validate_definition(self) -> None:
        if self.options.template is None:
            require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)

    # ---- Life
    @override
    async def start(self, force_build: bool) -> None:
        name = self.snapshot_name
        async with _locks[name]:
            is_outdated = force_build and name not in _prepared
            snapshot = await self._snapshot(name)
            if snapshot is None or is_outdated:
                await self._prepare(name, force_build)
                _prepared.add(name)
                if snapshot is not None:
                    await snapshot.delete()
                return
        self._sandbox = await self._create(snapshot.snapshot_id)

    @override
    async def stop(self, delete: bool) -> None:
        """Kills the sandbox, also without `delete`."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.kill()

    @property
    def snapshot_name(self) -> str:
        """Name of the snapshot, which depends on all settings of the task's environment."""
        settings = (
            self.environment_id,
            self._size(),
            self.task_env_config.storage_mb,
            self.options.template,
            sorted(self.options.images.items()),
            self.options.setup,
            sorted(self._startup_env().items()),
        )
        return "harbor-" + hashlib.sha256(repr(settings).encode()).hexdigest()[:24]

    async def _snapshot(self, name: str) -> jiffy.AsyncSnapshot | None:
        async for snapshot in jiffy.AsyncSnapshot.list(name=name):
            return snapshot
        return None

    async def _prepare(self, name: str, force_build: bool) -> None:
        template = self.options.template
        if template is None:
            template = name
            image = self.task_env_config.docker_image
            if force_build or not await jiffy.AsyncTemplate.exists(name):
                images = self.options.images
                await templates.build(name, self.environment_dir, image, images, force=force_build, **self._size())
        self._sandbox = await self._create(template, self.task_env_config.storage_mb)
        try:
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
            if self.options.setup is not None:
                await self._root(self.options.setup, "set up the task", self.options.setup_timeout_sec)
            await self.run_healthcheck()
            await self._sandbox.snapshot(name)
        except BaseException:
            await asyncio.shield(self.stop(delete=True))
            raise

    def _size(self) -> dict[str, int | None]:
        cpus = self._effective_cpus
        return {"cpu_count": None if cpus is None else int(cpus), "memory_mb": self._effective_memory_mb}

    async def _create(self, template: str, disk_mb: int | None = None) -> jiffy.AsyncSandbox:
        policy = self._network_policy
        return await jiffy.AsyncSandbox.create(
            template,
            timeout=self.options.sandbox_timeout_sec,
            disk_mb=disk_mb,
            metadata={"harbor.session": self.session_id, "harbor.task": self.environment_name},
            allow_internet_access=policy.network_mode != NetworkMode.NO_NETWORK,
            network=_rules(policy) if policy.network_mode == NetworkMode.ALLOWLIST else None,
        )

    @override
    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        await self._running().update_network(_rules(network_policy))

    def _running(self) -> jiffy.AsyncSandbox:
        if self._sandbox is None:
            raise RuntimeError(f"environment {self.session_id} is not running: call start() first")
        return self._sandbox

    # ---- Commands
    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command. At its timeout, and if the call is cancelled, the command is killed."""
        sandbox = self._running()
        user = self._resolve_user(user)
        stdout, stderr = BoundedOutput(self.options.max_output), BoundedOutput(self.options.max_output)
        try:
            code = (
                await sandbox.commands.run(
                    IMAGE_PATH + command,
                    cwd=cwd or self.task_env_config.workdir,
                    envs={**self._startup_env(), **(self._merge_env(env) or {})},
                    timeout=timeout_sec or 0,
                    user=None if user is None else str(user),
                    on_stdout=stdout,
                    on_stderr=stderr,
                    retain_output=False,
                )
            ).exit_code
        except jiffy.CommandExitException as error:
            code = error.exit_code
        except NOT_RUNNING as error:
            raise RuntimeError(f"sandbox {sandbox.sandbox_id} of {self.session_id} ended: {error}") from error
        except jiffy.TimeoutException as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds and was killed") from error
        return ExecResult(stdout=stdout.text, stderr=stderr.text, return_code=code)

    async def _root(self, command: str, purpose: str, timeout_sec: int = TRANSFER_SECONDS) -> ExecResult:
        result = await self.exec(command, cwd="/", user="root", timeout_sec=timeout_sec)
        if result.return_code != 0 and not tar_pack_succeeded(
            result.return_code, stdout=result.stdout, stderr=result.stderr, logger=self.logger
        ):
            output = ((result.stdout or "") + (result.stderr or ""))[-2000:]
            raise RuntimeError(
                f"cannot {purpose} in {self.session_id}: exit code {result.return_code} of the command\n{output}"
            )
        return result

    # ---- Files, as root like `docker cp`
    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with open(source_path, "rb") as file:
            await self._running().files.write(target_path, file, user="root")
            mode = os.fstat(file.fileno()).st_mode & 0o777
        await self._root(f"chmod {mode:o} {shlex.quote(target_path)}", f"set the mode of {target_path}")

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with tempfile.TemporaryDirectory() as place:
            archive, remote = Path(place) / "archive", _remote_archive()
            await asyncio.to_thread(pack_dir_to_file, source_dir, archive, include_root=False)
            await self.upload_file(archive, remote)
        unpack = remote_unpack_command(remote, target_dir, no_same_owner=True)
        await self._root(f"{unpack}; code=$?; rm -f {remote}; exit $code", f"unpack files in {target_dir}")

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        pieces = await self._running().files.read(source_path, format="stream", user="root")
        with open(target_path, "wb") as file:
            async for piece in pieces:
                file.write(piece)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        remote = _remote_archive()
        try:
            await self._root(remote_pack_command(source_dir, remote), f"pack {source_dir}")
            with tempfile.TemporaryDirectory() as place:
                archive = Path(place) / "archive"
                await self.download_file(remote, archive)
                await asyncio.to_thread(extract_dir_from_file, archive, target_dir)
        finally:
            await self._root(f"rm -f {remote}", "remove an archive")


def _remote_archive() -> str:
    return f"/tmp/harbor-{uuid.uuid4().hex}.tar.gz"


def _rules(policy: NetworkPolicy) -> Any:
    if policy.network_mode == NetworkMode.PUBLIC:
        return {}
    if policy.network_mode == NetworkMode.NO_NETWORK:
        return {"allow_internet_access": False}
    return {"allow_out": list(policy.allowed_hosts), "deny_out": [jiffy.ALL_TRAFFIC]}

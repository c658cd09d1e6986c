"""Client of the OpenAI Agents SDK whose sessions are sandboxes of Jiffy."""

from __future__ import annotations

import uuid
from typing import Any

import jiffy
from agents.sandbox.manifest import Manifest
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot

from jiffy_openai_agents.session import (
    JiffySandboxClientOptions,
    JiffySandboxSession,
    JiffySandboxSessionState,
    snapshot_of,
)


class JiffySandboxClient(BaseSandboxClient[JiffySandboxClientOptions | None]):
    """Creates, resumes and forks sessions. The daemon is found as by the SDK of Jiffy."""

    backend_id = "jiffy"
    supports_default_options = True

    def __init__(
        self, *, instrumentation: Instrumentation | None = None, dependencies: Dependencies | None = None
    ) -> None:
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: JiffySandboxClientOptions | None = None,
    ) -> SandboxSession:
        options = options or JiffySandboxClientOptions()
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        session_id = uuid.uuid4()
        sandbox = await _create(options, options.template)
        state = JiffySandboxSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            exposed_ports=options.exposed_ports,
            sandbox_id=sandbox.sandbox_id,
            options=options,
        )
        return self._session(state, sandbox)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Continues a session in its sandbox. A paused sandbox is resumed.

        If the sandbox does not exist, a new one is created from the session's snapshot.
        """
        state = _own(state)
        state.assert_path_grants_rebound()
        preserved = True
        sandbox: Any
        try:
            sandbox = await jiffy.AsyncSandbox.connect(state.sandbox_id, timeout=state.options.timeout)
        except jiffy.SandboxNotFoundException:
            snapshot_id = await self._snapshot_of(state)
            sandbox = await _create(state.options, snapshot_id or state.options.template)
            state.sandbox_id = sandbox.sandbox_id
            preserved = state.workspace_root_ready = snapshot_id is not None
        return self._session(state, sandbox, preserved=preserved)

    async def fork(
        self, session: SandboxSession, count: int = 1, *, snapshot: SnapshotSpec | None = None
    ) -> list[SandboxSession]:
        """Returns sessions that continue from the present state of a session, with memory and processes.

        :param count: Number of new sessions. If one cannot be created, all are removed.
        :param snapshot: Storage of the workspaces of the new sessions.
        """
        parent = _inner(session)
        outcomes = await parent.sandbox.fork(count=count, timeout=parent.state.options.timeout)
        sandboxes = [item for item in outcomes if isinstance(item, jiffy.AsyncSandbox)]
        failures = [item for item in outcomes if isinstance(item, Exception)]
        if failures:
            for sandbox in sandboxes:
                await sandbox.kill()
            raise failures[0]
        children = []
        for sandbox in sandboxes:
            session_id = uuid.uuid4()
            changes = {
                "session_id": session_id,
                "snapshot": resolve_snapshot(snapshot, str(session_id)),
                "sandbox_id": sandbox.sandbox_id,
            }
            state = parent.state.model_copy(update=changes)
            children.append(self._session(state, sandbox, preserved=True))
        return children

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Kills the sandbox, unless `pause_on_exit` preserves it. The latest snapshot remains."""
        inner = _inner(session)
        if not inner.state.options.pause_on_exit:
            await inner.sandbox.kill()
        return session

    async def forget(self, state: SandboxSessionState) -> None:
        """Kills the sandbox of a session and deletes its snapshot: it cannot be resumed."""
        state = _own(state)
        await jiffy.AsyncSandbox.kill(state.sandbox_id)
        snapshot_id = await self._snapshot_of(state)
        if snapshot_id is not None:
            await jiffy.AsyncSandbox.delete_snapshot(snapshot_id)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, JiffySandboxSessionState)

    async def _snapshot_of(self, state: JiffySandboxSessionState) -> str | None:
        dependencies = self._resolve_dependencies()
        if not await state.snapshot.restorable(dependencies=dependencies):
            return None
        with await state.snapshot.restore(dependencies=dependencies) as workspace:
            return snapshot_of(workspace)

    def _session(
        self, state: JiffySandboxSessionState, sandbox: jiffy.AsyncSandbox, *, preserved: bool = False
    ) -> SandboxSession:
        inner = JiffySandboxSession(state, sandbox)
        inner._set_start_state_preserved(preserved)
        return self._wrap_session(inner, instrumentation=self._instrumentation)


def _own(state: SandboxSessionState) -> JiffySandboxSessionState:
    if not isinstance(state, JiffySandboxSessionState):
        raise TypeError(f"JiffySandboxClient received the state of a session of type {state.type!r}")
    return state


def _inner(session: SandboxSession) -> JiffySandboxSession:
    inner = session._inner
    if not isinstance(inner, JiffySandboxSession):
        raise TypeError(f"JiffySandboxClient received a session of {type(inner).__name__}")
    return inner


async def _create(options: JiffySandboxClientOptions, template: str | None) -> jiffy.AsyncSandbox:
    return await jiffy.AsyncSandbox.create(
        template,
        timeout=options.timeout,
        envs=options.envs,
        metadata=options.metadata,
        cpu_count=options.cpu_count,
        memory_mb=options.memory_mb,
        allow_internet_access=options.allow_internet_access,
        lifecycle={"on_timeout": "pause"} if options.pause_on_exit else None,
    )

"""A checkpoint of the sandbox for each step of an agent."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, NotRequired

import jiffy
from jiffy.error_codes import InUseError, SnapshotNotFoundError
from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain.agents.middleware.types import PrivateStateAttr, ToolCallRequest

from langchain_jiffy.sandbox import JiffySandbox


class CheckpointState(AgentState[Any]):
    """State of a thread, with the snapshot that was taken before its last call of the model."""

    jiffy_snapshot: NotRequired[Annotated[str, PrivateStateAttr]]


class JiffyCheckpoints(AgentMiddleware[CheckpointState, Any, Any]):
    """Takes a snapshot before each call of the model.

    If a thread continues from an earlier checkpoint of LangGraph, the sandbox is rolled back to its
    state at that checkpoint. A sandbox belongs to one thread.

    :param backend: Backend of the agent.
    :param retained: Maximum number of snapshots. The oldest ones are deleted.
    """

    state_schema = CheckpointState

    def __init__(self, backend: JiffySandbox, *, retained: int = 100) -> None:
        super().__init__()
        if retained < 1:
            raise ValueError(f"retained must be at least 1, not {retained}")
        self._sandbox = backend.sandbox
        self._prefix = f"step-{backend.id}-"
        self._retained = retained
        # Snapshots by name, oldest first, also of an earlier process.
        listed = [(name, item) for item in jiffy.Snapshot.list(sandbox_id=backend.id) for name in item.names]
        self._snapshots = {name: item for name, item in reversed(listed) if name.startswith(self._prefix)}
        # Snapshot that the present state of the sandbox descends from.
        self._present = next((item.snapshot_id for item in reversed(self._snapshots.values())), None)
        self._lock = threading.Lock()

    def before_model(self, state: CheckpointState, runtime: Any) -> dict[str, str]:
        # Messages that were passed as tuples have no id.
        step = [(message.type, message.id or message.content) for message in state["messages"]]
        name = self._prefix + hashlib.sha256(repr(step).encode()).hexdigest()[:16]
        with self._lock:
            snapshot = self._snapshots.get(name)
            if snapshot is not None:
                self._align(snapshot.snapshot_id)
            elif state.get("jiffy_snapshot") == self._present:
                snapshot = self._sandbox.snapshot(name, ack="captured")
                self._snapshots[name] = snapshot
                self._present = snapshot.snapshot_id
                self._delete_oldest()
            else:
                raise self._lost_step()
            return {"jiffy_snapshot": snapshot.snapshot_id}

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        self.rollback(request.state.get("jiffy_snapshot"))
        return handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        await asyncio.to_thread(self.rollback, request.state.get("jiffy_snapshot"))
        return await handler(request)

    def rollback(self, snapshot_id: str | None) -> None:
        """Rolls the sandbox back to the snapshot of a step, unless the step is the present one."""
        with self._lock:
            self._align(snapshot_id)

    def delete_snapshots(self) -> None:
        """Deletes all snapshots. Earlier steps of the thread can no longer be restored."""
        with self._lock:
            for snapshot in self._snapshots.values():
                # A snapshot that is being stored cannot be deleted. It may be deleted already.
                with suppress(SnapshotNotFoundError):
                    while snapshot.refresh().status == "storing":
                        time.sleep(0.02)
                    snapshot.delete()
            self._snapshots.clear()

    def _align(self, snapshot_id: str | None) -> None:
        if snapshot_id is None or snapshot_id == self._present:
            return
        try:
            self._sandbox.rollback(snapshot_id)
        except SnapshotNotFoundError as error:
            raise self._lost_step() from error
        self._present = snapshot_id

    def _lost_step(self) -> jiffy.NotFoundException:
        return jiffy.NotFoundException(
            f"cannot roll sandbox {self._sandbox.sandbox_id} back to a step of this thread: its snapshot was deleted "
            f"(increase `retained`, which is {self._retained}), or the sandbox belongs to another thread"
        )

    def _delete_oldest(self) -> None:
        while len(self._snapshots) > self._retained:
            name, oldest = next(iter(self._snapshots.items()))
            try:
                oldest.delete()
            except InUseError:
                # The snapshot is still being stored. A later step deletes it.
                return
            del self._snapshots[name]

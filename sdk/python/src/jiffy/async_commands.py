"""Commands that end when their caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from e2b.sandbox_async.commands.command import Commands
from e2b.sandbox_async.commands.command_handle import AsyncCommandHandle

# Maximum time in seconds to kill the command of a cancelled caller.
KILL_SECONDS = 10


async def _kill(handle: AsyncCommandHandle[Any]) -> None:
    try:
        await asyncio.wait_for(handle.kill(), KILL_SECONDS)
    except Exception:
        logging.getLogger("jiffy").warning("cannot kill command %s", handle.pid, exc_info=True)


class AsyncCommands(Commands):
    """Commands of an asynchronous sandbox. Cancelling `run` kills the command."""

    async def run(self, cmd: str, background: bool | None = None, *args: Any, **options: Any) -> Any:
        """Runs a command, as in `e2b`. The command is killed if the call is cancelled."""
        handle: Any = await super().run(cmd, True, *args, **options)
        if background:
            return handle
        try:
            return await handle.wait()
        except asyncio.CancelledError:
            await asyncio.shield(_kill(handle))
            raise

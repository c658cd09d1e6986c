"""Imports of registry images, from which sandboxes are created."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Generator
from typing import Any

from e2b.connection_config import ConnectionConfig
from e2b.exceptions import BuildException, InvalidArgumentException

from jiffy import calls
from jiffy.transport import Call, send, send_async

ImageLog = Callable[[str], None]
"""Receives the lines of the log of an import."""

# Interval between requests for the state of an import, in seconds.
POLL_SECONDS = 0.2


def template_of(image: str) -> str:
    """Returns the name of the template of an image. `jiffy create --image` uses the same name."""
    last = re.sub(r"[^a-z0-9._-]", "-", image.rsplit("/", 1)[-1])[:40]
    return f"img-{last}-{hashlib.sha256(image.encode()).hexdigest()[:8]}"


def check_source(template: str | None, image: str | None) -> None:
    """Checks that at most one of them is given.

    :raises InvalidArgumentException: If both are given.
    """
    if template is not None and image is not None:
        raise InvalidArgumentException("pass either template or image")


def _import(image: str, on_log: ImageLog | None) -> Generator[Call[Any] | None, Any, None]:
    """Yields the calls of an import and receives their results. `None` is a pause between calls."""
    name = template_of(image)
    template, build = yield calls.request_build(name)
    yield calls.start_import(template, build, image)
    lines = 0
    while True:
        status = yield calls.build_status(template, build, lines)
        lines += len(status["logs"])
        if on_log:
            for line in status["logs"]:
                on_log(line.rstrip("\n"))
        if status["status"] == "ready":
            return
        if status["status"] == "error":
            reason = (status.get("reason") or {}).get("message") or "the import failed without a reason"
            # An earlier import remains usable, for example without a connection to the registry.
            if not (yield calls.has_template(name)):
                raise BuildException(f"cannot import image {image}: {reason}")
            return
        yield None


def import_image(config: ConnectionConfig, image: str, on_log: ImageLog | None) -> str:
    """Imports an image unless it is unchanged since its last import, and returns its template."""
    steps = _import(image, on_log)
    result: Any = None
    try:
        while True:
            call = steps.send(result)
            if call is None:
                time.sleep(POLL_SECONDS)
            result = None if call is None else send(config, call)
    except StopIteration:
        return template_of(image)


async def import_image_async(config: ConnectionConfig, image: str, on_log: ImageLog | None) -> str:
    """Imports an image unless it is unchanged since its last import, and returns its template."""
    steps = _import(image, on_log)
    result: Any = None
    try:
        while True:
            call = steps.send(result)
            if call is None:
                await asyncio.sleep(POLL_SECONDS)
            result = None if call is None else await send_async(config, call)
    except StopIteration:
        return template_of(image)

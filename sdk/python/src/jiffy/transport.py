"""Sends calls to the control plane, and repeats them where that is safe."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import pyqwest
from e2b.api import client_async, client_sync, proxy_to_config
from e2b.connection_config import ConnectionConfig
from e2b.exceptions import AuthenticationException, InvalidArgumentException, format_request_timeout_error

from jiffy.errors import UnreachableError, api_error, retry_after

T = TypeVar("T")

# Failures of a request: timeouts, lost connections, and invalid headers. The calls share the
# connections of `e2b`, but not its HTTP client, which costs 0.3 ms per call.
_FAILURES = (
    OSError,
    ValueError,
    pyqwest.ReadError,
    pyqwest.RemoteProtocolError,
    pyqwest.StreamError,
    pyqwest.WriteError,
)
# Statuses of a rejected request, which the daemon has not executed.
_REJECTED = {429, 503}
# Statuses after which the request may have been executed.
_UNCERTAIN = {502, 504}
_FIRST_DELAY = 0.1
_MAX_DELAY = 10.0


@dataclass(frozen=True)
class Reply:
    """Successful response."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        """Returns the parsed body."""
        return json.loads(self.content)


@dataclass(frozen=True)
class Call(Generic[T]):
    """Call of the control plane."""

    method: str
    path: str
    parse: Callable[[Reply], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    # True if the call may be repeated although the daemon may have executed it.
    repeatable: bool = True
    # Time in seconds for which the daemon may delay the response, in addition to the timeout.
    waits: float = 0
    # Statuses that are results instead of errors.
    accepts: Container[int] = ()

    def timeout(self, config: ConnectionConfig) -> float | None:
        """Returns the maximum time of a request in seconds."""
        return None if config.request_timeout is None else config.request_timeout + self.waits

    def request(self, config: ConnectionConfig) -> dict[str, Any]:
        """Returns the arguments of the HTTP client."""
        if not config.api_key:
            raise AuthenticationException("API key is required: set JIFFY_API_KEY, or pass api_key=")
        headers = {**(config.headers or {}), "X-API-KEY": config.api_key, **self.headers}
        query = {name: str(value) for name, value in self.query.items() if value is not None}
        content = self.content
        if self.body is not None:
            content = json.dumps(self.body).encode()
            headers["Content-Type"] = "application/json"
        return {
            "method": self.method,
            "url": config.api_url.rstrip("/") + self.path,
            "params": query or None,
            "headers": headers,
            "content": content,
        }

    def result(self, response: pyqwest.FullResponse) -> T:
        """Parses a response, or raises its error."""
        reply = Reply(response.status, cast(Mapping[str, str], response.headers), response.content)
        if reply.status >= 400 and reply.status not in self.accepts:
            raise api_error(reply.status, reply.content, reply.headers)
        return self.parse(reply)

    def delay_after(self, response: pyqwest.FullResponse, attempt: int) -> float | None:
        """Returns the time to wait before a retry. `None` if the call must not be repeated."""
        status = response.status
        if status < 400 or status in self.accepts:
            return None
        headers = cast(Mapping[str, str], response.headers)
        marked = headers.get("should-retry", "").strip().lower()
        if marked == "false":
            return None
        if status in _UNCERTAIN:
            allowed = self.repeatable
        else:
            allowed = status in _REJECTED or (marked == "true" and self.repeatable)
        if not allowed:
            return None
        wait = retry_after(headers)
        return wait if wait is not None else backoff(attempt)


def backoff(attempt: int) -> float:
    """Returns the time before a retry without `Retry-After`."""
    return min(_FIRST_DELAY * float(2**attempt), _MAX_DELAY) * random.uniform(0.5, 1)


class _Retries(Generic[T]):
    """Decides whether a call is repeated: at most `config.retries` times, and before its deadline."""

    def __init__(self, config: ConnectionConfig, call: Call[T]) -> None:
        self._config, self._call, self._done = config, call, 0
        self._deadline = time.monotonic() + (config.request_timeout or 60)

    def _may_wait(self, delay: float) -> bool:
        is_last = self._done >= self._config.retries
        self._done += 1
        return not is_last and time.monotonic() + delay < self._deadline

    def delay_after(self, response: pyqwest.FullResponse) -> float | None:
        """Returns the time before a retry. `None` if `response` is the result of the call."""
        delay = self._call.delay_after(response, self._done)
        return delay if delay is not None and self._may_wait(delay) else None

    def delay_after_failure(self, error: Exception) -> float:
        """Returns the time before a retry after a request without a response.

        :raises SandboxException: If the call is not repeated.
        """
        if isinstance(error, TimeoutError):
            raise format_request_timeout_error() from None
        if isinstance(error, ValueError):
            message = f"cannot send {self._call.method} {self._call.path}: {error}"
            raise InvalidArgumentException(message) from error
        # `e2b` has already repeated attempts to connect.
        may_repeat = self._call.repeatable and not isinstance(error, ConnectionError)
        delay = backoff(self._done)
        if may_repeat and self._may_wait(delay):
            return delay
        reason = error or type(error).__name__
        raise UnreachableError(f"no response of the daemon at {self._config.api_url}: {reason}") from error


def send(config: ConnectionConfig, call: Call[T]) -> T:
    """Sends a call and returns its result."""
    retries, request, timeout = _Retries(config, call), call.request(config), call.timeout(config)
    transport = client_sync.get_pyqwest_transport(proxy_to_config(config.proxy), http_version=config.http_version)
    client = pyqwest.SyncClient(transport)
    while True:
        try:
            response = client.execute(**request, timeout=timeout)
        except _FAILURES as error:
            delay = retries.delay_after_failure(error)
        else:
            wait = retries.delay_after(response)
            if wait is None:
                return call.result(response)
            delay = wait
        time.sleep(delay)


async def send_async(config: ConnectionConfig, call: Call[T]) -> T:
    """Sends a call and returns its result."""
    retries, request, timeout = _Retries(config, call), call.request(config), call.timeout(config)
    transport = client_async.get_pyqwest_transport(proxy_to_config(config.proxy), http_version=config.http_version)
    client = pyqwest.Client(transport)
    while True:
        try:
            response = await asyncio.wait_for(client.execute(**request), timeout)
        except _FAILURES as error:
            delay = retries.delay_after_failure(error)
        else:
            wait = retries.delay_after(response)
            if wait is None:
                return call.result(response)
            delay = wait
        await asyncio.sleep(delay)

"""Errors of the API. `jiffy.error_codes` has one class per `error_code`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxUnreachableException,
    ServiceBusyException,
)


class ApiError(Exception):
    """Error response of the daemon. Each subclass also derives from an exception of `e2b`."""

    code: str = ""
    """`error_code` of the class."""

    status_code: Any = 0
    """HTTP status of the response."""

    def __init__(
        self,
        message: str,
        *,
        status_code: int = 0,
        error_code: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.status_code = status_code
        self.error_code = error_code or self.code or None
        """`error_code` of the response."""
        self.request_id = request_id
        """Id of the request, which the daemon's log also has."""
        self.retry_after = retry_after
        """Time in seconds before a retry, if the response has one."""

    def __str__(self) -> str:
        return f"{self.status_code}: {self.message}"


class UnauthorizedError(ApiError, AuthenticationException):
    """Response 401 with an unknown `error_code`."""


class InvalidError(ApiError, InvalidArgumentException):
    """Response 400 or 422 with an unknown `error_code`."""


class MissingError(ApiError, NotFoundException):
    """Response 404 with an unknown `error_code`."""


class TooManyRequestsError(ApiError, RateLimitException):
    """Response 429 with an unknown `error_code`."""


class BusyError(ApiError, ServiceBusyException):
    """Response 503 with an unknown `error_code`."""


class NoSpaceError(ApiError, NotEnoughSpaceException):
    """Response 507 with an unknown `error_code`."""


class OtherError(ApiError, SandboxException):
    """Response with another status and an unknown `error_code`."""


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: InvalidError,
    401: UnauthorizedError,
    404: MissingError,
    422: InvalidError,
    429: TooManyRequestsError,
    503: BusyError,
    507: NoSpaceError,
}


class NoDaemonError(SandboxException):
    """No address is configured, and no daemon runs on this host."""


class UnreachableError(SandboxUnreachableException):
    """The daemon cannot be reached, or the connection ended before the response.

    A call that changes state may have been executed, unless it is repeatable.
    """


class AllFailedError(SandboxException):
    """No function of `try_each` succeeded, or `keep` selected none. `outcomes` has the results."""

    def __init__(self, message: str, outcomes: list[Any]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the value of `Retry-After` in seconds. `None` if it is absent or not a number."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def api_error(status: int, content: bytes, headers: Mapping[str, str]) -> ApiError:
    """Returns the error of a response."""
    from jiffy.error_codes import CLASSES

    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {}
    code = body.get("error_code")
    message = body.get("message") or content.decode(errors="replace")[:500] or "no message"
    kind = CLASSES.get(str(code)) or _BY_STATUS.get(status, OtherError)
    return kind(
        str(message),
        status_code=status,
        error_code=str(code) if code else None,
        request_id=headers.get("x-request-id"),
        retry_after=retry_after(headers),
    )

"""Streams to TCP ports of a guest."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from e2b.connection_config import ConnectionConfig

from jiffy.errors import UnreachableError, api_error

# Maximum size of the head of a response.
_MAX_HEAD = 64 << 10


class _Target(NamedTuple):
    host: str
    port: int
    tls: ssl.SSLContext | None
    request: bytes


def _target(config: ConnectionConfig, sandbox_id: str, port: int) -> _Target:
    url = urlsplit(config.api_url)
    tls = None
    if url.scheme == "https":
        tls = ssl.create_default_context()
        if authorities := os.environ.get("JIFFY_CA"):
            tls.load_verify_locations(authorities)
    host = url.hostname or "localhost"
    lines = [
        f"GET {url.path.rstrip('/')}/sandboxes/{quote(sandbox_id, safe='')}/ports/{port} HTTP/1.1",
        f"Host: {url.netloc}",
        f"X-API-KEY: {config.api_key or ''}",
        "Connection: Upgrade",
        "Upgrade: tcp",
    ]
    return _Target(host, url.port or (443 if tls else 80), tls, ("\r\n".join(lines) + "\r\n\r\n").encode())


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        status = int(first.split(" ")[1])
    except (IndexError, ValueError):
        raise UnreachableError(f"the daemon sent no HTTP response: {first[:100]!r}") from None
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


def open_port(config: ConnectionConfig, sandbox_id: str, port: int) -> socket.socket:
    """Returns a socket that is connected to a port of the sandbox, also on its loopback interface."""
    target = _target(config, sandbox_id, port)
    try:
        connection = socket.create_connection((target.host, target.port), timeout=config.request_timeout)
    except OSError as error:
        raise UnreachableError(f"no response of the daemon at {config.api_url}: {error}") from error
    try:
        if target.tls:
            connection = target.tls.wrap_socket(connection, server_hostname=target.host)
        connection.sendall(target.request)
        head = b""
        # The stream starts after the head: a larger read would consume its first bytes.
        while not head.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            if not byte or len(head) > _MAX_HEAD:
                raise UnreachableError("the connection ended before the response of the daemon")
            head += byte
        status, headers = _parse_head(head)
        if status != 101:
            length = int(headers.get("content-length", "0"))
            with connection.makefile("rb") as body:
                raise api_error(status, body.read(min(length, _MAX_HEAD)), headers)
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


async def open_port_async(
    config: ConnectionConfig, sandbox_id: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns streams that are connected to a port of the sandbox."""
    target = _target(config, sandbox_id, port)
    opening = asyncio.open_connection(target.host, target.port, ssl=target.tls)
    try:
        reader, writer = await asyncio.wait_for(opening, config.request_timeout)
    except OSError as error:
        raise UnreachableError(f"no response of the daemon at {config.api_url}: {error}") from error
    try:
        writer.write(target.request)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), config.request_timeout)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise UnreachableError("the connection ended before the response of the daemon") from error
        status, headers = _parse_head(head)
        if status != 101:
            length = int(headers.get("content-length", "0"))
            raise api_error(status, await reader.read(min(length, _MAX_HEAD)), headers)
        return reader, writer
    except BaseException:
        writer.close()
        raise

"""Relay between clients outside of the sandbox and Chromium's DevTools.

Chromium accepts only requests whose Host is an IP address or `localhost`, which prevents DNS rebinding by web pages. Its responses
contain addresses with that Host. Requests through the gateway have the sandbox's name as Host. The relay therefore sends
`127.0.0.1` to Chromium and replaces the address in responses by the client's. The protection remains: the relay accepts another
Host only together with the sandbox's id in a header, which the gateway sets and web pages do not know. `Origin` is forwarded;
Chromium checks it.

The browser's first page is a part of the template's memory, so that its process has the same random state in all sandboxes. The
relay replaces the page and its process before the first request if the page was created in another sandbox.
"""

import asyncio
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

GENERATION = "/run/jiffy/generation"
# Maximum bytes of the head of a request or response.
HEAD = 64 * 1024
# Maximum bytes of a response that is rewritten: lists of pages.
LIST = 16 * 1024 * 1024
CHUNK = 64 * 1024
# Seconds to wait for a browser that is starting.
CONNECT_TIMEOUT = 10


class RelayError(Exception):
    """Error response for a client: status and reason."""


@dataclass
class Head:
    """First line and headers, in order."""

    first: str
    fields: list[tuple[str, str]]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> "Head | None":
        """Reads a head. Returns `None` if the connection was closed before a complete head."""
        try:
            text = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            raise RelayError("431 Request Header Fields Too Large") from None
        first, *lines = text.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        fields = [line.partition(":") for line in lines]
        return cls(first, [(name.strip(), value.strip()) for name, _, value in fields])

    def get(self, name: str) -> str:
        return next((value for field, value in self.fields if field.lower() == name), "")

    def set(self, name: str, value: str) -> None:
        self.fields = [field for field in self.fields if field[0].lower() != name.lower()]
        self.fields.append((name, value))

    def bytes(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.fields), "", ""]
        return "\r\n".join(lines).encode("latin-1")


def generation() -> str:
    """Returns the sandbox's id and generation number. Each clone has other values."""
    try:
        with open(GENERATION) as file:
            return file.read()
    except OSError:
        return ""


def is_local(host: str) -> bool:
    """Returns whether Chromium accepts this host: an IP address or `localhost`."""
    name = re.sub(r":\d+$", "", host).strip("[]")
    if name in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def address(request: Head) -> tuple[bool, str]:
    """Returns whether the client uses TLS, and the host and path prefix in the client's URL."""
    host = request.get("host")
    if re.search(r"[^\w.:\[\]-]", host):
        raise RelayError("400 Bad Request")
    sandbox_id = generation().split(" ")[0]
    through_gateway = sandbox_id != "" and request.get("e2b-sandbox-id") == sandbox_id
    if not through_gateway and not is_local(host):
        raise RelayError("403 Forbidden")
    prefix = request.get("x-forwarded-prefix") if through_gateway else ""
    tls = through_gateway and request.get("x-forwarded-proto") == "https"
    return tls, host + prefix.rstrip("/")


def readdressed(body: bytes, inner: str, tls: bool, outer: str) -> bytes:
    """Replaces the inner address in a response of DevTools by the client's."""
    scheme = "wss" if tls else "ws"
    # WebSocket URLs have the form `ws://HOST/devtools/...`. Links to the DevTools page have the
    # form `?ws=HOST/devtools/...`.
    body = body.replace(f"ws://{inner}/".encode(), f"{scheme}://{outer}/".encode())
    return body.replace(f"?ws={inner}/".encode(), f"?{scheme}={outer}/".encode())


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except (ConnectionError, OSError):
        writer.close()


class Relay:
    """Relays connections of clients to the DevTools at `port` of the loopback device."""

    def __init__(self, port: int, renew: Callable[[], Awaitable[None]]) -> None:
        self.port = port
        # Called before each request.
        self.renew = renew
        self.inner = f"127.0.0.1:{port}"
        self.lock = asyncio.Lock()
        self.browser_started()

    def browser_started(self) -> None:
        """Records the sandbox in which the browser's first page was created."""
        self.first_page_generation: str | None = generation()

    async def replace_first_page(self) -> None:
        """Replaces the browser's first page, once, if it was created in another sandbox."""
        async with self.lock:
            if self.first_page_generation not in (None, generation()):
                pages = json.loads(await self.call("GET", "/json/list"))
                await self.call("PUT", "/json/new?about:blank")
                for page in pages:
                    await self.call("GET", f"/json/close/{page['id']}")
            self.first_page_generation = None

    async def call(self, method: str, path: str) -> bytes:
        """Sends a request to DevTools and returns the body of the response."""
        reader, to = await self.connect()
        try:
            fields = [("Host", self.inner), ("Content-Length", "0"), ("Connection", "close")]
            to.write(Head(f"{method} {path} HTTP/1.1", fields).bytes())
            answer = await Head.read(reader)
            if answer is None or " 200 " not in answer.first:
                raise RelayError("502 Bad Gateway")
            return await body_of(answer, reader)
        finally:
            to.close()

    async def is_open(self) -> bool:
        """Returns whether a process listens at the port."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(CONNECT_TIMEOUT * 10):
            try:
                return await asyncio.open_connection("127.0.0.1", self.port, limit=HEAD)
            except OSError:
                await asyncio.sleep(0.1)
        raise RelayError("502 Bad Gateway")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one request or one WebSocket."""
        try:
            request = await Head.read(reader)
            if request is not None:
                await self.exchange(request, reader, writer)
        except RelayError as error:
            answer = f"HTTP/1.1 {error}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(answer.encode())
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def exchange(self, request: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls, outer = address(request)
        await self.renew()
        # `/json/version` is the readiness check of the template's build; it does not use the page.
        if "/json/version" not in request.first:
            await self.replace_first_page()
        browser_reader, to = await self.connect()
        try:
            request.set("Host", self.inner)
            websocket = request.get("upgrade").lower() == "websocket"
            if not websocket:
                request.set("Connection", "close")
            to.write(request.bytes())
            if websocket:
                await asyncio.gather(copy(reader, to), copy(browser_reader, writer))
                return
            # HTTP requests to DevTools have no body.
            answer = await Head.read(browser_reader)
            if answer is None:
                raise RelayError("502 Bad Gateway")
            body = readdressed(await body_of(answer, browser_reader), self.inner, tls, outer)
            answer.set("Content-Length", str(len(body)))
            answer.set("Connection", "close")
            writer.write(answer.bytes() + body)
            await writer.drain()
        finally:
            to.close()


async def body_of(answer: Head, reader: asyncio.StreamReader) -> bytes:
    length = answer.get("content-length")
    if not length.isdigit() or int(length) > LIST:
        raise RelayError("502 Bad Gateway")
    return await reader.readexactly(int(length))

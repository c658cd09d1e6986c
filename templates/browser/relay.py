"""Lets clients from outside reach Chromium's DevTools.

Chromium answers only requests whose Host is an address or `localhost`, so that no page can reach it under a name of its own; and it
tells clients addresses that begin with that Host. Through the gateway, Host is the sandbox's name. So the relay speaks to Chromium as
`127.0.0.1`, and puts the address by which the client came into what comes back. The protection stays: a foreign Host is let pass only
with the sandbox's id beside it, which the gateway writes and no page knows. `Origin` is handed on, and judged by Chromium.

The page that a browser begins with is in the memory that all sandboxes of the template begin with, and would draw the same random numbers
in each. So it is replaced, and its process with it, when the first client comes and the sandbox is another than the page was made in.
"""

import asyncio
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

GENERATION = "/run/jiffy/generation"
# Bytes of a request's or an answer's head, and of an answer that is rewritten: lists of pages.
HEAD = 64 * 1024
LIST = 16 * 1024 * 1024
CHUNK = 64 * 1024
# Seconds that a browser which is just starting is waited for.
PATIENCE = 10


class Refused(Exception):
    """Status and reason for a client."""


@dataclass
class Head:
    """First line and headers, in order."""

    first: str
    fields: list[tuple[str, str]]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> "Head | None":
        """None if the other side had nothing (more) to say."""
        try:
            text = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            raise Refused("431 Request Header Fields Too Large") from None
        first, *lines = text.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        fields = [line.partition(":") for line in lines]
        return cls(first, [(name.strip(), value.strip()) for name, _, value in fields])

    def get(self, name: str) -> str:
        return next((value for known, value in self.fields if known.lower() == name), "")

    def set(self, name: str, value: str) -> None:
        self.fields = [field for field in self.fields if field[0].lower() != name.lower()]
        self.fields.append((name, value))

    def bytes(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.fields), "", ""]
        return "\r\n".join(lines).encode("latin-1")


def generation() -> str:
    """The sandbox's id and a number that no copy of it has."""
    try:
        with open(GENERATION) as file:
            return file.read()
    except OSError:
        return ""


def is_here(host: str) -> bool:
    """Whether Chromium itself would answer under this name."""
    name = re.sub(r":\d+$", "", host).strip("[]")
    if name in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def address(request: Head) -> tuple[bool, str]:
    """Whether the client came over TLS, and under which host and path it found this."""
    host = request.get("host")
    if re.search(r"[^\w.:\[\]-]", host):
        raise Refused("400 Bad Request")
    known = generation().split(" ")[0]
    through_gateway = known != "" and request.get("e2b-sandbox-id") == known
    if not through_gateway and not is_here(host):
        raise Refused("403 Forbidden")
    prefix = request.get("x-forwarded-prefix") if through_gateway else ""
    tls = through_gateway and request.get("x-forwarded-proto") == "https"
    return tls, host + prefix.rstrip("/")


def readdressed(body: bytes, inner: str, tls: bool, outer: str) -> bytes:
    """An answer of DevTools with the client's address in place of the inner one."""
    scheme = "wss" if tls else "ws"
    # `ws://HOST/devtools/...` to connect to, and `?ws=HOST/devtools/...` in links to the DevTools'
    # own page.
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
    """Connections from clients to the DevTools at a port of the loopback device."""

    def __init__(self, port: int, renew: Callable[[], Awaitable[None]]) -> None:
        self.port = port
        # Called before each request.
        self.renew = renew
        self.inner = f"127.0.0.1:{port}"
        self.turn = asyncio.Lock()
        self.begin()

    def begin(self) -> None:
        """A browser begins, with a page that no client has seen."""
        self.made_in: str | None = generation()

    async def own_page(self) -> None:
        """Sees to it, before the first client comes, that the page is not one that other sandboxes have, too."""
        async with self.turn:
            if self.made_in not in (None, generation()):
                pages = json.loads(await self.ask("GET", "/json/list"))
                await self.ask("PUT", "/json/new?about:blank")
                for page in pages:
                    await self.ask("GET", f"/json/close/{page['id']}")
            self.made_in = None

    async def ask(self, method: str, path: str) -> bytes:
        """Asks DevTools."""
        there, to = await self.connect()
        try:
            fields = [("Host", self.inner), ("Content-Length", "0"), ("Connection", "close")]
            to.write(Head(f"{method} {path} HTTP/1.1", fields).bytes())
            answer = await Head.read(there)
            if answer is None or " 200 " not in answer.first:
                raise Refused("502 Bad Gateway")
            return await body_of(answer, there)
        finally:
            to.close()

    async def is_open(self) -> bool:
        """Tells if anything listens at the port."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(PATIENCE * 10):
            try:
                return await asyncio.open_connection("127.0.0.1", self.port, limit=HEAD)
            except OSError:
                await asyncio.sleep(0.1)
        raise Refused("502 Bad Gateway")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, or one WebSocket."""
        try:
            request = await Head.read(reader)
            if request is not None:
                await self.exchange(request, reader, writer)
        except Refused as refused:
            answer = f"HTTP/1.1 {refused}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            writer.write(answer.encode())
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def exchange(self, request: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls, outer = address(request)
        await self.renew()
        # Whether it is there is asked by whoever makes the template, too.
        if "/json/version" not in request.first:
            await self.own_page()
        there, to = await self.connect()
        try:
            request.set("Host", self.inner)
            websocket = request.get("upgrade").lower() == "websocket"
            if not websocket:
                request.set("Connection", "close")
            to.write(request.bytes())
            if websocket:
                await asyncio.gather(copy(reader, to), copy(there, writer))
                return
            # None of its requests has a body.
            answer = await Head.read(there)
            if answer is None:
                raise Refused("502 Bad Gateway")
            body = readdressed(await body_of(answer, there), self.inner, tls, outer)
            answer.set("Content-Length", str(len(body)))
            answer.set("Connection", "close")
            writer.write(answer.bytes() + body)
            await writer.drain()
        finally:
            to.close()


async def body_of(answer: Head, reader: asyncio.StreamReader) -> bytes:
    length = answer.get("content-length")
    if not length.isdigit() or int(length) > LIST:
        raise Refused("502 Bad Gateway")
    return await reader.readexactly(int(length))

"""Invalid input gets an error message or a closed connection, never a 500, and does not affect other clients."""

import asyncio
import json
import time
import uuid

import httpx
import pytest

LIMIT = 20


@pytest.fixture
async def raw(url):
    """Sends raw bytes. Returns all bytes received until the peer closes the connection or is silent."""
    address = httpx.URL(url)
    open_ones = []

    class Raw:
        async def connect(self):
            stream = await asyncio.open_connection(address.host, address.port)
            open_ones.append(stream[1])
            return stream

        async def exchange(self, data, end=False, limit=LIMIT):
            """Sends `data`, and half-closes the connection if `end`. Returns the response."""
            reader, writer = await self.connect()
            writer.write(data)
            if end:
                writer.write_eof()
            got = b""
            try:
                async with asyncio.timeout(limit):
                    while piece := await reader.read(65536):
                        got += piece
                        if answered(got):
                            break
            except (TimeoutError, ConnectionResetError, BrokenPipeError):
                pass
            return got

    yield Raw()
    for writer in open_ones:
        writer.close()


def answered(data):
    """Returns whether `data` is a complete response with a known length."""
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and len(body) >= int(lengths[0])


def status(data):
    assert data.startswith(b"HTTP/1.1 "), f"no answer: {data[:200]!r}"
    return int(data.split()[1])


@pytest.fixture(scope="session")
async def made(web, url, api_key):
    """One sandbox for all tests of this file."""
    answer = await web.post(f"{url}/sandboxes", headers={"X-API-KEY": api_key}, json={"templateID": "base", "timeout": 600})
    assert answer.status_code == 201, answer.text
    yield answer.json()
    await web.delete(f"{url}/sandboxes/{answer.json()['sandboxID']}", headers={"X-API-KEY": api_key})


@pytest.fixture(autouse=True)
async def daemon_and_sandbox_still_respond(web, url, api_key, made):
    """Checks after each test that the daemon and the sandbox still respond."""
    yield
    began = time.monotonic()
    answer = await web.get(f"{url}/sandboxes/{made['sandboxID']}", headers={"X-API-KEY": api_key})
    assert answer.status_code == 200 and answer.json()["state"] == "running"
    routed = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983"}
    assert (await web.get(f"{url}/health", headers=routed)).status_code == 204
    assert time.monotonic() - began < 5


CREATE = "/v2/sandboxes"
CALLS = [
    ("POST", CREATE),
    ("POST", "/sandboxes/{id}/timeout"),
    ("POST", "/sandboxes/{id}/connect"),
    ("POST", "/sandboxes/{id}/fork"),
    ("POST", "/sandboxes/{id}/snapshots"),
    ("POST", "/sandboxes/{id}/rollback"),
    ("PUT", "/sandboxes/{id}/network"),
]


def is_error(answer, *statuses):
    assert answer.status_code in statuses, f"{answer.status_code}: {answer.text[:300]}"
    body = answer.json()
    assert answer.headers["content-type"].startswith("application/json")
    assert body["code"] == answer.status_code
    assert body["message"]


@pytest.mark.parametrize(("method", "path"), CALLS)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"not json", b"null", b"[]", b'"text"', b"\xff\xfe", b'{"templateID":', b"[" * 100_000, b'{"a":' * 50_000, b"1e999999"],
    ids=["empty", "open", "words", "null", "list", "string", "no utf-8", "cut", "deep lists", "deep objects", "huge number"],
)
async def test_bodies_that_are_not_json_objects_are_rejected(web, url, api_key, made, method, path, body):
    if body in (b"", b"null") and path.endswith(("connect", "fork", "snapshots")):
        return  # the body may be omitted: it has no required field
    headers = {"X-API-KEY": api_key, "Content-Type": "application/json"}
    is_error(await web.request(method, url + path.format(id=made["sandboxID"]), headers=headers, content=body), 400, 413, 415, 422)


@pytest.mark.parametrize(
    "change",
    [
        {"templateID": 7}, {"templateID": None}, {"templateID": ""}, {"templateID": "../../etc"}, {"templateID": "a" * 100_000},
        {"templateID": "base\u0000"}, {"timeout": "60"}, {"timeout": 1.5}, {"timeout": 10**30}, {"timeout": -1.0}, {"metadata": []},
        {"metadata": {"a": 1}}, {"metadata": {str(n): "x" for n in range(100_000)}}, {"envVars": {"A": None}}, {"envVars": {"": "x"}},
        {"envVars": {"A\u0000": "x"}}, {"envVars": {"A": "\u0000"}}, {"envVars": "A=b"}, {"network": 1}, {"network": {"allowOut": "x"}},
        {"network": {"denyOut": ["1.2.3.4/99"]}}, {"network": {"maskRequestHost": "a\r\nb: c"}}, {"autoPause": "yes"},
        {"autoResume": True}, {"allow_internet_access": "no"},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
async def test_wrong_types_and_invalid_values_are_rejected(web, url, api_key, change):
    body = {"templateID": "base", "timeout": 30} | change
    answer = await web.post(url + CREATE, headers={"X-API-KEY": api_key}, json=body)
    if answer.status_code == 201:
        await web.delete(f"{url}/sandboxes/{answer.json()['sandboxID']}", headers={"X-API-KEY": api_key})
    is_error(answer, 400, 404, 413, 422)


@pytest.mark.parametrize(
    "sandbox",
    ["..", "%2e%2e", "a%00b", "a/b", "%2fetc%2fpasswd", "A" * 5000, "i'; drop table sandboxes; --", "ü", "-", "💥", "%ff"],
)
@pytest.mark.parametrize("call", ["", "/pause", "/connect", "/metrics"])
async def test_malformed_ids_are_not_found(raw, api_key, sandbox, call):
    path = f"/sandboxes/{sandbox}{call}".replace(" ", "%20")
    method = {"": "GET", "/metrics": "GET"}.get(call, "POST")
    request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-API-KEY: {api_key}\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{{}}"
    assert status(await raw.exchange(request.encode())) in (400, 404, 405, 414, 431)


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=x", "limit=99999999999999999999", "nextToken=%00", "nextToken=x", "state=gone", "order=up", "startedAfter=yesterday", "metadata=%ff"])
async def test_invalid_queries_are_rejected(web, url, api_key, query):
    is_error(await web.get(f"{url}/v2/sandboxes?{query}", headers={"X-API-KEY": api_key}), 400, 422)


async def test_bodies_above_the_limit_are_rejected(web, url, api_key):
    body = json.dumps({"templateID": "base", "metadata": {"x": "y" * 64_000_000}}).encode()
    try:
        answer = await web.post(url + CREATE, headers={"X-API-KEY": api_key, "Content-Type": "application/json"}, content=body)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        return  # the server closed the connection during the request, which is acceptable
    is_error(answer, 413)


async def test_an_endless_body_is_cut_off(raw, api_key):
    head = f"POST {CREATE} HTTP/1.1\r\nHost: localhost\r\nX-API-KEY: {api_key}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await raw.connect()
    writer.write(head.encode())
    sent = 0
    try:
        async with asyncio.timeout(LIMIT):
            while sent < 256 << 20:
                writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                await writer.drain()
                sent += 65536
    except (ConnectionResetError, BrokenPipeError, TimeoutError):
        pass
    assert sent < 256 << 20, "256 MB were taken"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n\tb\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: aaaa\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: aaaa\r\nE2b-Sandbox-Id: bbbb\r\nE2b-Sandbox-Port: 80\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: aaaa\r\nE2b-Sandbox-Port: 70000\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nE2b-Sandbox-Id: ../x\r\nE2b-Sandbox-Port: 80\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n",
        b"GET http://example.com/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"\r\n" * 100_000,
    ],
    ids=[
        "length and chunked", "two lengths", "two encodings", "unknown encoding", "signed length", "negative length", "two hosts",
        "no host", "host with a blank", "blank before the colon", "folded header", "header with a zero byte", "id without port",
        "two ids", "port too large", "id with a path", "connect", "another's url", "tls on plain", "ssh", "long path", "many headers",
        "http 9.9", "only line ends",
    ],
)
async def test_ambiguous_requests_are_rejected(raw, request_bytes):
    got = await raw.exchange(request_bytes, limit=LIMIT)
    assert not got or 400 <= status(got) < 500, got[:300]
    assert got.count(b"HTTP/1.1 ") <= 1, f"one request, two answers: {got[:600]!r}"


async def test_a_request_smuggled_in_a_body_is_not_answered(raw, made, api_key):
    hidden = f"DELETE /sandboxes/{made['sandboxID']} HTTP/1.1\r\nHost: localhost\r\nX-API-KEY: {api_key}\r\n\r\n"
    for head in (
        f"POST {CREATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(hidden)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"POST {CREATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: {len(hidden)}\r\n\r\n",
        f"POST {CREATE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: \x0bchunked\r\nContent-Length: {len(hidden)}\r\n\r\n",
    ):
        got = await raw.exchange((head + hidden).encode(), end=True)
        assert got.count(b"HTTP/1.1 ") <= 1
        assert not got or 400 <= status(got) < 500


async def test_slow_request_heads_are_cut_off_and_delay_no_other_client(raw, web, url):
    slow = [await raw.connect() for _ in range(50)]
    for _, writer in slow:
        writer.write(b"GET / HTTP/1.1\r\nHost: loc")
    began = time.monotonic()
    assert (await web.get(f"{url}/health")).status_code == 200
    assert time.monotonic() - began < 2

    async def drip(reader, writer):
        """Sends one byte per second until the server closes the connection."""
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            try:
                writer.write(b"a")
                await writer.drain()
            except (ConnectionResetError, BrokenPipeError):
                break
            await asyncio.wait([ended], timeout=1)
        ended.cancel()

    await asyncio.wait_for(asyncio.gather(*(drip(*stream) for stream in slow)), 40)


async def test_a_client_that_half_closes_its_connection_receives_the_response(raw, api_key):
    request = f"GET /v2/sandboxes HTTP/1.1\r\nHost: localhost\r\nX-API-KEY: {api_key}\r\n\r\n"
    assert status(await raw.exchange(request.encode(), end=True)) == 200


async def test_an_interrupted_body_affects_no_other_request(raw, api_key, web, url):
    for promised in (10, 100_000):
        request = f"POST {CREATE} HTTP/1.1\r\nHost: localhost\r\nX-API-KEY: {api_key}\r\nContent-Type: application/json\r\nContent-Length: {promised}\r\n\r\n{{"
        got = await raw.exchange(request.encode(), end=True)
        assert not got or 400 <= status(got) < 500
    assert (await web.get(f"{url}/health")).status_code == 200


async def test_a_disconnected_stream_leaves_its_process_running(raw, made, web, url):
    routed = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983", "X-Access-Token": made.get("envdAccessToken", "")}
    marker = uuid.uuid4().hex
    payload = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", f"echo up; sleep 1000 # {marker}"]}, "stdin": False}).encode()
    # A message of the Connect protocol: flags, length, JSON.
    frame = b"\0" + len(payload).to_bytes(4, "big") + payload
    head = "POST /process.Process/Start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in routed.items()) + f"Content-Length: {len(frame)}\r\n\r\n"
    for _ in range(20):
        reader, writer = await raw.connect()
        writer.write(head.encode() + frame)
        assert b'"start"' in await asyncio.wait_for(reader.readuntil(b'"start"'), LIMIT)
        writer.transport.abort()
    listed = await web.post(f"{url}/process.Process/List", headers=routed | {"Content-Type": "application/json"}, json={})
    mine = [process for process in listed.json()["processes"] if marker in process["config"]["args"][-1]]
    assert len(mine) == 20
    for process in mine:
        signal = {"process": {"pid": process["pid"]}, "signal": "SIGNAL_SIGKILL"}
        assert (await web.post(f"{url}/process.Process/SendSignal", headers=routed, json=signal)).status_code == 200


@pytest.mark.parametrize(
    "frame",
    [b"\0\xff\xff\xff\xff", b"\0\0\0\0\x05hello", b"\x01\0\0\0\x02{}", b"\0\0\0\0\x02{}" * 3, b"\xff" * 100, b""],
    ids=["endless frame", "no json", "compressed", "too many frames", "noise", "nothing"],
)
async def test_invalid_frames_are_rejected_with_a_protocol_error(web, url, made, frame):
    headers = {
        "E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": "49983", "X-Access-Token": made.get("envdAccessToken", ""),
        "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1",
    }
    answer = await web.post(f"{url}/process.Process/Start", headers=headers, content=frame)
    assert answer.status_code < 500
    if answer.status_code == 200:
        assert b'"error"' in answer.content and b"exitCode" not in answer.content


async def test_unknown_methods_and_paths_are_rejected_with_a_message(web, url, api_key):
    headers = {"X-API-KEY": api_key}
    is_error(await web.get(f"{url}/no/such/path", headers=headers), 404)
    is_error(await web.request("PATCH", f"{url}/v2/sandboxes", headers=headers), 405)
    is_error(await web.request("BREW", f"{url}/v2/sandboxes", headers=headers), 405)


async def test_requests_without_a_key_receive_no_information(web, url, made):
    for method, path in [*CALLS, ("GET", "/v2/sandboxes"), ("GET", "/sandboxes/{id}"), ("DELETE", "/sandboxes/{id}"), ("GET", "/snapshots"), ("GET", "/templates")]:
        real = await web.request(method, url + path.format(id=made["sandboxID"]), json={})
        missing = await web.request(method, url + path.format(id="i0000000000000000000"), json={})
        is_error(real, 401)
        assert real.json() == missing.json(), path

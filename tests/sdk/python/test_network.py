"""Egress and ingress rules are reported, enforced and changed; servers in the guest are reachable
from outside."""

import asyncio

import httpx
import pytest
from e2b import SandboxException

# Server that answers GET with the path and the host name, and POST with the reversed body.
SERVER = """exec python3 -uc '
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (self.path + " " + self.headers["Host"]).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        size = int(self.headers["Content-Length"]); body = self.rfile.read(size)
        self.send_response(201); self.send_header("Content-Length", str(size)); self.end_headers(); self.wfile.write(body[::-1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
print("serving"); server.serve_forever()'"""


async def serve(sdk, sandbox):
    server = await sdk.start(sandbox, SERVER, timeout=0)
    await server.wait_for_output("serving")


def routed(sandbox, port=8080):
    """Returns the headers that select a port of a sandbox."""
    return {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}


async def test_rules_are_stored_returned_and_replaced_as_a_whole(sdk, create):
    network = {"allow_out": ["8.8.8.0/24", "example.com", "*.example.org"], "deny_out": ["0.0.0.0/0"], "mask_request_host": "localhost:${PORT}"}
    sandbox = await create(network=network, allow_internet_access=True)
    info = (await sdk(sandbox.get_info)).network
    assert info["allow_out"] == network["allow_out"]
    assert info["deny_out"] == network["deny_out"]
    assert info["mask_request_host"] == network["mask_request_host"]
    await sdk(sandbox.update_network, {"deny_out": ["192.0.2.0/24"]})
    info = (await sdk(sandbox.get_info)).network
    assert info["deny_out"] == ["192.0.2.0/24"]
    assert not info.get("allow_out")
    await sdk(sandbox.update_network, {"allow_internet_access": False})
    assert (await sdk(sandbox.get_info)).allow_internet_access is False


async def test_allowing_a_name_server_permits_it(sdk, create):
    # As in the documentation of the package.
    network = {"allow_out": ["api.example.com"], "deny_out": ["0.0.0.0/0"], "dns_servers": ["1.1.1.1"]}
    sandbox = await create(network=network)
    info = (await sdk(sandbox.get_info)).network
    assert info["dns_servers"] == ["1.1.1.1"]


async def test_a_name_cannot_be_denied_only_an_address(sdk, create):
    sandbox = await create()
    with pytest.raises(SandboxException) as refusal:
        await sdk(sandbox.update_network, {"deny_out": ["example.com"]})
    assert refusal.value.status_code == 400
    with pytest.raises(SandboxException):
        await sdk(sandbox.update_network, {"allow_out": ["bad name!"]})


async def test_a_server_in_the_guest_is_reached_by_headers_host_name_and_path(sdk, create, web, url):
    sandbox = await create()
    await serve(sdk, sandbox)
    by_headers = await web.get(f"{url}/some/path?q=1&r=%2F", headers=routed(sandbox))
    assert by_headers.text.split()[0] == "/some/path?q=1&r=%2F"
    host = sandbox.get_host(8080)
    assert host.startswith(f"8080-{sandbox.sandbox_id}.")
    by_host = await web.get(f"{url}/some/path", headers={"Host": host})
    assert by_host.status_code == 200 and by_host.text.split()[0] == "/some/path"
    by_path = await web.get(f"{url}/sandboxes/{sandbox.sandbox_id}/proxy/8080/some/path?q=1")
    assert by_path.status_code == 200 and by_path.text.split()[0] == "/some/path?q=1"


async def test_a_megabyte_is_transferred_to_a_server_and_back(sdk, create, web, url):
    sandbox = await create()
    await serve(sdk, sandbox)
    body = bytes(range(256)) * 4096
    answer = await web.post(url, content=body, headers=routed(sandbox))
    assert answer.status_code == 201
    assert answer.content == body[::-1]


async def test_a_hundred_requests_at_once_reach_a_server(sdk, create, web, url):
    sandbox = await create()
    await serve(sdk, sandbox)
    answers = await asyncio.gather(*(web.get(f"{url}/{n}", headers=routed(sandbox)) for n in range(100)))
    assert [answer.text.split()[0] for answer in answers] == [f"/{n}" for n in range(100)]


async def test_closed_ports_and_unknown_sandboxes_are_reported(sdk, create, web, url):
    sandbox = await create()
    closed = await web.get(url, headers=routed(sandbox, 9))
    assert closed.status_code == 502
    assert "port is not open" in closed.json()["message"]
    await sdk(sandbox.kill)
    dead = await web.get(url, headers=routed(sandbox))
    assert dead.status_code == 502
    assert "was not found" in dead.json()["message"] and dead.json()["sandboxId"] == sandbox.sandbox_id


async def test_a_restricted_sandbox_requires_its_token(sdk, create, web, url):
    sandbox = await create(network={"allow_public_traffic": False})
    await serve(sdk, sandbox)
    assert sandbox.traffic_access_token
    for headers in ({}, {"E2B-Traffic-Access-Token": "wrong"}):
        refused = await web.get(url, headers={**routed(sandbox), **headers})
        assert refused.status_code == 403
    token = {"E2B-Traffic-Access-Token": sandbox.traffic_access_token}
    assert (await web.get(f"{url}/x", headers={**routed(sandbox), **token})).text.split()[0] == "/x"
    assert (await sdk(sandbox.commands.run, "echo the client needs none")).stdout == "the client needs none\n"


async def test_the_host_name_sent_to_a_server_can_be_changed(sdk, create, web, url):
    sandbox = await create(network={"mask_request_host": "app.local:${PORT}"})
    await serve(sdk, sandbox)
    answer = await web.get(f"{url}/x", headers=routed(sandbox))
    assert answer.text == "/x app.local:8080"


async def test_a_server_with_tls_is_reached_at_an_https_port(sdk, create, web, url, api_key):
    sandbox = await create(network={"https_ports": [8443]})
    assert (await sdk(sandbox.get_info)).network["https_ports"] == [8443]
    certificate = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=x -days 1 -keyout /tmp/key -out /tmp/certificate"
    await sdk(sandbox.commands.run, certificate)
    code = SERVER.replace("8080", "8443").replace("print(", """import ssl
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); tls.load_cert_chain("/tmp/certificate", "/tmp/key")
server.socket = tls.wrap_socket(server.socket, server_side=True)
print(""")
    server = await sdk.start(sandbox, code, timeout=0)
    await server.wait_for_output("serving")
    for path in ("/one", "/two"):
        answer = await web.get(url + path, headers=routed(sandbox, 8443))
        assert answer.status_code == 200 and answer.text.split()[0] == path
    # Without the option, the server receives plain HTTP, which it rejects.
    settings = f"{url}/sandboxes/{sandbox.sandbox_id}/network"
    change = await web.patch(settings, json={"httpsPorts": []}, headers={"X-API-KEY": api_key})
    assert change.status_code == 204
    assert (await web.get(url, headers=routed(sandbox, 8443))).status_code == 502


async def test_clients_cannot_reach_host_only_paths_of_the_agent(sdk, create, web, url):
    sandbox = await create()
    for path in ("/init", "/%69nit", "//init", "/x/../init"):
        answer = await web.post(url + path, headers=routed(sandbox, 49983), json={})
        assert answer.status_code in (403, 404), path
    assert (await sdk(sandbox.commands.run, "echo unharmed")).stdout == "unharmed\n"


async def test_the_agent_requires_the_token_of_its_sandbox(sdk, create, web, url):
    sandbox, other = await create(), await create()
    body = {"path": "/etc/hostname"}
    for headers in ({}, {"X-Access-Token": "wrong"}, {"X-Access-Token": other._envd_access_token}):
        answer = await web.post(f"{url}/filesystem.Filesystem/Stat", headers={**routed(sandbox, 49983), **headers}, json=body)
        assert answer.status_code == 401, headers
    right = {"X-Access-Token": sandbox._envd_access_token}
    answer = await web.post(f"{url}/filesystem.Filesystem/Stat", headers={**routed(sandbox, 49983), **right}, json=body)
    assert answer.status_code == 200 and answer.json()["entry"]["name"] == "hostname"


async def test_a_websocket_passes_through(sdk, create, url):
    sandbox = await create()
    echo = await sdk.start(
        sandbox,
        """exec python3 -uc '
import socket
s = socket.create_server(("127.0.0.1", 8081)); print("serving"); c, _ = s.accept(); head = b""
while b"\\r\\n\\r\\n" not in head: head += c.recv(4096)
c.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n")
while data := c.recv(4096): c.sendall(data.upper())
'""",
        timeout=0,
    )
    await echo.wait_for_output("serving")
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(
        f"GET /chat HTTP/1.1\r\nHost: {address.host}\r\nE2b-Sandbox-Id: {sandbox.sandbox_id}\r\nE2b-Sandbox-Port: 8081\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 101 ")
    for word in (b"frames", b"pass", b"\x00\x01"):
        writer.write(word)
        assert await asyncio.wait_for(reader.readexactly(len(word)), 10) == word.upper()
    writer.close()
    await writer.wait_closed()

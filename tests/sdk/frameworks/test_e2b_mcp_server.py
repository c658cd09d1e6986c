"""`e2b-mcp-server`, unmodified. Its version of `e2b` only accepts a domain, and connects with TLS."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

JIFFY = Path(os.environ["JIFFY_BIN_DIR"]) / "jiffy"
DOMAIN = "sandboxes.test"
# Address of the name server. The port of name servers is fixed.
NAME_SERVER = "127.0.0.153"


@pytest.fixture
def names(tmp_path):
    """A name server that answers each question with 127.0.0.1. Returns a `resolv.conf`."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to resolve names of the domain")
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((NAME_SERVER, 53))

    def answer():
        while (received := server.recvfrom(512))[0]:
            # A DNS message has a header of 12 bytes, and a question: name, zero byte, type, class.
            query, client = received
            end = query.index(b"\0", 12) + 5
            question = query[12:end]
            is_address = question[-4:-2] == b"\0\1"
            # The name refers to the name of the question. Type A, class IN, time to live 0, address
            # of 4 bytes.
            record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton("127.0.0.1")
            header = query[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_address else b"\0\0") + b"\0\0\0\0"
            server.sendto(header + question + record * is_address, client)

    thread = threading.Thread(target=answer)
    thread.start()
    path = tmp_path / "resolv.conf"
    path.write_text(f"nameserver {NAME_SERVER}\n")
    yield path
    # An empty message ends the thread.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"", (NAME_SERVER, 53))
    thread.join()
    server.close()


@pytest.fixture
def daemon():
    """A daemon with TLS. Returns its port and its data directory."""
    shared = Path(os.environ["JIFFY_SDK_HOME"])
    with tempfile.TemporaryDirectory(prefix="jiffy-tls.") as place:
        for directory in ("templates", "images"):
            (Path(place) / directory).mkdir()
            for entry in (shared / directory).iterdir():
                (Path(place) / directory / entry.name).symlink_to(entry.resolve())
        for entry in ("kernel", "disks"):
            (Path(place) / entry).symlink_to((shared / entry).resolve())
        environment = os.environ | {"JIFFY_HOME": place}
        command = [JIFFY, "serve", "--listen", "127.0.0.1:0", "--domain", DOMAIN, "--tls"]
        with (Path(place) / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        line = next(line for line in process.stdout if line.startswith("listening on "))
        yield int(line.split()[2].rsplit(":", 1)[1]), Path(place)
        subprocess.run([JIFFY, "serve", "--stop", "--kill-sandboxes"], env=environment, check=True, timeout=60)
        process.wait(60)
        process.stdout.close()


async def test_its_tool_runs_code_in_a_sandbox(names, daemon):
    port, home = daemon
    # The package has no command of its own.
    program = f"{sys.executable} -c 'import e2b_mcp_server; e2b_mcp_server.main()'"
    server = StdioServerParameters(
        command="unshare",
        args=["--mount", "sh", "-c", f"mount --bind {names} /etc/resolv.conf && exec {program}"],
        env={
            "PATH": os.environ["PATH"], "E2B_DOMAIN": f"{DOMAIN}:{port}", "E2B_API_KEY": (home / "api-key").read_text().strip(),
            "SSL_CERT_FILE": str(home / "tls/authority.pem"),
        },
    )
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        assert [tool.name for tool in (await session.list_tools()).tools] == ["run_code"]
        result = await session.call_tool("run_code", {"code": "import os\nprint(6 * 7, os.uname().nodename)"})
    assert not result.isError, result.content
    output = "".join(json.loads(result.content[0].text)["stdout"])
    assert output.startswith("42 ")

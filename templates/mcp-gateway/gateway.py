"""The MCP gateway that E2B's clients start: `mcp-gateway --config JSON` runs MCP servers and publishes their tools at port 50005.

The command returns when all servers answer, and leaves the gateway running. Clients need the token of the variable GATEWAY_ACCESS_TOKEN,
which is also in `/etc/mcp-gateway/.token`. The keys of the configuration are names of `servers.json`, or `github/OWNER/REPOSITORY`.
"""

import argparse
import asyncio
import contextlib
import hmac
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PORT = 50005
STATE = "/etc/mcp-gateway"
TOKEN = f"{STATE}/.token"
PID = "/run/mcp-gateway.pid"
LOG = "/var/log/mcp-gateway.log"
REPOSITORIES = "/opt/mcp-servers"
# Seconds that a server may take to start. npx and uvx download its package first.
START_TIMEOUT = 300
# Bytes of the log that an error message contains. Clients remove the sandbox after an error.
LOG_IN_ERRORS = 2000
# Seconds that an earlier gateway may take to exit.
STOP_TIMEOUT = 10
REPOSITORY = re.compile(r"github/([A-Za-z0-9_.-]+)/([A-Za-z0-9_.-]+)(?:/.*)?")


class GatewayError(Exception):
    """Error message for the user."""


def catalogue():
    with open(f"{HERE}/servers.json") as file:
        return json.load(file)


def package_command(entry):
    """Returns the command that runs the package of an entry of the catalogue."""
    if "npx" in entry:
        return ["npx", "--yes", entry["npx"]]
    # The programs of these packages have the name of the package.
    name = entry["uvx"].partition("==")[0]
    return ["uvx", "--from", entry["uvx"], name]


def text(value):
    return value if isinstance(value, str) else json.dumps(value)


def catalogue_server(name, entry, options):
    """Returns a server of the catalogue. `options` are the fields of its configuration."""
    words = [*package_command(entry), *entry.get("args", [])]
    for field, before in entry.get("each", {}).items():
        values = options.get(field, [])
        if not isinstance(values, list):
            raise GatewayError(f"`{field}` of the server `{name}` must be a list")
        for value in values:
            words += [*before, text(value)]
    env = {variable: text(options[field]) for variable, field in entry.get("env", {}).items() if field in options}
    return {"name": name, "command": words, "env": env, "cwd": "/"}


def github_server(name, options):
    """Returns a server in a GitHub repository, which is cloned and installed."""
    match = REPOSITORY.fullmatch(name)
    run = options.get("runCmd") or options.get("run_cmd")
    if not match or not run:
        raise GatewayError(f"the server `{name}` needs the form github/OWNER/REPOSITORY and the field `runCmd`")
    owner, repository = match.groups()
    place = f"{REPOSITORIES}/{owner}/{repository}"
    env = {key: text(value) for key, value in (options.get("envs") or {}).items()}
    if not os.path.isdir(place):
        url = f"https://github.com/{owner}/{repository}"
        run_step(["git", "clone", "--quiet", "--depth", "1", url, place], "/", {})
    install = options.get("installCmd") or options.get("install_cmd")
    if install:
        run_step(["bash", "-c", install], place, env)
    return {"name": name, "command": ["bash", "-c", run], "env": env, "cwd": place}


def run_step(words, directory, env):
    done = subprocess.run(words, cwd=directory, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise GatewayError(f"{shlex.join(words)} failed with status {done.returncode}: {done.stderr[-2000:]}")


def servers(config):
    """Returns the servers of a configuration."""
    if not isinstance(config, dict):
        raise GatewayError("the configuration must be an object of servers")
    known, found = catalogue(), []
    for name, options in config.items():
        options = options or {}
        if not isinstance(options, dict):
            raise GatewayError(f"the configuration of the server `{name}` must be an object")
        if name in known:
            found.append(catalogue_server(name, known[name], options))
        elif name.startswith("github/"):
            found.append(github_server(name, options))
        else:
            raise GatewayError(f"the server `{name}` is unknown: use {', '.join(known)}, or github/OWNER/REPOSITORY with `runCmd`")
    return found


def write_private(path, content):
    """Replaces a file that only root can read."""
    new = f"{path}.new"
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    os.replace(new, path)


def stop_earlier():
    """Terminates a gateway that is running."""
    try:
        with open(PID) as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/cmdline") as file:
            if "gateway.py" not in file.read():
                return
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    end = time.monotonic() + STOP_TIMEOUT
    while os.path.isdir(f"/proc/{pid}"):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def start(config):
    """Starts the gateway in the background, and waits until all servers answer."""
    chosen = servers(config)
    os.makedirs(STATE, mode=0o700, exist_ok=True)
    token = os.environ.get("GATEWAY_ACCESS_TOKEN") or secrets.token_hex(32)
    stop_earlier()
    write_private(TOKEN, token)
    environment = {key: value for key, value in os.environ.items() if key != "GATEWAY_ACCESS_TOKEN"}
    with open(LOG, "ab") as log:
        earlier = log.tell()
        gateway = subprocess.Popen(
            [sys.executable, "-s", os.path.abspath(__file__), "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/", env=environment, start_new_session=True,
        )
    gateway.stdin.write(json.dumps({"token": token, "servers": chosen}))
    gateway.stdin.close()
    answer = gateway.stdout.readline().strip()
    if answer != "ready":
        gateway.wait()
        raise GatewayError(f"{answer or 'the gateway has exited'}; {LOG}:\n{end_of_log(earlier)}")
    write_private(PID, str(gateway.pid))
    print(f"the gateway serves {len(chosen)} servers at port {PORT}")


def end_of_log(earlier):
    """Returns the end of the log, without its first `earlier` bytes."""
    with open(LOG, "rb") as log:
        length = log.seek(0, os.SEEK_END)
        log.seek(max(earlier, length - LOG_IN_ERRORS))
        return log.read().decode(errors="replace")


def pull(names):
    """Downloads the packages of servers, so that they start without a download."""
    known = catalogue()
    for name in names:
        if name not in known:
            raise GatewayError(f"the server `{name}` is unknown: use {', '.join(known)}")
        words = package_command(known[name])
        # Runs another program of the package's environment, which needs no configuration.
        if words[0] == "npx":
            words = ["npx", "--yes", "--package", words[2], "--", "true"]
        else:
            words = [*words[:3], "python", "-c", ""]
        run_step(words, "/", {})


class RequiresToken:
    """Rejects requests without the token."""

    def __init__(self, app, token):
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b"the token of the gateway is missing or wrong\n"})
                return
        await self.app(scope, receive, send)


async def connect(server, stack, gateway):
    """Starts a server, and adds its tools, resources and prompts to the gateway."""
    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy

    program, *arguments = server["command"]
    transport = StdioTransport(program, arguments, env={**os.environ, **server["env"]}, cwd=server["cwd"])
    client = Client(transport, init_timeout=START_TIMEOUT)
    try:
        async with asyncio.timeout(START_TIMEOUT):
            # The proxy of a connected client uses its session, so that each server runs once.
            await stack.enter_async_context(client)
            await client.list_tools()
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise GatewayError(f"the server `{server['name']}` did not start: {reason}") from error
    gateway.mount(create_proxy(client))


async def serve(token, chosen):
    import uvicorn
    from fastmcp import FastMCP

    gateway = FastMCP("mcp-gateway")
    async with contextlib.AsyncExitStack() as stack:
        for server in chosen:
            await connect(server, stack, gateway)
        # Clients use the host names of the sandbox, which the gateway of the host has checked.
        app = RequiresToken(gateway.http_app(path="/mcp", host_origin_protection=False), token)
        http = uvicorn.Server(uvicorn.Config(app, host="0.0.0.0", port=PORT, log_level="warning"))
        running = asyncio.create_task(http.serve())
        while not http.started:
            if running.done():
                raise GatewayError(f"the port {PORT} is in use")
            await asyncio.sleep(0.02)
        report("ready")
        await running


def report(line):
    """Reports to the command that started the gateway, and closes the pipe to it."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def run_gateway():
    request = json.load(sys.stdin)
    try:
        asyncio.run(serve(request["token"], request["servers"]))
    except GatewayError as error:
        report(" ".join(str(error).split()))
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(prog="mcp-gateway", description="Publishes the tools of MCP servers at port 50005.")
    parser.add_argument("--config", metavar="JSON", help="servers by name, with their options")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("pull", help="download the packages of servers").add_argument("servers", nargs="+")
    commands.add_parser("serve")
    given = parser.parse_args()
    if given.command == "serve":
        return run_gateway()
    if os.geteuid() != 0:
        parser.error("run the gateway as root")
    try:
        if given.command == "pull":
            pull(given.servers)
        elif given.config is not None:
            start(json.loads(given.config))
        else:
            parser.error("--config is missing")
    except ValueError:
        print("mcp-gateway: the configuration is not JSON", file=sys.stderr)
        return 1
    except GatewayError as error:
        print(f"mcp-gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

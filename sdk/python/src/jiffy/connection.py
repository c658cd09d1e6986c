"""Finds the daemon: options, `JIFFY_*`, `E2B_*`, the daemon of this host."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Unpack, cast

from e2b.connection_config import ApiParams, ConnectionConfig, merge_api_params

from jiffy.errors import NoDaemonError

# Maximum time to start the daemon, and to connect to its socket.
START_SECONDS = 60
SOCKET_SECONDS = 5
INSTALL = "set JIFFY_URL and JIFFY_API_KEY, or install the host programs: pip install 'jiffy-sandbox[host]'"


def _variable(name: str) -> str | None:
    return os.environ.get(name) or None


class Connected:
    """Base class of the resource classes. Selects the daemon of each call."""

    _bound_api_params: ApiParams = {}

    @classmethod
    def _resolve_api_params(cls, **opts: Unpack[ApiParams]) -> ApiParams:
        """Returns the connection options of a call with the address and the key of the daemon."""
        return address(merge_api_params(cls._bound_api_params, opts))

    @classmethod
    def _config(cls, **opts: Unpack[ApiParams]) -> ConnectionConfig:
        return ConnectionConfig(**cast(Any, cls._resolve_api_params(**opts)))


class Bound(Connected):
    """Base class of objects that belong to a daemon."""

    _params: Any = None

    def _bound_params(self) -> Any:
        return self._params or {}

    def _bound_config(self) -> ConnectionConfig:
        return self._config(**self._bound_params())


def address(params: ApiParams) -> ApiParams:
    """Adds the address and the API key of the daemon to `params`, unless they have an address."""
    merged: dict[str, Any] = dict(params)
    if merged.get("api_url"):
        merged.setdefault("sandbox_url", merged["api_url"])
    elif merged.get("domain") or merged.get("debug"):
        pass
    elif url := _variable("JIFFY_URL"):
        merged.update(api_url=url.rstrip("/"), sandbox_url=merged.get("sandbox_url") or url.rstrip("/"))
        merged["api_key"] = merged.get("api_key") or _variable("JIFFY_API_KEY") or _variable("E2B_API_KEY")
    elif url := _variable("E2B_API_URL"):
        merged.update(api_url=url, sandbox_url=merged.get("sandbox_url") or _variable("E2B_SANDBOX_URL") or url)
    elif not _variable("E2B_DOMAIN") and not _variable("E2B_DEBUG"):
        url, key = local_daemon()
        merged.update(api_url=url, sandbox_url=url, api_key=merged.get("api_key") or key)
    _trust_authority()
    return cast(ApiParams, merged)


def data_directory() -> Path:
    """Returns the data directory of the daemon of this host, as the program `jiffy` selects it."""
    if home := _variable("JIFFY_HOME"):
        return Path(home)
    if os.geteuid() == 0:
        return Path("/var/lib/jiffy")
    return Path(_variable("XDG_DATA_HOME") or Path.home() / ".local/share") / "jiffy"


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SOCKET_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SOCKET_SECONDS)
        self.sock.connect(str(self._path))


def _listen_address(home: Path) -> str | None:
    """Returns the address of the daemon. `None` if the daemon has only its socket.

    # Errors
    `OSError` if no daemon runs.
    """
    connection = _SocketConnection(home / "run/jiffy.sock")
    try:
        connection.request("GET", "/host")
        status = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    listen = status.get("jiffy", {}).get("listen")
    # A client cannot connect to the address that stands for all addresses.
    return str(listen).replace("://0.0.0.0", "://127.0.0.1").replace("://[::]", "://[::1]") if listen else None


def _host_program() -> str | None:
    beside = Path(sys.executable).with_name("jiffy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("jiffy")


def local_daemon() -> tuple[str, str]:
    """Returns address and API key of the daemon of this host. Starts the daemon if none runs.

    # Errors
    `NoDaemonError` if no daemon runs and the host programs are not installed.
    """
    home = data_directory()
    try:
        url = _listen_address(home)
    except OSError:
        program = _host_program()
        if program is None:
            raise NoDaemonError(f"no Jiffy daemon runs on this host: {INSTALL}") from None
        try:
            subprocess.run([program, "daemon", "start"], check=True, capture_output=True, timeout=START_SECONDS)
            url = _listen_address(home)
        except (OSError, subprocess.SubprocessError) as error:
            details = getattr(error, "stderr", None) or b""
            text = details.decode(errors="replace").strip() or str(error)
            raise NoDaemonError(f"cannot start the daemon with `{program} daemon start`: {text}") from error
    if url is None:
        raise NoDaemonError(f"the daemon of {home} has no address: start it with `jiffy daemon start`")
    try:
        return url, (home / "api-key").read_text().strip()
    except OSError as error:
        raise NoDaemonError(f"cannot read the API key of the daemon: {error}; set JIFFY_API_KEY") from error


_trusted: str | None = None


def _trust_authority() -> None:
    """Makes the clients of `e2b` trust the certificate authorities in `JIFFY_CA` too."""
    global _trusted
    path = _variable("JIFFY_CA")
    if path is None or path == _trusted:
        return
    from jiffy.trust import trust

    trust(Path(path).read_bytes())
    _trusted = path

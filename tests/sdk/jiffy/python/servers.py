"""Daemons and scripted servers of single tests."""

import os
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def scripted(*answers):
    """Runs a server with scripted answers, and yields its address and the received requests.

    An answer is `(status, headers, body)`, or `None` to close the connection without an answer. The
    last answer is repeated.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            names = {name.lower(): value for name, value in self.headers.items()}
            requests.append((self.command, self.path, names, body))
            answer = answers[min(len(requests), len(answers)) - 1]
            if answer is None:
                self.close_connection = True
                self.connection.close()
                return
            status, headers, body = answer
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = handle_any

        def log_message(self, *args):
            pass

        def finish(self):
            try:
                super().finish()
            except (OSError, ValueError):
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PROGRAM = Path(os.environ["JIFFY_BIN_DIR"]) / "jiffy"


def prepare(home: Path) -> None:
    """Prepares a data directory with the template base."""
    for name in ("templates", "images"):
        (home / name).mkdir(parents=True, exist_ok=True)
    real = Path(os.environ["JIFFY_SDK_HOME"])
    images = [f"images/{file.name}" for file in (real / "images").iterdir()]
    for name in ("kernel", "disks", "templates/base", *images):
        if not (home / name).exists():
            (home / name).symlink_to((real / name).resolve())


def install_program(directory: Path) -> None:
    """Writes a program `jiffy` that starts daemons at a free port instead of port 3000."""
    directory.mkdir()
    program = directory / "jiffy"
    program.write_text(f'#!/bin/sh\nexec "{PROGRAM}" "$@" --listen 127.0.0.1:0 --console off\n')
    program.chmod(0o755)


class Daemon:
    """A daemon of a single test, in its own data directory."""

    def __init__(self, home: Path, *options: str, listen="127.0.0.1:0") -> None:
        self.home = home
        prepare(home)
        self.log = (home / "daemon.log").open("ab")
        command = [PROGRAM, "serve", "--listen", listen, *options]
        environment = os.environ | {"JIFFY_HOME": str(home)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True)
        for line in self.process.stdout:
            if line.startswith("listening on "):
                self.url = line.split()[2]
                break
        else:
            raise AssertionError((home / "daemon.log").read_text())
        self.key = (home / "api-key").read_text().strip()

    def stop(self):
        self.process.terminate()
        self.process.communicate(timeout=30)
        self.log.close()

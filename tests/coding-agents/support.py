"""Projects with a session, and helpers for tests. `run` starts the daemon and sets the variables."""

import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

JIFFY = str(Path(os.environ["JIFFY_BIN_DIR"]) / "jiffy")


def tree(directory):
    """Type, permissions and content of each file below a directory."""
    files = {}
    for path in sorted(Path(directory).rglob("*")):
        mode = path.lstat().st_mode
        name = str(path.relative_to(directory))
        if stat.S_ISLNK(mode):
            files[name] = ("link", os.readlink(path))
        elif stat.S_ISDIR(mode):
            files[name] = ("directory", stat.S_IMODE(mode))
        else:
            files[name] = ("file", stat.S_IMODE(mode), path.read_bytes())
    return files


def eventually(condition, seconds=60):
    """Waits until a condition holds, and returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError("the condition does not hold")
        time.sleep(0.02)
    return value


class ProjectTest(unittest.TestCase):
    """Test with a project directory. The session is removed after the test."""

    def setUp(self):
        self.root = Path(tempfile.mkdtemp(prefix="project-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        self.outside = Path(tempfile.mkdtemp(prefix="outside-"))
        self.addCleanup(shutil.rmtree, self.outside, ignore_errors=True)
        self.addCleanup(self.jiffy, "agent-shell", "end")

    def write(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def start(self, *words, cwd=None, **options):
        """Starts a command of jiffy in the project directory."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([JIFFY, *words], cwd=cwd or self.root, **options)

    def jiffy(self, *words, cwd=None):
        """Runs a command of jiffy to its end."""
        process = self.start(*words, cwd=cwd)
        out, error = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out.decode(), error.decode())

    def run_command(self, command, *options, cwd=None):
        """Runs a shell command in the project's sandbox, as an agent does."""
        return self.jiffy("agent-shell", "exec", *options, "--", command, cwd=cwd)

    def ok(self, command, *options, cwd=None):
        """Runs a shell command that must succeed. Returns its output."""
        done = self.run_command(command, *options, cwd=cwd)
        self.assertEqual(done.returncode, 0, done)
        return done.stdout

    def history(self):
        """Returns the commands that can be undone, with their changes."""
        return json.loads(self.jiffy("history", "--json").stdout)

    def undo(self, *words):
        """Undoes commands. Returns the output."""
        done = self.jiffy("undo", *words)
        self.assertEqual(done.returncode, 0, done)
        return done.stdout

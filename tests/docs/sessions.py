"""Interpreters that preserve state between the blocks of a page."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Maximum time of one block, in seconds.
BLOCK_TIMEOUT = 120
# Reads names of files and runs each in this shell. Replies with the exit status, the directory and
# the first failed command. Writes the variables to a file next to the program.
SHELL = r"""
__requests=$1 __replies=$2
shift 2
set -E
while IFS= read -r -u "$__requests" __file; do
    __error=
    trap '__status=$?; __error=${__error:-"line $LINENO: $BASH_COMMAND: status $__status"}' ERR
    . "$__file" </dev/null
    __status=$?
    trap - ERR
    env -0 >"$__file.env"
    printf '%s\t%s\t%s\n' "$__status" "$PWD" "${__error//$'\n'/ }" >&"$__replies"
done
"""


class Session:
    """One interpreter. Its arguments are a descriptor from which it reads names of files, and one
    on which it answers each."""

    def __init__(self, arguments, directory, environment):
        self.scratch = Path(tempfile.mkdtemp(dir=directory, prefix=".session-"))
        self.output = self.scratch / "output"
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()

        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [*arguments, str(requests), str(replies)], cwd=directory, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(requests, replies), start_new_session=True,
            )
        os.close(requests)
        os.close(replies)
        self.count = 0

    def run(self, code, suffix):
        """Runs code. Returns the reply, or None if the interpreter exited or timed out, and the
        output."""
        self.count += 1
        file = self.scratch / f"{self.count}{suffix}"
        file.write_text(code + "\n")
        before = self.output.stat().st_size
        os.write(self.requests, f"{file}\n".encode())
        reply = self.reply()
        with open(self.output, "rb") as output:
            output.seek(before)
            return reply, output.read().decode(errors="replace")

    def reply(self):
        deadline, received = time.monotonic() + BLOCK_TIMEOUT, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0, deadline - time.monotonic())):
                    return None
                chunk = os.read(self.replies, 65536)
                if not chunk:
                    return None
                received += chunk
        return received.decode(errors="replace").rstrip("\n")

    def close(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        os.close(self.requests)
        os.close(self.replies)


class Sessions:
    """The interpreters of one page. The shell's directory and exported variables apply to Python
    and Node.js when their first block runs."""

    def __init__(self, directory, environment):
        self.directory = directory
        self.environment = environment
        self.sessions = {}

    def run(self, block, code):
        """Returns the error, or None, and the output of the block."""
        session = self.session(block.language)
        if block.language == "sh":
            return self.run_shell(session, block, code)
        reply, output = session.run(code, ".py" if block.language == "python" else ".js")
        if reply is None:
            return "the interpreter exited or timed out", output
        return json.loads(reply), output

    def run_shell(self, session, block, code):
        reply, output = session.run(code, ".sh")
        if reply is None:
            return "the shell exited or timed out", output
        status, directory, error = reply.split("\t", 2)
        self.directory = Path(directory)
        variables = (session.scratch / f"{session.count}.sh.env").read_bytes().split(b"\0")
        self.environment = dict(
            os.fsdecode(variable).split("=", 1) for variable in variables if b"=" in variable
        )
        if int(status) != block.exit_status:
            return error or f"the block exited with status {status}", output
        if error and not block.exit_status:
            return error, output
        return None, output

    def session(self, language):
        if language not in self.sessions:
            arguments = {
                "sh": ["bash", "--noprofile", "--norc", "-c", SHELL, "bash"],
                "python": [sys.executable, "-u", str(HERE / "python_session.py")],
                "javascript": ["node", str(HERE / "node_session.mjs")],
            }[language]
            self.sessions[language] = Session(arguments, self.directory, self.environment)
        return self.sessions[language]

    def close(self):
        for session in self.sessions.values():
            session.close()

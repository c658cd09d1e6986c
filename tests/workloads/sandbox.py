"""Controls sandboxes of a daemon with the command line."""

import os
import re
import subprocess
import threading

# Engine of new sandboxes.
engine = None

# Words in a kernel's log that indicate a problem.
PROBLEM = re.compile(
    r"\bBUG\b|WARNING: CPU|\bOops\b|general protection|Kernel panic|soft lockup|hard LOCKUP"
    r"|blocked for more than|rcu.*stall|EXT4-fs (error|warning)|I/O error|Call Trace|KASAN|UBSAN"
)


class Failed(Exception):
    """A command failed that must succeed, or a guarantee does not hold."""


def jiffy(*args, timeout=300, data=None):
    """Runs a command. Returns its exit status, output and errors."""
    command = [os.path.join(os.environ["JIFFY_BIN_DIR"], "jiffy"), *args]
    done = subprocess.run(
        command, capture_output=True, timeout=timeout, input=data, check=False,
        stdin=subprocess.DEVNULL if data is None else None,
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def jiffy_checked(*args, **options):
    """Runs a command that must succeed. Returns its output."""
    status, out, err = jiffy(*args, **options)
    if status != 0:
        arguments = " ".join(args)
        raise Failed(f"jiffy {arguments[:500]}: exit {status}\n{out[-6000:]}\n{err[-3000:]}")
    return out.rstrip("\n")


def kernel_problem(text):
    """Returns the first problem in a kernel's log with the surrounding lines, or `None`."""
    lines = text.splitlines()
    is_out_of_memory = False
    for number, line in enumerate(lines):
        # Programs may exhaust memory. The kernel then logs the stack of the allocating process,
        # which is not a problem of the kernel.
        if "invoked oom-killer" in line:
            is_out_of_memory = True
        elif "Call Trace" in line and is_out_of_memory:
            is_out_of_memory = False
        elif PROBLEM.search(line):
            return "\n".join(lines[max(0, number - 5) : number + 40])
    return None


# Existing sandboxes of this thread.
_thread = threading.local()


def sandboxes_of_thread():
    """Returns the existing sandboxes of this thread."""
    return list(getattr(_thread, "sandboxes", []))


class Sandbox:
    """A sandbox of the template `workloads`, or a copy of another sandbox."""

    def __init__(self, sandbox_id):
        self.id = sandbox_id
        _thread.sandboxes = [*sandboxes_of_thread(), self]

    @classmethod
    def create(cls, cpus=2, memory="1GiB"):
        size = ("--cpus", str(cpus), "--memory", memory)
        return cls(jiffy_checked("create", "--engine", engine, "--template", "workloads", *size))

    def run(self, script, user="root", timeout=300):
        """Runs a script. Returns its exit status and its output."""
        status, out, err = jiffy(
            "exec", "--user", user, "--timeout", f"{timeout}s", self.id, "--", "bash", "-c", script,
            timeout=timeout + 30,
        )
        return status, out + err

    def sh(self, script, user="root", timeout=300):
        """Runs a script that must succeed. Returns its output."""
        status, text = self.run(script, user, timeout)
        if status != 0:
            raise Failed(f"{script}\n: exit {status}\n{text[-8000:]}")
        return text.rstrip("\n")

    def put(self, local, remote):
        """Copies a file or directory of the host into the sandbox."""
        jiffy_checked("cp", "-r", local, f"{self.id}:{remote}")

    def snapshot(self):
        return jiffy_checked("snapshot", self.id)

    def rollback(self, snapshot):
        jiffy_checked("rollback", self.id, snapshot)

    def pause(self):
        jiffy_checked("pause", self.id)

    def resume(self):
        jiffy_checked("resume", self.id)

    def fork(self, count):
        return [Sandbox(line) for line in jiffy_checked("fork", self.id, "-n", str(count)).split()]

    def check_kernel(self):
        """Checks that the guest's kernel logged no problem."""
        text = jiffy_checked("logs", self.id)
        if engine == "microvm":
            text += "\n" + self.sh("dmesg")
        problem = kernel_problem(text)
        if problem:
            raise Failed(f"the guest's kernel logged a problem:\n{problem}")

    def remove(self):
        _thread.sandboxes = [other for other in sandboxes_of_thread() if other is not self]
        jiffy_checked("rm", self.id)

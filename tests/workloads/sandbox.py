"""Sandboxes of a daemon, by the command line that users type."""

import os
import re
import subprocess
import threading

# Engine of the sandboxes that are created.
engine = None

# Words by which a kernel says that something went wrong in it.
TROUBLE = re.compile(
    r"\bBUG\b|WARNING: CPU|\bOops\b|general protection|Kernel panic|soft lockup|hard LOCKUP"
    r"|blocked for more than|rcu.*stall|EXT4-fs (error|warning)|I/O error|Call Trace|KASAN|UBSAN"
)


class Failed(Exception):
    """A call that must succeed did not, or something is not as it was promised."""


def jiffy(*args, timeout=300, data=None):
    """Calls the command line; returns its exit status, output and errors."""
    command = [os.path.join(os.environ["JIFFY_BIN_DIR"], "jiffy"), *args]
    done = subprocess.run(
        command, capture_output=True, timeout=timeout, input=data, check=False,
        stdin=subprocess.DEVNULL if data is None else None,
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def ok(*args, **options):
    """What a call prints that must succeed."""
    status, out, err = jiffy(*args, **options)
    if status != 0:
        words = " ".join(args)
        raise Failed(f"jiffy {words[:500]}: exit {status}\n{out[-6000:]}\n{err[-3000:]}")
    return out.rstrip("\n")


def trouble(text):
    """The first trouble in a kernel's log, with the lines around it; none if there is none."""
    lines = text.splitlines()
    starved = False
    for number, line in enumerate(lines):
        # Memory that is used up is a program's doing. The kernel shows the stack of the one that
        # asked for more, which is no trouble of its own.
        if "invoked oom-killer" in line:
            starved = True
        elif "Call Trace" in line and starved:
            starved = False
        elif TROUBLE.search(line):
            return "\n".join(lines[max(0, number - 5) : number + 40])
    return None


# Sandboxes of this thread that are still there.
_here = threading.local()


def mine():
    """Sandboxes of this thread that are still there."""
    return list(getattr(_here, "all", []))


class Sandbox:
    """A sandbox of the template `workloads`, or one that came of another."""

    def __init__(self, identity):
        self.id = identity
        _here.all = [*mine(), self]

    @classmethod
    def create(cls, cpus=2, memory="1GiB"):
        size = ("--cpus", str(cpus), "--memory", memory)
        return cls(ok("create", "--engine", engine, "--template", "workloads", *size))

    def run(self, script, user="root", timeout=300):
        """Runs a script to its end; its exit status and all that it wrote."""
        status, out, err = jiffy(
            "exec", "--user", user, "--timeout", f"{timeout}s", self.id, "--", "bash", "-c", script,
            timeout=timeout + 30,
        )
        return status, out + err

    def sh(self, script, user="root", timeout=300):
        """What a script writes that must succeed."""
        status, text = self.run(script, user, timeout)
        if status != 0:
            raise Failed(f"{script}\n: exit {status}\n{text[-8000:]}")
        return text.rstrip("\n")

    def put(self, local, remote):
        ok("cp", "-r", local, f"{self.id}:{remote}")

    def snapshot(self):
        return ok("snapshot", self.id)

    def rollback(self, snapshot):
        ok("rollback", self.id, snapshot)

    def pause(self):
        ok("pause", self.id)

    def resume(self):
        ok("resume", self.id)

    def fork(self, count):
        return [Sandbox(line) for line in ok("fork", self.id, "-n", str(count)).split()]

    def check_kernel(self):
        """The guest's kernel has nothing to complain about."""
        text = ok("logs", self.id)
        if engine == "microvm":
            text += "\n" + self.sh("dmesg")
        told = trouble(text)
        if told:
            raise Failed(f"the guest's kernel tells of trouble:\n{told}")

    def remove(self):
        _here.all = [other for other in mine() if other is not self]
        ok("rm", self.id)

"""Cost of each operation, summed over a daemon and its descendants."""
import json, resource, subprocess, time

from daemon import Daemon
from perf import Counts

# Number of sequential operations. More do not improve the accuracy; with fewer, the number of spare
# processes created in the background affects the result.
NUMBER = 10
# The daemon creates spare processes and slots after answers.
# The daemon is idle if it makes fewer than QUIET_CALLS system calls in QUIET_SECONDS.
QUIET_SECONDS, QUIET_CALLS, LONGEST_WAIT = 0.06, 30, 3
# Number of programs over which `start_of_a_program` averages.
STARTS = 20


def start_of_a_program():
    """Returns the processor time of a fork and an exec in milliseconds, as a unit for this host: an
    operation also consists of page faults, copies and system calls."""
    def used():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    for _ in range(STARTS):
        subprocess.run(["/bin/true"], check=True)
    return (used() - before) / STARTS * 1000


class Steps:
    """Values by operation and kind of count, averaged over `NUMBER` operations."""

    def __init__(self, home, program):
        self.daemon = Daemon(home, program)
        self.pid = json.loads(self.daemon.jiffy("daemon", "status", "--json"))["pid"]
        self.calls = Counts(self.pid)
        self.figures = {}

    def close(self):
        self.daemon.stop()

    def measure(self):
        """Runs a warm-up round, a measured round, and a slower round that counts allocations."""
        for _ in ("warm-up", "measured"):
            self.figures = {}
            units = [start_of_a_program()]
            self.round(self.calls, units)
        unit = sum(units) / len(units)
        for name in [name for name in self.figures if name.endswith("processor time, ms")]:
            self.figures[name.replace("ms", "in starts of a program")] = round(self.figures[name] / unit, 2)
        self.round(Counts(self.pid, allocations=True), [])
        self.figures["start of a program: processor time, ms"] = round(unit, 3)
        return self.figures

    def step(self, counts, name, work, number=NUMBER):
        """Runs `work`, and stores the difference of all counts as values per operation. Returns
        the result."""
        before = self.settled(counts)
        done = work()
        after = self.settled(counts)
        for count in after:
            self.figures[f"{name}, each: {count}"] = round((after[count] - before[count]) / number, 1)
        return done

    def settled(self, counts):
        """Returns the counts after the daemon has become idle."""
        calls = lambda: self.calls.read().get("system calls", 0)
        end, before = time.monotonic() + LONGEST_WAIT, calls()
        while time.monotonic() < end:
            time.sleep(QUIET_SECONDS)
            now = calls()
            if now - before < QUIET_CALLS:
                break
            before = now
        return counts.read()

    def round(self, counts, units):
        """Runs each operation on `NUMBER` sandboxes."""
        def step(name, call):
            found = self.step(counts, name, lambda: [call(*one) for one in sandboxes])
            units.append(start_of_a_program())
            return found

        request = self.daemon.request
        sandboxes = self.step(counts, "create", lambda: [self.daemon.create("base") for _ in range(NUMBER)])
        step("exec", lambda *one: self.daemon.exec(one, "true"))
        snapshots = step("snapshot", lambda one, _: request("POST", f"/sandboxes/{one}/snapshots", {})["snapshotID"])
        taken = {one: snapshot for (one, _), snapshot in zip(sandboxes, snapshots)}
        step("rollback", lambda one, _: request("POST", f"/sandboxes/{one}/rollback", {"snapshotID": taken[one]}))
        step("pause", lambda one, _: request("POST", f"/sandboxes/{one}/pause", {}))
        step("resume", lambda one, _: request("POST", f"/sandboxes/{one}/resume", {"timeout": -1}))
        forked = self.step(counts, "fork", lambda: request("POST", f"/sandboxes/{sandboxes[0][0]}/fork", {"count": NUMBER}))
        for child in forked:
            request("DELETE", f"/sandboxes/{child['sandbox']['sandboxID']}")
        step("delete", lambda one, _: request("DELETE", f"/sandboxes/{one}"))
        for snapshot in snapshots:
            request("DELETE", f"/templates/{snapshot}")

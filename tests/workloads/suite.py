#!/usr/bin/env python3
"""Runs the workloads on one engine: suite.py ENGINE [--long] [NAME...]. Prints a line for each
workload and records totals in JIFFY_RESULTS."""

import os
import queue
import subprocess
import sys
import threading
import time
import traceback

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import containers
import languages
import postgres
import sandbox
import stress
from sandbox import Failed, sandboxes_of_thread

# Name, function, engines of every run, and engines of long runs only.
WORKLOADS = [
    ("postgresql", postgres.consistent, ["microvm"], ["gvisor"]),
    ("cpython", languages.cpython, ["microvm"], ["gvisor"]),
    ("go", languages.golang, ["microvm"], ["gvisor"]),
    ("docker", containers.docker, ["microvm", "gvisor"], []),
    ("podman", containers.podman, ["microvm", "gvisor"], []),
    ("bubblewrap", containers.bubblewrap, ["microvm", "gvisor"], []),
    ("stress-ng", stress.brief, ["microvm"], ["gvisor"]),
    ("stress-ng-classes", stress.classes, [], ["microvm"]),
]
# Workloads that run concurrently: they keep two processors busy.
CONCURRENCY = 2


def attempt(work, engine):
    """Runs a workload and removes its sandboxes. Returns the reason for a failure, or `None`."""
    reason = None
    try:
        work(engine)
    except (Failed, subprocess.TimeoutExpired) as error:
        reason = str(error)
    except Exception:  # pylint: disable=broad-except
        reason = traceback.format_exc()
    for left in sandboxes_of_thread():
        try:
            left.remove()
        except (Failed, subprocess.TimeoutExpired) as error:
            reason = reason or str(error)
    return reason


def main():
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    engine, names, long = arguments[0], arguments[1:], "--long" in sys.argv
    sandbox.engine = engine
    pending = queue.Queue()
    for name, work, always, long_only in WORKLOADS:
        if engine in always + (long_only if long else []) and (not names or name in names):
            pending.put((name, work))
    passed, failed = [], {}
    lock = threading.Lock()

    def run_pending():
        while True:
            try:
                name, work = pending.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            reason = attempt(work, engine)
            took = time.monotonic() - began
            with lock:
                print(f"   {'failed, repeated later' if reason else 'ok'}: workloads::{engine}::{name} ({took:.0f} s)", flush=True)
                if reason:
                    failed[name] = (work, reason)
                else:
                    passed.append(name)

    threads = [threading.Thread(target=run_pending) for _ in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A failed workload is repeated alone, because the host may be shared.
    for name, (work, reason) in list(failed.items()):
        print("\n".join(f"   first try | {line}" for line in reason.splitlines()[-60:]))
        began = time.monotonic()
        second_reason = attempt(work, engine)
        took = time.monotonic() - began
        if second_reason is None:
            del failed[name]
            passed.append(name)
            record("flaky", f"   flaky: workloads: {engine}::{name}\n")
        else:
            print(f"   FAILED: workloads::{engine}::{name} ({took:.0f} s)\n{second_reason}")
            record("failures", f"   FAILED: workloads::{engine}::{name}\n{second_reason[-3000:]}\n")
    record("totals", f"{len(passed)} {len(failed)} 0\n")
    print(f"   workloads on {engine}: {len(passed)} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)


def record(name, text):
    """Appends to a file of JIFFY_RESULTS (see scripts/lib)."""
    if os.environ.get("JIFFY_RESULTS"):
        with open(os.path.join(os.environ["JIFFY_RESULTS"], name), "a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()

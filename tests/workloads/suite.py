#!/usr/bin/env python3
"""Runs the workloads on one engine: suite.py ENGINE [--long] [NAME...]. Prints a line for each workload and records totals in JIFFY_RESULTS."""

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
from sandbox import Failed, mine

# Name, function, engines of every run, and engines of long runs only.
WORKLOADS = [
    ("postgresql", postgres.consistent, ["microvm", "gvisor"], []),
    ("cpython", languages.cpython, ["microvm"], ["gvisor"]),
    ("go", languages.golang, ["microvm"], ["gvisor"]),
    ("docker", containers.docker, ["microvm", "gvisor"], []),
    ("podman", containers.podman, ["microvm", "gvisor"], []),
    ("bubblewrap", containers.bubblewrap, ["microvm", "gvisor"], []),
    ("stress-ng", stress.brief, ["microvm"], ["gvisor"]),
    ("stress-ng-classes", stress.classes, [], ["microvm"]),
]
# Workloads that run concurrently: they keep two processors busy.
LANES = 2


def attempt(work, engine):
    """Runs a workload and removes its sandboxes. Returns the reason of a failure, or `None`."""
    why = None
    try:
        work(engine)
    except (Failed, subprocess.TimeoutExpired) as error:
        why = str(error)
    except Exception:  # pylint: disable=broad-except
        why = traceback.format_exc()
    for left in mine():
        try:
            left.remove()
        except (Failed, subprocess.TimeoutExpired) as error:
            why = why or str(error)
    return why


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    engine, names, long = words[0], words[1:], "--long" in sys.argv
    sandbox.engine = engine
    wanted = queue.Queue()
    for name, work, always, seldom in WORKLOADS:
        if engine in always + (seldom if long else []) and (not names or name in names):
            wanted.put((name, work))
    passed, failed = [], {}
    lock = threading.Lock()

    def lane():
        while True:
            try:
                name, work = wanted.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            why = attempt(work, engine)
            took = time.monotonic() - began
            with lock:
                print(f"   {'not at once' if why else 'ok'}: workloads::{engine}::{name} ({took:.0f} s)", flush=True)
                if why:
                    failed[name] = (work, why)
                else:
                    passed.append(name)

    lanes = [threading.Thread(target=lane) for _ in range(LANES)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    # A failed workload is repeated alone, because the host may be shared.
    for name, (work, why) in list(failed.items()):
        print("\n".join(f"   first try | {line}" for line in why.splitlines()[-60:]))
        began = time.monotonic()
        again = attempt(work, engine)
        took = time.monotonic() - began
        if again is None:
            del failed[name]
            passed.append(name)
            record("flaky", f"   flaky: workloads: {engine}::{name}\n")
        else:
            print(f"   FAILED: workloads::{engine}::{name} ({took:.0f} s)\n{again}")
            record("failures", f"   FAILED: workloads::{engine}::{name}\n{again[-3000:]}\n")
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

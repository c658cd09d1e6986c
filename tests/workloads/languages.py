"""Test suites of programming languages."""

import os
import shutil
import subprocess
import sys
import tempfile

from sandbox import Sandbox

HERE = os.path.dirname(os.path.abspath(__file__))


def known_failures(name, engine):
    """Returns tests that are expected to fail, with reasons, from `known_failures/NAME` (lines of
    ENGINE TEST REASON)."""
    found = []
    with open(os.path.join(HERE, "known_failures", name), encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                engines, test, _reason = line.split(maxsplit=2)
                if engine in engines.split(","):
                    found.append(test)
    return found


# Tests of every run, and further tests of long runs for each engine. test_asyncio and Go's runtime
# tests also pass on gVisor, but take too long.
MODULES = ["test_os", "test_signal", "test_socket"]
LONG_MODULES = {"microvm": ["test_subprocess", "test_asyncio"], "gvisor": ["test_subprocess"]}
PACKAGES = ["os", "net"]
LONG_PACKAGES = {"microvm": ["runtime"], "gvisor": []}


def selected(always, long_only, engine):
    """The tests of this run."""
    return always + (long_only[engine] if "--long" in sys.argv else [])


def cpython(engine):
    """CPython's tests of processes, signals, files, sockets and event loops pass."""
    sandbox = Sandbox.create(memory="1GiB")
    ignored = " ".join(f"-i '{test}'" for test in known_failures("cpython", engine))
    sandbox.sh(f"cd /tmp && python3 -m test -j3 --timeout 200 {ignored} {' '.join(selected(MODULES, LONG_MODULES, engine))}", user="user", timeout=800)
    sandbox.check_kernel()


def golang(engine):
    """Go's tests of files, network and runtime pass."""
    packages = selected(PACKAGES, LONG_PACKAGES, engine)
    root = subprocess.run(["go", "env", "GOROOT"], check=True, capture_output=True, text=True).stdout.strip()
    cache = os.path.join(os.environ.get("TARGET_DIR", "/tmp"), "workloads-go")
    os.makedirs(cache, exist_ok=True)
    sandbox = Sandbox.create(memory="3GiB")
    with tempfile.TemporaryDirectory() as work:
        # Some tests read files that all packages share.
        shutil.copytree(os.path.join(root, "src", "testdata"), os.path.join(work, "go", "testdata"))
        for package in packages:
            binary = os.path.join(cache, f"{package}.test")
            subprocess.run(["go", "test", "-c", "-o", binary, package], check=True, env={**os.environ, "GOFLAGS": ""})
            directory = os.path.join(work, "go", package)
            shutil.copytree(os.path.join(root, "src", package), directory)
            shutil.copy(binary, directory)
        sandbox.put(os.path.join(work, "go"), "/home/user/")
    # The test programs contain this path of their sources.
    sandbox.sh(f"mkdir -p {root} && ln -s /home/user/go {root}/src")
    for package in packages:
        skipped = "|".join(known_failures(f"go-{package}", engine))
        skip = f"-test.skip '{skipped}'" if skipped else ""
        # Not as a session leader: a test that opens and closes a terminal would terminate it.
        sandbox.sh(f"cd ~/go/{package} && ./{package}.test -test.short -test.timeout 300s {skip}; exit $?",
                   user="user", timeout=400)
    sandbox.check_kernel()

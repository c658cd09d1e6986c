"""Helpers of the tests."""

import os
import subprocess
from pathlib import Path


def run_node(script):
    """Runs a script with the packages of Node.js, and returns its output."""
    place = Path(os.environ["JIFFY_TEST_NODE"])
    done = subprocess.run(["node", script], cwd=place, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

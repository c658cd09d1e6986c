"""Sends requests that the OpenAPI document allows, and many that it does not, and checks the
responses against the document.

    contract.py REPORT [SECONDS]

Runs Schemathesis on `/openapi.json` of the daemon at E2B_API_URL and writes a JUnit report. The
hooks in `contract_hooks.py` make about half of the requests use existing objects. At the end, all
sandboxes, snapshots and volumes are removed.
"""

import os
import subprocess
import sys
from pathlib import Path

import requests

HERE = Path(__file__).parent
URL, KEY = os.environ["E2B_API_URL"], {"X-API-KEY": os.environ["E2B_API_KEY"]}
CHECKS = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]


def run(report, seconds):
    return subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"), "--config-file", HERE / "schemathesis.toml",
            "run", f"{URL}/openapi.json",
            "--header", f"X-API-KEY: {KEY['X-API-KEY']}",
            "--checks", ",".join(CHECKS),
            "--phases", "examples,coverage,fuzzing",
            "--exclude-path", "/host/stop",
            "--max-time", seconds, "--request-timeout", "30", "--continue-on-failure", "--no-shrink",
            "--suppress-health-check", "all", "--warnings", "off", "--no-color",
            "--report", "junit", "--report-junit-path", report,
            # The requests are derandomized: every change is checked with the same requests.
            *(["--seed", "1"] if os.environ.get("CI") else []),
        ],
        env=os.environ | {"SCHEMATHESIS_HOOKS": "contract_hooks", "PYTHONPATH": str(HERE)},
        cwd=Path(report).parent,
    ).returncode


def remove_everything():
    for sandbox in requests.get(f"{URL}/v2/sandboxes", params={"limit": 100}, headers=KEY, timeout=30).json():
        requests.delete(f"{URL}/sandboxes/{sandbox['sandboxID']}", headers=KEY, timeout=30).raise_for_status()
    for snapshot in requests.get(f"{URL}/snapshots", params={"limit": 100}, headers=KEY, timeout=30).json():
        requests.delete(f"{URL}/templates/{snapshot['snapshotID']}", headers=KEY, timeout=30).raise_for_status()
    for volume in requests.get(f"{URL}/volumes", headers=KEY, timeout=30).json():
        requests.delete(f"{URL}/volumes/{volume['volumeID']}", headers=KEY, timeout=30).raise_for_status()


if __name__ == "__main__":
    code = run(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "60")
    remove_everything()
    sys.exit(code)

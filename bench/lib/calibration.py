"""Costs of this host's own operations (`jiffy bench calibration`), for every result."""
import json, os, subprocess

from home import ROOT

TARGET = os.environ.get("TARGET_DIR") or os.environ.get("CARGO_TARGET_DIR") or "target"
BUILT = ROOT / TARGET / "release/jiffy"


def calibration(*programs):
    """As the first program measures them that can, of these and this tree's; otherwise why not."""
    why = "no program to measure with"
    for program in (*programs, BUILT):
        command = [str(program), "bench", "calibration", "-n", "1", "-w", "0", "--json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            why = str(error)
            continue
        if done.returncode == 0:
            return json.loads(done.stdout)["calibration"]
        why = (done.stderr.strip().splitlines() or [why])[-1]
    return {"not_available": [why]}

"""Costs of this host's own operations (`jiffy-instruments calibration`), for every result."""
import json, subprocess

from daemon import ROOT, programs


def calibration():
    """Returns the costs measured by the instruments of this tree, or the reason of a failure."""
    command = [str(programs(ROOT) / "jiffy-instruments"), "calibration", "-n", "1", "-w", "0", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return {"not_available": [f"{error}: make instruments"]}
    if done.returncode:
        return {"not_available": [done.stderr.strip()]}
    return json.loads(done.stdout)["calibration"]

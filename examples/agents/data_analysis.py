"""Analyses a table in a sandbox without a network, and copies the result out."""

import tempfile
from pathlib import Path

from jiffy import Sandbox

TABLE = "city,year,value\nOslo,2024,3\nOslo,2025,5\nRome,2024,7\nRome,2025,4\n"
ANALYSIS = """
import csv, json, collections
growth = collections.defaultdict(list)
for row in csv.DictReader(open("table.csv")):
    growth[row["city"]].append(int(row["value"]))
json.dump({city: last - first for city, (first, last) in growth.items()}, open("growth.json", "w"))
"""

with (
    Sandbox.create(allow_internet_access=False) as sandbox,
    tempfile.TemporaryDirectory() as directory,
):
    source = Path(directory, "table.csv")
    source.write_text(TABLE)
    sandbox.upload(
        source,
        "/home/user/table.csv",
        on_progress=lambda done, size: print(f"{done} of {size} bytes"),
    )
    sandbox.files.write("analysis.py", ANALYSIS)
    sandbox.commands.run("python3 analysis.py")
    sandbox.download("/home/user/growth.json", Path(directory, "growth.json"))
    print(Path(directory, "growth.json").read_text())
    print(len(sandbox.connections().items), "connections")

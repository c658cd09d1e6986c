"""Tries five fixes of a failing program in forks, and promotes the best.

A model usually proposes the fixes. Here they are a list, so that the example needs no model.
"""

from jiffy import Outcome, Sandbox

PROGRAM = """
def median(values):
    return sorted(values)[len(values) / 2]
"""
TESTS = """
import time
from program import median
assert median([9, 1, 2]) == 2
assert median([8, 1, 3, 2]) == 2.5
start = time.perf_counter()
median(list(range(5_000)))
print(f"{1000 * (time.perf_counter() - start):.3f}")
"""
FIXES = [
    "def median(values):\n    return sorted(values)[len(values) // 2]\n",
    "def median(values):\n    return sum(values) / len(values)\n",
    "import statistics\nmedian = statistics.median\n",
    "def median(values):\n    while len(values) > 2:\n        values = sorted(values)[1:-1]\n"
    + "    return sum(values) / len(values)\n",
    "def median(values):\n    return values.middle()\n",
]


def attempt(fix: str):
    def run(fork: Sandbox) -> float:
        fork.files.write("program.py", fix)
        # A failed test raises an exception. The output is the duration in milliseconds.
        return float(fork.commands.run("timeout 20 python3 tests.py").stdout)

    return run


def fastest(outcomes: list[Outcome[Sandbox]]) -> Outcome[Sandbox] | None:
    return min(
        (outcome for outcome in outcomes if outcome.ok),
        key=lambda outcome: outcome.result,
        default=None,
    )


with Sandbox.create() as sandbox:
    sandbox.files.write("program.py", PROGRAM)
    sandbox.files.write("tests.py", TESTS)
    best = sandbox.try_each([attempt(fix) for fix in FIXES], keep=fastest)
    with best.sandbox as fork:
        print(f"fix {best.index + 1} passes the tests:")
        print(fork.files.read("program.py"), end="")

"""Programs of one build, with a daemon and a data directory of their own."""
import json, os, pathlib, subprocess, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
REAL = os.environ.get("JIFFY_HOME", "/var/lib/jiffy")
BORROWED = ("templates", "images", "kernel", "disks", "initrd", "versions")


class Build:
    """Samples of each series lie in `samples` by the series' name, their units in `units`."""

    def __init__(self, work, name, tree, home=None):
        self.name, self.tree = name, pathlib.Path(tree).resolve()
        self.program = str(self.tree / os.environ.get("TARGET_DIR", "target") / "release/jiffy")
        self.home, self.samples, self.units = pathlib.Path(work) / name, {}, {}
        self.environment = {**os.environ, "JIFFY_HOME": str(self.home)}
        self.home.mkdir()
        for part in BORROWED:
            if (real := pathlib.Path(home or REAL) / part).exists():
                (self.home / part).symlink_to(real)

    def jiffy(self, *words):
        command = [self.program, *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{self.name}: {' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def note(self, name, unit, samples):
        self.samples.setdefault(name, []).extend(samples)
        self.units[name] = unit

    def bench(self, *words):
        report = json.loads(self.jiffy("bench", *words, "--json"))
        for series in report["series"]:
            self.note(series["name"], series["unit"], series["samples"])
        return report

    def start(self, *options):
        self.jiffy("daemon", "start", "--no-listen", "--warm-pool", "0", *options)
        self.jiffy("rm", self.jiffy("create").strip())

    def stop(self):
        command = [self.program, "serve", "--stop", "--kill-sandboxes"]
        subprocess.run(command, env=self.environment, capture_output=True)

    def commit(self):
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, cwd=self.tree, capture_output=True, text=True).stdout.strip()

"""Programs of one build, with a daemon and a data directory of their own."""
import json, os, pathlib, subprocess

from home import ROOT, Home


class Build(Home):
    """Samples of each series lie in `samples` by the series' name, their units in `units`."""

    def __init__(self, work, name, tree, home=None):
        self.name, self.tree = name, pathlib.Path(tree).resolve()
        program = self.tree / os.environ.get("TARGET_DIR", "target") / ("ci/programs" if os.environ.get("CI") else "release") / "jiffy"
        self.samples, self.units = {}, {}
        super().__init__(pathlib.Path(work) / name, program, home)

    def note(self, name, unit, samples):
        self.samples.setdefault(name, []).extend(samples)
        self.units[name] = unit

    def bench(self, *words):
        report = json.loads(self.jiffy("bench", *words, "--json"))
        for series in report["series"]:
            self.note(series["name"], series["unit"], series["samples"])
        return report

    def rounded(self):
        return {name: [round(sample, 3) for sample in samples] for name, samples in self.samples.items()}

    def start(self, *options):
        self.jiffy("daemon", "start", "--no-listen", "--warm-pool", "0", *options)
        self.jiffy("rm", self.jiffy("create").strip())

    def commit(self):
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, cwd=self.tree, capture_output=True, text=True).stdout.strip()

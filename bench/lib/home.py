"""Data directory of a build's programs."""
import os, pathlib, subprocess, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
REAL = pathlib.Path(os.environ.get("JIFFY_HOME", "/var/lib/jiffy"))
PARTS = ("templates", "images", "kernel", "disks", "initrd", "versions")


class Home:
    """`parts` of the data directory `real` are linked into the directory `home`, unless they are there."""

    def __init__(self, home, program, real=None, parts=PARTS, environment=None):
        if not pathlib.Path(program).exists():
            sys.exit(f"{program} is not there: make build")
        self.home, self.program = pathlib.Path(home), str(program)
        self.environment = {**os.environ, **(environment or {}), "JIFFY_HOME": str(home)}
        self.home.mkdir(exist_ok=True)
        for part in parts:
            if (found := pathlib.Path(real or REAL) / part).exists() and not (self.home / part).exists():
                (self.home / part).symlink_to(found)

    def jiffy(self, *words):
        command = [self.program, *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{self.home}: {' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop(self):
        command = [self.program, "serve", "--stop", "--kill-sandboxes"]
        subprocess.run(command, env=self.environment, capture_output=True)

"""Temporary data directories, daemons on them, and builds that are measured with them.

As a program: links parts of the data directory of this host into a directory.

usage: daemon.py DIRECTORY [PART...]
"""
import copy, http.client, json, os, pathlib, socket, struct, subprocess, sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
REAL = pathlib.Path(os.environ.get("JIFFY_HOME", "/var/lib/jiffy"))
# Tasks of `jiffy bench`. All others are instruments.
BENCH_TASKS = ("create", "exec", "run", "stress", "density", "functions")
PARTS = ("templates", "images", "kernel", "disks", "initrd", "versions")


def programs(tree):
    """Returns the directory of the programs that were built in `tree`."""
    return pathlib.Path(tree) / os.environ.get("TARGET_DIR", "target") / ("ci/programs" if os.environ.get("CI") else "release")


def link_parts(home, parts=PARTS, real=None):
    """Links parts of the data directory `real` into the directory `home`, unless they exist there."""
    for part in parts:
        source, link = pathlib.Path(real or REAL) / part, pathlib.Path(home) / part
        if source.exists() and not link.exists():
            link.symlink_to(source)


class Home:
    """Data directory `home` with links to `parts` of the data directory `real`."""

    def __init__(self, home, program, real=None, parts=PARTS, environment=None):
        if not pathlib.Path(program).exists():
            sys.exit(f"{program} does not exist: run make build")
        self.home, self.program = pathlib.Path(home), str(program)
        self.environment = {**os.environ, **(environment or {}), "JIFFY_HOME": str(home)}
        self.home.mkdir(exist_ok=True)
        link_parts(self.home, parts, real)

    def jiffy(self, *words):
        """Runs a command of the program on this data directory. Returns its output."""
        return self.run(self.program, *words)

    def run(self, *words):
        """Runs a command with the environment of this data directory. Returns its output. Exits
        with its error if it fails."""
        command = [*map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{self.home}: {' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop(self):
        """Stops the daemon and kills its sandboxes."""
        command = [self.program, "serve", "--stop", "--kill-sandboxes"]
        subprocess.run(command, env=self.environment, capture_output=True)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost")
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


class Daemon(Home):
    """Daemon on a new data directory `home` with links to `parts` of the real data directory. With
    `listen` it serves the API at this address, and otherwise at its socket only."""

    def __init__(self, home, program, parts=PARTS, options=(), environment=None, listen=None):
        super().__init__(home, program, parts=parts, environment=environment)
        address = ("--listen", listen) if listen else ("--no-listen",)
        self.jiffy("daemon", "start", *address, "--warm-pool", "0", *options)
        self.connection = UnixConnection(self.home / "run/jiffy.sock")

    def copy(self):
        """Returns a copy with a separate connection."""
        other = copy.copy(self)
        other.connection = UnixConnection(self.home / "run/jiffy.sock")
        return other

    def request(self, method, path, body=None, headers=(), parse=True):
        """Sends a request to the socket of the daemon. Returns the response, parsed from JSON
        unless `parse` is false. Exits if the status is not a success."""
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        headers = {"content-type": "application/json", **dict(headers)}
        self.connection.request(method, path, raw, headers)
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            sys.exit(f"{self.home}: {method} {path}: {answer.status} {text[:500]}")
        return json.loads(text) if parse and text else text

    def create(self, template, **more):
        """Creates a sandbox. Returns its id and the token of its agent."""
        created = self.request("POST", "/v2/sandboxes", {"templateID": template, "timeout": -1, **more})
        return created["sandboxID"], created.get("envdAccessToken")

    def exec(self, sandbox, program, *arguments):
        """Runs a program in a sandbox with a request to its agent at port 49983. Exits if the
        program fails."""
        message = json.dumps({"process": {"cmd": program, "args": arguments, "envs": {}}, "stdin": False}).encode()
        headers = {"content-type": "application/connect+json", "e2b-sandbox-id": sandbox[0],
                   "e2b-sandbox-port": "49983", **({"x-access-token": sandbox[1]} if sandbox[1] else {})}
        # A message of the Connect protocol: flags, length, content.
        frame = b"\0" + struct.pack(">I", len(message)) + message
        answer = self.request("POST", "/process.Process/Start", frame, headers, False)
        if b'"exited":true' not in answer.replace(b" ", b"") or b"exit status 0" not in answer:
            sys.exit(f"{self.home}: {program}: {answer}")

    def process(self, sandbox):
        """Returns the VMM process of a sandbox."""
        return self.request("GET", f"/sandboxes/{sandbox[0]}/process")

    def memory_mib(self, sandbox):
        """Returns the memory of a sandbox's VMM in MiB: resident, proportional share, anonymous."""
        rollup = pathlib.Path(f"/proc/{self.process(sandbox)['pid']}/smaps_rollup").read_text()
        fields = dict(line.split(":") for line in rollup.splitlines()[1:])
        names = (("resident_mib", "Rss"), ("proportional_mib", "Pss"), ("anonymous_mib", "Anonymous"))
        return {name: int(fields[field].split()[0]) / 1024 for name, field in names}


class Build(Home):
    """Programs of a build in the tree `tree`, with a temporary data directory and a daemon.
    `samples` contains the samples of each series by name, `units` the units."""

    def __init__(self, work, name, tree, home=None):
        self.name, self.tree = name, pathlib.Path(tree).resolve()
        self.samples, self.units = {}, {}
        super().__init__(pathlib.Path(work) / name, programs(self.tree) / "jiffy", home)

    def note(self, name, unit, samples):
        """Adds samples to a series."""
        self.samples.setdefault(name, []).extend(samples)
        self.units[name] = unit

    def bench(self, task, *words):
        """Measures a task of `jiffy bench` or of the instruments. In builds of commits without
        instruments, `jiffy bench` has all tasks."""
        instruments = pathlib.Path(self.program).with_name("jiffy-instruments")
        is_instrument = task not in BENCH_TASKS and instruments.exists()
        command = [instruments] if is_instrument else [self.program, "bench"]
        report = json.loads(self.run(*command, task, *words, "--json"))
        for series in report["series"]:
            self.note(series["name"], series["unit"], series["samples"])
        return report

    def rounded(self):
        """Returns the samples with three decimal places."""
        return {name: [round(sample, 3) for sample in samples] for name, samples in self.samples.items()}

    def start(self, *options):
        """Starts the daemon, and creates a sandbox once: the first create takes the snapshot of
        the template."""
        self.jiffy("daemon", "start", "--no-listen", "--warm-pool", "0", *options)
        self.jiffy("rm", self.jiffy("create").strip())

    def commit(self):
        """Returns the commit of the tree."""
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, cwd=self.tree, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    link_parts(sys.argv[1], sys.argv[2:] or PARTS)

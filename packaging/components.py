"""Third-party components of the programs: crates, Go modules, and the guest kernel."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from inputs import ROOT, Inputs

# Crates of the workspace whose programs are in the packages.
SHIPPED = {"jiffy", "jiffy-vmm", "jiffy-functions", "jiffy-agent"}
TARGET = "x86_64-unknown-linux-gnu"
LICENCE_FILE = re.compile(r"(?i)^(un)?(licen[cs]e|copying|copyright|notice)([-_.].*)?$")
# The metadata of Go modules and Debian packages does not contain a licence.
UNNAMED_LICENCE = "see its text"


@dataclass(frozen=True)
class Component:
    name: str
    version: str
    licence: str
    purl: str
    authors: tuple[str, ...]
    # Directory with its source, for licence texts.
    source: Path | None


def output(*command: str, cwd: Path = ROOT) -> str:
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, check=True, text=True).stdout


def crates() -> list[Component]:
    """Crates that are linked into the programs, without build and development dependencies."""
    command = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={TARGET}"]
    metadata = json.loads(output(*command))
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    members = set(metadata["workspace_members"])
    programs = {
        target["name"]: id
        for id in members
        for target in packages[id]["targets"]
        if "bin" in target["kind"]
    }
    missing = sorted(SHIPPED - programs.keys())
    if missing:
        raise SystemExit(f"package: the workspace has no program {', '.join(missing)}")
    waiting = [programs[name] for name in SHIPPED]
    linked = set()
    while waiting:
        id = waiting.pop()
        if id in linked:
            continue
        linked.add(id)
        for dependency in nodes[id]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    found = []
    for package in (packages[id] for id in linked - members):
        name, version = package["name"], package["version"]
        if not package["license"]:
            raise SystemExit(f"package: crate {name} {version} has no licence in its metadata")
        found.append(Component(
            name, version, package["license"].replace("/", " OR "),
            f"pkg:cargo/{name}@{version}", tuple(package["authors"]),
            Path(package["manifest_path"]).parent,
        ))
    return sorted(found, key=lambda c: (c.name, c.version))


def go_modules(program: Path) -> list[Component]:
    """Modules that are linked into a Go program, from its build information."""
    found = []
    for line in output("go", "version", "-m", str(program)).splitlines():
        fields = line.split()
        if fields[:1] != ["dep"]:
            continue
        name, version = fields[1:3]
        about = json.loads(output("go", "mod", "download", "-json", f"{name}@{version}", cwd=ROOT / "gvisor"))
        found.append(Component(
            name, version, UNNAMED_LICENCE, f"pkg:golang/{name}@{version}", (), Path(about["Dir"])
        ))
    if not found:
        raise SystemExit(f"package: {program} has no build information with modules")
    go_root = Path(output("go", "env", "GOROOT").strip())
    version = output("go", "version", str(program)).split()[-1].removeprefix("go")
    found.append(Component("go", version, "BSD-3-Clause", f"pkg:generic/go@{version}", (), go_root))
    return sorted(found, key=lambda c: (c.name, c.version))


def rust_library() -> Component:
    version = output("rustc", "--version").split()[1]
    return Component(
        "rust-std", version, "MIT OR Apache-2.0", f"pkg:generic/rust-std@{version}",
        ("The Rust Project Developers",), None,
    )


def kernel() -> Component:
    version = (ROOT / "kernel/VERSION").read_text().strip()
    source = (ROOT / "kernel/source.sha256").read_text().split()[1]
    package_version = source.split("_")[1]
    return Component(
        "linux", version, "GPL-2.0-only", f"pkg:deb/debian/linux@{package_version}", (), None
    )


def licence_texts(component: Component) -> list[str]:
    """Texts of the licence files in a component's top directory."""
    if component.source is None:
        return []
    texts = []
    for path in sorted(component.source.iterdir()):
        if path.is_file() and LICENCE_FILE.match(path.name) and not path.name.endswith(".html"):
            texts.append(path.read_text(errors="replace").replace("\r\n", "\n").strip() + "\n")
    return texts


def debian_packages(status: bytes) -> list[Component]:
    """Installed packages in a dpkg status file."""
    found = []
    for stanza in status.decode().split("\n\n"):
        lines = (line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[\w-]+: ", line))
        fields = dict(lines)
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{name}@{version}"
            found.append(Component(name, version, UNNAMED_LICENCE, purl, (), None))
    return sorted(found, key=lambda c: c.name)


class Components:
    """Components of each package of programs."""

    def __init__(self, inputs: Inputs):
        self.host = [*crates(), kernel(), rust_library()]
        self.gvisor = []
        if "jiffy-gvisor" in inputs.programs:
            self.gvisor = go_modules(inputs.programs["jiffy-gvisor"])

    def by_content(self) -> dict[str, list[Component]]:
        both = self.host + self.gvisor
        return {"host": self.host, "gvisor": self.gvisor, "both": both, "none": []}

"""Inputs of all packages: version, time, programs, template files."""

import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from files import PROGRAM_MODE, Entry, sha256_of

ROOT = Path(__file__).resolve().parent.parent
HOST_PROGRAMS = ["jiffy-vmm", "jiffy-functions", "jiffy-agent"]
GVISOR = "jiffy-gvisor"
# Template files in wheels, and their zstd level. Its window is the maximum that
# `jiffy template import` accepts.
IN_WHEELS = {"base.tpl"}
TEMPLATE_LEVEL = 19
DESCRIPTION = "Sandboxes for AI agents: Linux microVMs on your own machine"


@dataclass
class Inputs:
    version: str
    # Modification time of all files in packages, in seconds since 1970.
    epoch: int
    # Stripped copies of the programs, by name.
    programs: dict[str, Path]
    # Template files, by file name.
    templates: dict[str, Path]
    out: Path
    # Temporary directory. No package contains its path.
    work: Path
    # Cache that outlives this run.
    cache: Path
    fast: bool
    # Licence texts by package kind.
    licences: dict[str, bytes] = field(default_factory=dict)
    # Programs in each package file: `host`, `gvisor`, `both` or `none`.
    contents: dict[str, str] = field(default_factory=dict)
    # Status file of dpkg in each package file that contains a Debian root.
    debian_status: dict[str, bytes] = field(default_factory=dict)

    def level(self, best: int) -> int:
        """Returns the compression level: `best`, or the fastest for tests."""
        return 1 if self.fast else best

    def template_sums(self) -> bytes:
        lines = [f"{sha256_of(path)}  {name}\n" for name, path in sorted(self.templates.items())]
        return "".join(lines).encode()

    def output_of(self, *arguments: str) -> bytes:
        """Returns the standard output of this version's `jiffy`."""
        command = [self.programs["jiffy"], *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout

    def agent_image(self) -> Entry:
        directory = self.work / "agent-image"
        if not directory.exists():
            directory.mkdir()
            self.output_of("agent-image", str(directory))
        [image] = directory.iterdir()
        return Entry(image.name, image)

    def man_pages(self) -> list[Entry]:
        directory = self.work / "man"
        if not directory.exists():
            directory.mkdir()
            self.output_of("man", str(directory))
        return [Entry(path.name, path) for path in sorted(directory.iterdir())]


def packed_templates(directory: Path | None, cache: Path, fast: bool) -> dict[str, Path]:
    """Returns the template files of a directory by name. Files for wheels are compressed again, unless
    `fast` is set."""
    if directory is None:
        return {}
    templates = {path.name: path.absolute() for path in sorted(directory.glob("*.tpl"))}
    if not templates:
        raise SystemExit(f"package: {directory} has no template files (NAME.tpl)")
    for name in IN_WHEELS & templates.keys():
        templates[name] = templates[name] if fast else packed(templates[name], cache)
    return templates


def packed(path: Path, cache: Path) -> Path:
    """Returns the template file with maximum compression. The result is cached, because the
    compression takes minutes."""
    target = cache / f"{sha256_of(path)}.tpl"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".new")
        print(f"   compressing {path.name}", flush=True)
        with subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE) as unpacked:
            command = ["zstd", "-q", f"-{TEMPLATE_LEVEL}", "--long=27", "--single-thread", "-f", "-o", unfinished]
            subprocess.run(command, stdin=unpacked.stdout, check=True)
        if unpacked.returncode != 0:
            raise SystemExit(f"package: {path} is not a template file")
        unfinished.rename(target)
    return target


def workspace_version() -> str:
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    return manifest["workspace"]["package"]["version"]


def commit_time() -> int:
    command = ["git", "-C", ROOT, "log", "-1", "--format=%ct"]
    shown = subprocess.run(command, stdout=subprocess.PIPE)
    if shown.returncode != 0:
        raise SystemExit("package: the sources are not a Git repository: set SOURCE_DATE_EPOCH")
    return int(shown.stdout)


def stripped_programs(directory: Path, work: Path) -> dict[str, Path]:
    """Copies the programs without their symbols. gVisor's program is optional."""
    target = work / "programs"
    target.mkdir()
    programs = {}
    for name in ["jiffy", *HOST_PROGRAMS, GVISOR]:
        source = directory / name
        if not source.is_file():
            if name == GVISOR:
                continue
            raise SystemExit(f"package: {source} does not exist: run `make build` first")
        # Section headers of Go programs describe the build, so that they are stripped too.
        subprocess.run(["strip", "--strip-all", "-o", target / name, source], check=True)
        (target / name).chmod(PROGRAM_MODE)
        programs[name] = target / name
    return programs

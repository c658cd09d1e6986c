"""Wheels (PEP 427): the host programs, gVisor's program, the template base, and a reserved name."""

import base64
import hashlib
import time
import zipfile

import layout
from files import FILE_MODE, PROGRAM_MODE, Entry
from inputs import DESCRIPTION, GVISOR, Inputs

HOST_TAG = "py3-none-manylinux_2_34_x86_64"
# Suffixes of compressed files and their parts, which are stored without compression.
STORED = (".tpl", ".gz", ".zst", ".1", ".2", ".3", ".4")
# Maximum size of a part of the template file in bytes: PyPI accepts files of up to 100 MB.
PART_BYTES = 95_000_000

HOST_TEXT = """Jiffy starts, forks, rolls back and pauses Linux microVMs for AI agents, on your own
machine, in milliseconds. It needs x86-64 Linux with glibc 2.34 or later, but neither root nor a
compiler. Sandboxes run on KVM if `/dev/kvm` is accessible, and on gVisor otherwise.

    jiffy run -- python3 -c 'print(6 * 7)'

`jiffy doctor` checks the host, `jiffy daemon start` serves the API of E2B, and `jiffy --help` lists
all commands."""


def metadata(name: str, version: str, summary: str, requires: tuple[str, ...], text: str) -> bytes:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: {summary}",
        "License: Apache-2.0",
        "Classifier: Environment :: Console",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Topic :: System :: Emulators",
        "Requires-Python: >=3.8",
        *requires,
        "Description-Content-Type: text/markdown",
        "",
        text,
    ]
    return ("\n".join(lines) + "\n").encode()


def write_wheel(
    inputs: Inputs,
    name: str,
    tag: str,
    summary: str,
    entries: list[Entry],
    requires: tuple[str, ...] = (),
    text: str = DESCRIPTION,
) -> str:
    """Writes a wheel and returns its name. Names of `entries` are below its `.data` directory."""
    stem = f"{name.replace('-', '_')}-{inputs.version}"
    info = f"{stem}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: jiffy\nRoot-Is-Purelib: false\nTag: {tag}\n"
    entries = [entry.below(f"{stem}.data") for entry in entries]
    entries += [
        Entry(f"{info}/METADATA", metadata(name, inputs.version, summary, requires, text)),
        Entry(f"{info}/WHEEL", wheel.encode()),
    ]
    moment = time.gmtime(max(inputs.epoch, 315532800))[:6]
    records = []
    path = inputs.out / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:

        def add(entry: Entry) -> None:
            header = zipfile.ZipInfo(entry.name, moment)
            header.create_system = 3
            header.external_attr = (0o100000 | entry.mode) << 16
            stored = entry.name.endswith(STORED)
            header.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            content = entry.content()
            archive.writestr(header, content, compresslevel=inputs.level(9))
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            records.append(f"{entry.name},sha256={digest.decode()},{len(content)}\n")

        # The directory with the metadata comes last, as PEP 427 recommends.
        for entry in sorted(entries, key=lambda e: (e.name.startswith(info), e.name)):
            add(entry)
        listed = "".join([*records, f"{info}/RECORD,,\n"])
        add(Entry(f"{info}/RECORD", listed.encode()))
    path.chmod(FILE_MODE)
    return path.name


def base_parts(inputs: Inputs) -> dict[str, Entry]:
    """Returns the wheels of the template base, each with its part of the file."""
    if "base.tpl" not in inputs.templates:
        return {}
    content = inputs.templates["base.tpl"].read_bytes()
    parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    name = "data/share/jiffy/templates/base.tpl"
    if len(parts) == 1:
        return {"jiffy-sandbox-base": Entry(name, content)}
    return {
        "jiffy-sandbox-base" + (f"-{number}" if number > 1 else ""): Entry(f"{name}.{number}", part)
        for number, part in enumerate(parts, 1)
    }


def build(inputs: Inputs) -> None:
    version = inputs.version
    host = [Entry("scripts/jiffy", inputs.programs["jiffy"], PROGRAM_MODE)]
    installed = [
        *layout.programs(inputs, gvisor=False)[1:],
        *layout.package_files(inputs, "wheel"),
        *layout.references(inputs),
        *layout.notices(inputs, gvisor=False),
    ]
    host += [entry.below("data") for entry in installed]
    same = list(base_parts(inputs))
    if GVISOR in inputs.programs:
        same.append("jiffy-sandbox-gvisor")
    requires = tuple(f"Requires-Dist: {name}=={version}" for name in same)
    name = write_wheel(
        inputs, "jiffy-sandbox-host", HOST_TAG, DESCRIPTION, host, requires, HOST_TEXT
    )
    inputs.contents[name] = "host"
    for wheel, entry in base_parts(inputs).items():
        write_wheel(inputs, wheel, HOST_TAG, "Template base of Jiffy", [entry])
    if GVISOR in inputs.programs:
        program = [
            layout.gvisor_program(inputs).below("data"),
            Entry("data/share/doc/jiffy-gvisor/licences.txt", inputs.licences["gvisor"]),
        ]
        summary = "Engine of Jiffy for hosts without KVM"
        name = write_wheel(inputs, "jiffy-sandbox-gvisor", HOST_TAG, summary, program)
        inputs.contents[name] = "gvisor"

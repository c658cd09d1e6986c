"""npm packages: the host programs, and the package that depends on them where they run."""

import json

import layout
from files import FILE_MODE, PROGRAM_MODE, Entry, write_tar_gz
from inputs import DESCRIPTION, ROOT, Inputs

HOST = "@jiffy/host-linux-x64"
MAIN = "@jiffy/host"


def write_package(inputs: Inputs, about: dict, entries: list[Entry]) -> str:
    """Writes a package in the format of `npm pack`, and returns its file name."""
    common = {"version": inputs.version, "license": "Apache-2.0", "description": DESCRIPTION}
    text = json.dumps({**about, **common}, indent=2) + "\n"
    entries = [Entry("package.json", text.encode()), *entries]
    stem = about["name"].removeprefix("@").replace("/", "-")
    path = inputs.out / f"{stem}-{inputs.version}.tgz"
    entries = [entry.below("package") for entry in entries]
    write_tar_gz(path, entries, inputs.epoch, inputs.level(9), directories=False)
    path.chmod(FILE_MODE)
    return path.name


def build(inputs: Inputs) -> None:
    host = [
        *layout.programs(inputs, gvisor=True),
        *layout.package_files(inputs, "npm"),
        Entry("LICENSE", ROOT / "LICENSE"),
        *layout.notices(inputs, gvisor=True),
    ]
    about = {"name": HOST, "os": ["linux"], "cpu": ["x64"], "preferUnplugged": True}
    name = write_package(inputs, about, host)
    inputs.contents[name] = "both"
    shim = Entry("bin/jiffy.js", ROOT / "packaging/npm/jiffy.js", PROGRAM_MODE)
    about = {
        "name": MAIN,
        "bin": {"jiffy": "bin/jiffy.js"},
        "engines": {"node": ">=18"},
        "optionalDependencies": {HOST: inputs.version},
    }
    write_package(inputs, about, [shim, Entry("LICENSE", ROOT / "LICENSE")])

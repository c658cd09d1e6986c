"""The tar archive for install.sh, install.sh itself, and template files."""

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import layout
from components import debian_packages
from files import FILE_MODE, PROGRAM_MODE, Entry, sha256_of, write_file, write_tar_zst
from inputs import ROOT, Inputs

# Placeholder that install.sh replaces in the unit and in the AppArmor profile.
PREFIX = "@PREFIX@"


def build(inputs: Inputs) -> None:
    stem = f"jiffy-{inputs.version}-x86_64"
    entries = [
        *layout.programs(inputs, gvisor=True),
        *layout.package_files(inputs, "tarball"),
        *layout.references(inputs),
        layout.unit(PREFIX),
        layout.apparmor_profile(PREFIX),
        Entry("share/doc/jiffy/CHANGELOG.md", ROOT / "CHANGELOG.md"),
        Entry("share/doc/jiffy/LICENSE", ROOT / "LICENSE"),
        *layout.notices(inputs, gvisor=True),
    ]
    path = inputs.out / f"{stem}.tar.zst"
    write_tar_zst(path, [entry.below(stem) for entry in entries], inputs.epoch, inputs.level(19))
    inputs.contents[path.name] = "both"
    write_file(inputs.out / "install.sh", (ROOT / "packaging/install.sh").read_bytes(), PROGRAM_MODE)


def build_templates(inputs: Inputs) -> None:
    for name, path in sorted(inputs.templates.items()):
        target = inputs.out / name
        shutil.copyfile(path, target)
        target.chmod(FILE_MODE)
        text = json.dumps(provenance(inputs, name, path), indent=1, sort_keys=True) + "\n"
        write_file(inputs.out / f"{name}.provenance.json", text.encode())


def manifest(path: Path) -> dict:
    """Returns the manifest of a template file, which is the first entry of its archive."""
    command = ["zstd", "-dcq", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as unpacked:
        with tarfile.open(fileobj=unpacked.stdout, mode="r|") as archive:
            first = archive.next()
            found = json.load(archive.extractfile(first))
        unpacked.kill()
    return found


def provenance(inputs: Inputs, name: str, path: Path) -> dict:
    """Returns the provenance of a template file. Its Debian packages are omitted if `fast` is set."""
    about = manifest(path)
    found = {
        "template": about["name"],
        "jiffy": inputs.version,
        "recipe_sha256": about.get("recipe_sha256"),
        "images": about["images"],
        "sha256": sha256_of(path),
    }
    if not inputs.fast:
        status = read_status(inputs, path, found["sha256"])
        found["packages"] = [f"{c.name} {c.version}" for c in debian_packages(status)]
        inputs.contents[name] = "none"
        inputs.debian_status[name] = status
    return found


def read_status(inputs: Inputs, path: Path, digest: str) -> bytes:
    """Returns dpkg's status file in a template's images. Later images override earlier images."""
    cached = inputs.cache / f"status-{digest}"
    if cached.exists():
        return cached.read_bytes()
    status = b""
    with tempfile.TemporaryDirectory(dir=inputs.work) as directory:
        work = Path(directory)
        with subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE) as unpacked:
            command = ["tar", "-xf", "-", "-C", work]
            subprocess.run(command, stdin=unpacked.stdout, check=True)
        for image in manifest(path)["images"]:
            file, tree = work / f"sha256-{image['sha256']}.erofs", work / "tree"
            command = ["fsck.erofs", f"--extract={tree}", "--overwrite", "--no-preserve", file]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            installed = tree / "var/lib/dpkg/status"
            if installed.exists():
                status = installed.read_bytes()
    cached.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cached.with_suffix(".new")
    unfinished.write_bytes(status)
    unfinished.rename(cached)
    return status

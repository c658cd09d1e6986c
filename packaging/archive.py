"""The tar archive for install.sh, install.sh itself, and template files."""

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import layout
from files import FILE_MODE, PROGRAM_MODE, Entry, sha256_of, write_file, write_tar_zst
from inputs import ROOT, Inputs

# install.sh replaces it in the unit and in the AppArmor profile.
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
        text = json.dumps(provenance(inputs, path), indent=1, sort_keys=True) + "\n"
        write_file(inputs.out / f"{name}.provenance.json", text.encode())


def manifest(path: Path) -> dict:
    """Manifest of a template file: the first entry of its archive."""
    with subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as unpacked:
        with tarfile.open(fileobj=unpacked.stdout, mode="r|") as archive:
            first = archive.next()
            found = json.load(archive.extractfile(first))
        unpacked.kill()
    return found


def provenance(inputs: Inputs, path: Path) -> dict:
    about = manifest(path)
    found = {
        "template": about["name"],
        "jiffy": inputs.version,
        "recipe_sha256": about.get("recipe_sha256"),
        "images": about["images"],
        "sha256": sha256_of(path),
    }
    if not inputs.fast:
        found["packages"] = packages(inputs, path, found["sha256"])
    return found


def packages(inputs: Inputs, path: Path, digest: str) -> list[str]:
    """Debian packages in a template's images, as NAME VERSION; later images replace earlier ones."""
    listed = inputs.cache / f"packages-{digest}.json"
    if not listed.exists():
        listed.parent.mkdir(parents=True, exist_ok=True)
        unfinished = listed.with_suffix(".new")
        unfinished.write_text(json.dumps(read_packages(inputs, path)))
        unfinished.rename(listed)
    return json.loads(listed.read_text())


def read_packages(inputs: Inputs, path: Path) -> list[str]:
    status = b""
    with tempfile.TemporaryDirectory(dir=inputs.work) as directory:
        work = Path(directory)
        with subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE) as unpacked:
            subprocess.run(["tar", "-xf", "-", "-C", work], stdin=unpacked.stdout, check=True)
        for image in manifest(path)["images"]:
            file, tree = work / f"sha256-{image['sha256']}.erofs", work / "tree"
            subprocess.run(["fsck.erofs", f"--extract={tree}", "--overwrite", file], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            installed = tree / "var/lib/dpkg/status"
            if installed.exists():
                status = installed.read_bytes()
    found = []
    for stanza in status.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line[:60] and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            found.append(f"{fields['Package']} {fields['Version']}")
    return sorted(found)

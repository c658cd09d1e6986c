"""Debian packages: jiffy, and jiffy-gvisor with the engine for hosts without KVM."""

import email.utils
import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import layout
from files import FILE_MODE, PROGRAM_MODE, Entry, gzipped, place, write_file
from inputs import GVISOR, ROOT, Inputs
from licences import kernel_offer, kernel_patches

DEBIAN = ROOT / "packaging/debian"
MAINTAINER = "Jiffy maintainers <maintainers@jiffy.invalid>"
DEPENDS = "libc6 (>= 2.34), libgcc-s1, debconf (>= 0.5) | debconf-2.0, iproute2, nftables, erofs-utils, e2fsprogs"
RECOMMENDS = "mmdebstrap, passt, uidmap, jiffy-gvisor"
# Directory of zsh completions in other packages, and in Debian packages.
ZSH_DIRECTORY = ("share/zsh/site-functions", "share/zsh/vendor-completions")
CONTROL = """\
Package: {name}
Version: {version}
Architecture: amd64
Maintainer: {maintainer}
Installed-Size: {size}
Depends: {depends}
{more}Section: admin
Priority: optional
Description: {summary}
{text}
"""
TEXTS = {
    "jiffy": (
        "Linux microVMs as sandboxes for AI agents",
        " Starts, forks, rolls back and pauses Linux microVMs on this host within\n"
        " milliseconds, and serves the API of E2B. Sandboxes run on KVM, or on gVisor\n"
        " (package jiffy-gvisor) on hosts without KVM.",
    ),
    "jiffy-gvisor": (
        "gVisor engine of jiffy for hosts without KVM",
        " Runs sandboxes of jiffy under gVisor, a kernel in user space that needs no\n"
        " virtualization.",
    ),
}
CHANGELOG = """\
{name} ({version}) unstable; urgency=medium

  * See CHANGELOG.md.gz.

 -- {maintainer}  {date}
"""
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: jiffy
Comment:
 Texts of all licences, with the components that they apply to, are in
 /usr/share/doc/{name}/licences.txt.gz.
{offer}
Files: *
Copyright: 2026 Jiffy maintainers and the authors of the components
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
"""


def documents(inputs: Inputs, name: str, notice: bytes) -> list[Entry]:
    date = email.utils.formatdate(inputs.epoch)
    about = {"name": name, "version": inputs.version, "maintainer": MAINTAINER, "date": date}
    offer = ""
    entries = []
    if name == "jiffy":
        text = kernel_offer(f"/usr/share/doc/{name}/kernel-patches.gz")
        offer = "".join(f" {line}\n" for line in text.strip().splitlines())
        entries.append(Entry("kernel-patches.gz", gzipped(kernel_patches())))
        entries.append(Entry("CHANGELOG.md.gz", gzipped((ROOT / "CHANGELOG.md").read_bytes())))
    changelog = CHANGELOG if name == "jiffy" else CHANGELOG.replace(
        "See CHANGELOG.md.gz.", "See the changelog of the package jiffy.")
    entries += [
        Entry("changelog.gz", gzipped(changelog.format(**about).encode())),
        Entry("copyright", COPYRIGHT.format(name=name, offer=offer).encode()),
        Entry("licences.txt.gz", gzipped(notice)),
    ]
    return [entry.below(f"usr/share/doc/{name}") for entry in entries]


def host_files(inputs: Inputs) -> list[Entry]:
    installed = [
        *layout.programs(inputs, gvisor=False),
        *layout.package_files(inputs, "deb"),
        *layout.references(inputs, packed=True),
        layout.apparmor_profile("/usr"),
    ]
    entries = [
        entry._replace(name=entry.name.replace(*ZSH_DIRECTORY)).below("usr") for entry in installed
    ]
    # Debian 12 expects units in /lib, which is a symbolic link to /usr/lib.
    entries.append(layout.unit("/usr"))
    entries.append(Entry("etc/jiffy/environment", DEBIAN / "environment", 0o600))
    return entries


@dataclass
class Package:
    name: str
    entries: list[Entry]
    depends: str
    # Additional lines of the control file.
    fields: str = ""
    # Directory with maintainer scripts.
    scripts: Path | None = None

    def control(self, inputs: Inputs) -> str:
        summary, text = TEXTS[self.name]
        size = sum((entry.size() + 1023) // 1024 for entry in self.entries)
        return CONTROL.format(
            name=self.name, version=inputs.version, maintainer=MAINTAINER, size=size,
            depends=self.depends, more=self.fields, summary=summary, text=text)

    def write(self, inputs: Inputs) -> None:
        root = inputs.work / f"deb-{self.name}"
        place(self.entries, root, inputs.epoch)
        about = root / "DEBIAN"
        write_file(about / "control", self.control(inputs).encode())
        write_file(about / "md5sums", md5sums(self.entries))
        if self.scripts:
            write_file(about / "conffiles", b"/etc/jiffy/environment\n")
            write_file(about / "templates", (self.scripts / "templates").read_bytes())
            for script in ("config", "postinst", "prerm", "postrm"):
                write_file(about / script, (self.scripts / script).read_bytes(), PROGRAM_MODE)
        # dpkg-deb reads the modes and times of directories from the file system.
        for path in [root, *root.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
            os.utime(path, (inputs.epoch, inputs.epoch))
        target = inputs.out / f"{self.name}_{inputs.version}_amd64.deb"
        compression = ["-Zgzip", "-z1"] if inputs.fast else ["-Zxz", "-z9", "--threads-max=1"]
        command = ["dpkg-deb", "--root-owner-group", *compression, "--build", root, target]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        target.chmod(FILE_MODE)
        inputs.contents[target.name] = "gvisor" if self.name == "jiffy-gvisor" else "host"


def md5sums(entries: list[Entry]) -> bytes:
    lines = []
    for entry in sorted(entries):
        if not entry.name.startswith("etc/"):
            with entry.open() as content:
                digest = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))
            lines.append(f"{digest.hexdigest()}  {entry.name}\n")
    return "".join(lines).encode()


def packages(inputs: Inputs) -> list[Package]:
    entries = host_files(inputs) + documents(inputs, "jiffy", inputs.licences["host"])
    found = [Package("jiffy", entries, DEPENDS, f"Recommends: {RECOMMENDS}\n", DEBIAN)]
    if GVISOR in inputs.programs:
        entries = [layout.gvisor_program(inputs).below("usr")]
        entries += documents(inputs, "jiffy-gvisor", inputs.licences["gvisor"])
        # It is linked statically, because it executes itself again in an empty root directory.
        override = f"jiffy-gvisor: statically-linked-binary [usr/lib/jiffy/{GVISOR}]\n"
        entries.append(Entry("usr/share/lintian/overrides/jiffy-gvisor", override.encode()))
        found.append(Package("jiffy-gvisor", entries, f"jiffy (= {inputs.version})"))
    return found


def build(inputs: Inputs) -> None:
    for package in packages(inputs):
        package.write(inputs)

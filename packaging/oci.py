"""Container image as an OCI layout in a tar file: Debian, the .deb packages, tini."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import deb
from files import FILE_MODE, PROGRAM_MODE, Entry, sha256_of, write_tar
from inputs import ROOT, Inputs

SUITE = "bookworm"
ROOT_PACKAGES = ["ca-certificates", "e2fsprogs", "erofs-utils", "iproute2", "nftables", "tini"]
# Files that are omitted from the image. Copyright files are retained.
OMITTED_FILES = ["/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/doc/*"]
ENTRYPOINT = "usr/lib/jiffy/entrypoint"
STATUS = "var/lib/dpkg/status"


class Blobs:
    """Blobs of an image, each in a file named by its digest."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True)

    def add(self, content: bytes, media_type: str) -> dict:
        digest = hashlib.sha256(content).hexdigest()
        (self.directory / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def add_layer(self, archive: Path, level: int) -> tuple[dict, str]:
        """Compresses a layer. Returns its descriptor and the digest of its content."""
        packed = self.directory / "unfinished"
        with archive.open("rb") as source, packed.open("wb") as target:
            with gzip.GzipFile(filename="", fileobj=target, mode="wb", compresslevel=level, mtime=0) as output:
                shutil.copyfileobj(source, output, 1 << 20)
        digest, size = sha256_of(packed), packed.stat().st_size
        packed.rename(self.directory / digest)
        media_type = "application/vnd.oci.image.layer.v1.tar+gzip"
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}, sha256_of(archive)


def debian_root(inputs: Inputs) -> Path:
    """Returns the tar file of the Debian root, which is created once for each list of packages."""
    packages = ",".join(ROOT_PACKAGES)
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in OMITTED_FILES]
    options.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    key = hashlib.sha256(" ".join([SUITE, packages, *options]).encode()).hexdigest()[:16]
    path = inputs.cache / f"image-root-{key}.tar"
    # The time is constant, because the cached root may be older than the commit.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    command = [ROOT / "packaging/debian-root", SUITE, path, packages, *options]
    subprocess.run(command, check=True, env=environment)
    return path


def jiffy_layer(inputs: Inputs, root: Path) -> Path:
    """Returns a layer with the files of the .deb packages, the entrypoint and dpkg's records."""
    status = dpkg_status(root)
    entries = [
        Entry(ENTRYPOINT, ROOT / "packaging/oci/entrypoint", PROGRAM_MODE),
    ]
    for package in deb.packages(inputs):
        control = package.control(inputs)
        status += control.replace("\nVersion:", "\nStatus: install ok installed\nVersion:", 1).encode() + b"\n"
        listed = "".join(f"/{entry.name}\n" for entry in sorted(package.entries))
        entries.append(Entry(f"var/lib/dpkg/info/{package.name}.list", listed.encode()))
        entries += package.entries
    entries = [
        Entry(entry.name, b"oci\n") if entry.name == "usr/lib/jiffy/package" else entry
        for entry in entries
        # Unit files are omitted: the container has no systemd, and /lib is a symbolic link.
        if not entry.name.startswith("lib/")
    ]
    entries.append(Entry(STATUS, status))
    return layer(inputs, "jiffy", entries)


def dpkg_status(root: Path) -> bytes:
    with tarfile.open(root) as archive:
        return archive.extractfile(f"./{STATUS}").read()


def layer(inputs: Inputs, name: str, entries: list[Entry]) -> Path:
    path = inputs.work / f"layer-{name}.tar"
    with path.open("wb") as output:
        write_tar(output, entries, inputs.epoch)
    return path


def build(inputs: Inputs) -> None:
    layout = inputs.work / "oci"
    blobs = Blobs(layout / "blobs/sha256")
    root = debian_root(inputs)
    layers = [root, jiffy_layer(inputs, root)]
    if "base.tpl" in inputs.templates:
        name = "usr/share/jiffy/templates/base.tpl"
        layers.append(layer(inputs, "template", [Entry(name, inputs.templates["base.tpl"])]))
    packed = [blobs.add_layer(path, inputs.level(9)) for path in layers]
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(inputs.epoch))
    config = {
        "created": moment,
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Entrypoint": ["/usr/bin/tini", "-g", "--", f"/{ENTRYPOINT}"],
            "ExposedPorts": {"3000/tcp": {}},
            "Volumes": {"/var/lib/jiffy": {}},
            "WorkingDir": "/root",
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "jiffy",
                "org.opencontainers.image.version": inputs.version,
                "org.opencontainers.image.licenses": "Apache-2.0 AND GPL-2.0-only",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for _, digest in packed]},
        "history": [{"created": moment, "created_by": "scripts/package"} for _ in packed],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blobs.add(encoded(config), "application/vnd.oci.image.config.v1+json"),
        "layers": [descriptor for descriptor, _ in packed],
    }
    described = blobs.add(encoded(manifest), manifest["mediaType"])
    described["platform"] = {"architecture": "amd64", "os": "linux"}
    # Names of the image after `podman load` and `docker load`.
    described["annotations"] = {
        "org.opencontainers.image.ref.name": f"jiffy:{inputs.version}",
        "io.containerd.image.name": f"docker.io/library/jiffy:{inputs.version}",
    }
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [described],
    }
    entries = [
        Entry("oci-layout", encoded({"imageLayoutVersion": "1.0.0"})),
        Entry("index.json", encoded(index)),
    ]
    for path in sorted(blobs.directory.iterdir()):
        entries.append(Entry(f"blobs/sha256/{path.name}", path))
    target = inputs.out / f"jiffy-{inputs.version}.oci.tar"
    with target.open("wb") as output:
        write_tar(output, entries, inputs.epoch)
    target.chmod(FILE_MODE)
    inputs.contents[target.name] = "both"
    inputs.debian_status[target.name] = dpkg_status(root)


def encoded(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

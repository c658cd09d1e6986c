#!/usr/bin/env python3
"""Builds the packages of this version from existing programs and template files.

The packages are reproducible. The only time that they contain is SOURCE_DATE_EPOCH, which defaults
to the time of the last commit. They contain no paths or names of this host.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import archive
import deb
import layout
import licences
import npm
import oci
import sbom
import wheels
from components import Components
from files import place, sha256_of, write_file
from inputs import (
    ROOT, Inputs, commit_time, packed_templates, stripped_programs, workspace_version
)

KINDS = ["wheels", "deb", "archive", "npm", "templates", "oci"]


def options():
    parser = argparse.ArgumentParser(prog="scripts/package", description=__doc__.splitlines()[0])
    target = Path(os.environ.get("TARGET_DIR", ROOT / "target"))
    parser.add_argument("--out", type=Path, default=target / "packages",
                        help="directory of the packages; it is replaced")
    parser.add_argument("--programs", type=Path, default=target / "release",
                        help="directory of the programs")
    parser.add_argument("--templates", type=Path, help="directory of template files (NAME.tpl)")
    parser.add_argument("--cache", type=Path, default=target / "package-cache",
                        help="directory for the root of the image and for listed templates")
    parser.add_argument("--sdk", type=Path,
                        help="directory of packages that scripts/sdk-packages built; they are added")
    parser.add_argument("--only", action="append", choices=KINDS,
                        help="build only this kind of package; may be repeated")
    parser.add_argument("--fast", action="store_true", help="compress as fast as possible, for tests")
    parser.add_argument("--version", default=workspace_version(),
                        help="version of the packages, for tests of upgrades")
    parser.add_argument("--install", type=Path, metavar="DIRECTORY",
                        help="install into this directory and build no packages")
    parser.add_argument("--prefix", default="/usr/local",
                        help="with --install: prefix that the installed files name")
    return parser.parse_args()


def read_inputs(chosen, work: Path) -> Inputs:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return Inputs(
        version=chosen.version,
        epoch=int(epoch) if epoch else commit_time(),
        programs=stripped_programs(chosen.programs, work),
        templates=packed_templates(chosen.templates, chosen.cache.absolute(), chosen.fast),
        out=work / "out",
        work=work,
        cache=chosen.cache.absolute(),
        fast=chosen.fast,
    )


def build(inputs: Inputs, kinds: list[str], sdk: Path | None) -> None:
    inputs.out.mkdir()
    for package in sorted(sdk.iterdir()) if sdk else []:
        write_file(inputs.out / package.name, package.read_bytes())
    components = Components(inputs)
    inputs.licences["host"] = licences.notice(
        "Licences of Jiffy", components.host, "kernel-patches.gz")
    if components.gvisor:
        inputs.licences["gvisor"] = licences.notice(
            "Licences of jiffy-gvisor", components.gvisor, None)
    makers = {
        "wheels": wheels.build, "deb": deb.build, "archive": archive.build, "npm": npm.build,
        "templates": archive.build_templates, "oci": oci.build,
    }
    for kind in kinds:
        start = time.monotonic()
        makers[kind](inputs)
        print(f"   {kind}: {time.monotonic() - start:.1f} s", flush=True)
    for kind, text in sorted(inputs.licences.items()):
        name = "licences.txt" if kind == "host" else f"licences-{kind}.txt"
        write_file(inputs.out / name, text)
    sbom.build(inputs, components.by_content())
    sums = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(inputs.out.iterdir())]
    write_file(inputs.out / "SHA256SUMS", "".join(sums).encode())


def main() -> None:
    chosen = options()
    os.umask(0o022)
    os.environ["LC_ALL"] = "C.UTF-8"
    with tempfile.TemporaryDirectory(prefix="jiffy-package.") as directory:
        inputs = read_inputs(chosen, Path(directory))
        os.environ["SOURCE_DATE_EPOCH"] = str(inputs.epoch)
        if chosen.install:
            entries = layout.installation(inputs, chosen.prefix)
            place(entries, chosen.install, inputs.epoch)
            print(f"   installed {len(entries)} files below {chosen.install}")
            return
        build(inputs, [kind for kind in KINDS if not chosen.only or kind in chosen.only], chosen.sdk)
        publish(inputs.out, chosen.out.absolute())


def publish(built: Path, out: Path) -> None:
    """Moves the packages to their directory, which changes only once all of them are complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.move(built, unfinished)
    shutil.rmtree(out, ignore_errors=True)
    unfinished.rename(out)
    for path in sorted(out.iterdir()):
        print(f"   {path.stat().st_size / 1e6:8.1f} MB  {path}")


if __name__ == "__main__":
    main()

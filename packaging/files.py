"""Entries of packages, and archives whose bytes depend on their entries only."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple

PROGRAM_MODE = 0o755
FILE_MODE = 0o644


class Entry(NamedTuple):
    """File of a package. `source` is its content or the path of a file with its content."""

    name: str
    source: bytes | Path
    mode: int = FILE_MODE

    def content(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    def size(self) -> int:
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.stat().st_size

    def open(self):
        if isinstance(self.source, bytes):
            return io.BytesIO(self.source)
        return self.source.open("rb")

    def below(self, prefix: str) -> "Entry":
        return self._replace(name=f"{prefix}/{self.name}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, content: bytes, mode: int = FILE_MODE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


def place(entries: list[Entry], directory: Path, epoch: int) -> None:
    """Writes entries into a directory. Files in use are replaced, not overwritten."""
    for entry in sorted(entries):
        path = directory / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".new")
        with entry.open() as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        unfinished.chmod(entry.mode)
        os.utime(unfinished, (epoch, epoch))
        unfinished.rename(path)


def tar_header(name: str, epoch: int, mode: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.mtime, header.mode = epoch, mode
    header.uid = header.gid = 0
    header.uname = header.gname = "root"
    return header


def write_tar(output, entries: list[Entry], epoch: int, directories: bool = True) -> None:
    """Writes a tar archive with sorted entries, all owned by root and equally old."""
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        seen: set[str] = set()
        for entry in sorted(entries):
            parents = Path(entry.name).parents
            for parent in reversed([str(p) for p in parents if str(p) != "."]):
                if directories and parent not in seen:
                    seen.add(parent)
                    header = tar_header(parent, epoch, 0o755)
                    header.type = tarfile.DIRTYPE
                    archive.addfile(header)
            header = tar_header(entry.name, epoch, entry.mode)
            header.size = entry.size()
            with entry.open() as content:
                archive.addfile(header, content)


def gzipped(content: bytes, level: int = 9) -> bytes:
    return gzip.compress(content, level, mtime=0)


def write_tar_gz(path: Path, entries: list[Entry], epoch: int, level: int, **options) -> None:
    with path.open("wb") as file:
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=level, mtime=0) as packed:
            write_tar(packed, entries, epoch, **options)


def write_tar_zst(path: Path, entries: list[Entry], epoch: int, level: int) -> None:
    # With several threads, the output would depend on their number.
    command = ["zstd", "--quiet", "--single-thread", f"-{level}", "--force", "-o", str(path), "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as packer:
        write_tar(packer.stdin, entries, epoch)
        packer.stdin.close()
    if packer.returncode != 0:
        raise SystemExit(f"package: zstd failed to write {path}")
    path.chmod(FILE_MODE)

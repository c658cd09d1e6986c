"""Measures the cost of kernel and disk operations for a program. Prints JSON: name, unit, value.
usage: work.py DIRECTORY MIB SECONDS"""
import json
import mmap
import os
import random
import sys
import time

PLACE, MIB, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
PAGE = 4096
found = []


def per_second(name, work, unit="per second"):
    """Measures operations per second. `work` returns the number of operations of one call."""
    began, done = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < SECONDS:
        done += work()
    found.append((name, unit, done / took))


def buffered_writes():
    path, piece = os.path.join(PLACE, "sequential"), os.urandom(1 << 20)
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(MIB):
            file.write(piece)
    found.append(("buffered sequential writes", "MB/s", MIB * 1.048576 / (time.perf_counter() - began)))
    # The writes that follow must not compete with the write-back of this file.
    os.sync()
    return path


def random_io(path):
    try:
        # Without the page cache, where the file system supports this.
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        file = os.open(path, os.O_RDWR)
    # Direct I/O requires an aligned buffer, which a mapping is.
    buffer, last = mmap.mmap(-1, PAGE), MIB * 256 - 1
    def reads():
        for _ in range(32):
            os.preadv(file, [buffer], random.randint(0, last) * PAGE)
        return 32
    def writes():
        for _ in range(32):
            os.pwritev(file, [buffer], random.randint(0, last) * PAGE)
        return 32
    per_second("random reads of 4 KiB", reads)
    per_second("random writes of 4 KiB", writes)
    os.close(file)
    def synced():
        os.pwrite(file, b"x" * PAGE, random.randint(0, last) * PAGE)
        os.fsync(file)
        return 1
    file = os.open(path, os.O_RDWR)
    per_second("4 KiB and fsync", synced)
    os.close(file)


def calls():
    for _ in range(1000):
        os.getppid()
    return 1000


def forks():
    child = os.fork()
    if child == 0:
        # Without the cleanup of Python, which would be part of the time.
        os._exit(0)
    os.waitpid(child, 0)
    return 1


def spawns():
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    return 1


def faults():
    pages = 1024
    memory = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Small pages, so that each write is one page fault.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass
    for at in range(0, pages * PAGE, PAGE):
        memory[at] = 1
    memory.close()
    return pages


def files():
    for number in range(100):
        path = os.path.join(PLACE, f"file-{number}")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    for number in range(100):
        os.unlink(os.path.join(PLACE, f"file-{number}"))
    return 100


per_second("system calls (getppid)", calls)
per_second("page faults", faults)
per_second("forks", forks)
per_second("spawns of `true`", spawns)
per_second("files made and removed", files)
path = buffered_writes()
random_io(path)
os.unlink(path)
json.dump(found, sys.stdout)

"""Counts of all that a process and those that it starts do, by the kernel's performance events."""
import ctypes, errno, os, pathlib, struct, subprocess, sys, tempfile

LIBC = ctypes.CDLL(None, use_errno=True)
SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
SOFTWARE, TRACEPOINT = 1, 2
ATTRIBUTE_BYTES, INHERIT = 128, 1 << 1
EVENTS = {"processor time, ms": (SOFTWARE, 1), "page faults": (SOFTWARE, 2), "context switches": (SOFTWARE, 3)}


def system_call_event():
    """Number of the trace point of system calls; none: this kernel has no tracefs."""
    with tempfile.TemporaryDirectory(prefix="jiffy-bench-") as place:
        if subprocess.run(["mount", "-t", "tracefs", "none", place], capture_output=True).returncode:
            return None
        try:
            return int((pathlib.Path(place) / "events/raw_syscalls/sys_enter/id").read_text())
        except OSError:
            return None
        finally:
            subprocess.run(["umount", place], check=True)


class Counts:
    """Of the threads that process `pid` has now, and of threads and processes that they start."""

    def __init__(self, pid):
        events = dict(EVENTS)
        if (number := system_call_event()) is not None:
            events["system calls"] = (TRACEPOINT, number)
        self.files = {name: [] for name in events}
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            for name, (kind, config) in events.items():
                if (file := self.opened(kind, config, thread)) is not None:
                    self.files[name].append(file)

    @staticmethod
    def opened(kind, config, thread):
        attribute = bytearray(ATTRIBUTE_BYTES)
        struct.pack_into("IIQQQQQ", attribute, 0, kind, ATTRIBUTE_BYTES, config, 0, 0, 0, INHERIT)
        buffer = (ctypes.c_char * ATTRIBUTE_BYTES).from_buffer(attribute)
        file = LIBC.syscall(SYS_PERF_EVENT_OPEN, buffer, thread, -1, -1, 0)
        if file < 0 and ctypes.get_errno() == errno.ESRCH:
            return None  # It has ended since.
        if file < 0:
            sys.exit(f"perf_event_open: {os.strerror(ctypes.get_errno())}: root is needed")
        return file

    def read(self):
        sums = {name: sum(struct.unpack("Q", os.read(file, 8))[0] for file in files)
                for name, files in self.files.items()}
        sums["processor time, ms"] /= 1e6
        return sums

    def close(self):
        for file in sum(self.files.values(), []):
            os.close(file)

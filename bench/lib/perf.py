"""Counts of performance events of a process and its descendants."""
import ctypes, errno, os, pathlib, struct, subprocess, sys, tempfile

LIBC = ctypes.CDLL(None, use_errno=True)
SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[os.uname().machine]
# Types of events: PERF_TYPE_SOFTWARE and PERF_TYPE_TRACEPOINT.
SOFTWARE, TRACEPOINT = 1, 2
# Size of `struct perf_event_attr`, and offset of the fields `uprobe_path` and `probe_offset`.
ATTRIBUTE_BYTES, PROBE_AT = 128, 56
# Flag `inherit`: descendants are counted too.
INHERIT = 1 << 1
ALLOCATORS = ("malloc", "calloc", "realloc", "posix_memalign")
EVENTS = {"processor time, ms": (SOFTWARE, 1), "page faults": (SOFTWARE, 2), "context switches": (SOFTWARE, 3)}


def system_call_event():
    """Returns the number of the trace point of system calls. `None` if the kernel has no tracefs."""
    with tempfile.TemporaryDirectory(prefix="jiffy-bench-") as place:
        if subprocess.run(["mount", "-t", "tracefs", "none", place], capture_output=True).returncode:
            return None
        try:
            return int((pathlib.Path(place) / "events/raw_syscalls/sys_enter/id").read_text())
        except OSError:
            return None
        finally:
            subprocess.run(["umount", place], check=True)


def probes():
    """Returns probe events for the allocation functions of the C library. Empty if the kernel does not
    support such probes."""
    try:
        kind = int(pathlib.Path("/sys/bus/event_source/devices/uprobe/type").read_text())
    except OSError:
        return []
    addresses = (ctypes.cast(getattr(LIBC, name), ctypes.c_void_p).value for name in ALLOCATORS)
    return [(kind, 0, *place(address)) for address in addresses]


def place(address):
    """Returns the file that is mapped at an address, and the offset in the file."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        area, _, offset, _, _, *path = line.split(None, 5)
        first, end = (int(number, 16) for number in area.split("-"))
        if first <= address < end:
            return path[0], address - first + int(offset, 16)
    sys.exit("perf: the C library is not mapped")


class Counts:
    """Counts of the current threads of process `pid` and of their descendants; or allocations of these
    threads only. A counted allocation takes 3 us. Probes are not inherited, because the kernel would
    then read the path from the memory of the descendants."""

    def __init__(self, pid, allocations=False):
        events = {name: [event] for name, event in EVENTS.items()}
        if (number := system_call_event()) is not None:
            events["system calls"] = [(TRACEPOINT, number)]
        if allocations:
            found = probes()
            events = {"allocations": found} if found else {}
        self.files = {name: [] for name in events}
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            for name, several in events.items():
                opened = (self.opened(thread, *event) for event in several)
                self.files[name].extend(file for file in opened if file is not None)

    @staticmethod
    def opened(thread, kind, config, path=None, offset=0):
        """Opens a counter of one event for one thread. Returns its file, or `None` if the thread
        has exited."""
        attribute = bytearray(ATTRIBUTE_BYTES)
        flags = 0 if path else INHERIT
        struct.pack_into("IIQQQQQ", attribute, 0, kind, ATTRIBUTE_BYTES, config, 0, 0, 0, flags)
        name = ctypes.create_string_buffer((path or "").encode())
        if path:
            struct.pack_into("QQ", attribute, PROBE_AT, ctypes.addressof(name), offset)
        buffer = (ctypes.c_char * ATTRIBUTE_BYTES).from_buffer(attribute)
        file = LIBC.syscall(SYS_PERF_EVENT_OPEN, buffer, thread, -1, -1, 0)
        if file < 0 and ctypes.get_errno() == errno.ESRCH:
            return None  # The thread has exited.
        if file < 0:
            sys.exit(f"perf_event_open: {os.strerror(ctypes.get_errno())}: root is required")
        return file

    def read(self):
        """Returns the sum of each event over all threads."""
        sums = {name: sum(struct.unpack("Q", os.read(file, 8))[0] for file in files)
                for name, files in self.files.items()}
        if "processor time, ms" in sums:
            sums["processor time, ms"] /= 1e6
        return sums

    def close(self):
        for file in sum(self.files.values(), []):
            os.close(file)

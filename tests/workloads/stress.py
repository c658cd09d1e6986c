"""stress-ng, which verifies its own results."""

from sandbox import Failed, Sandbox

# Some stressors of each class: computation, memory, files, pipes, signals, timers, processes.
STRESSORS = ["cpu", "matrix", "vm", "memcpy", "hdd", "pipe", "fork", "sigq", "timer", "mmap", "futex", "sock"]
CLASSES = ["cpu", "cpu-cache", "memory", "vm", "io", "filesystem", "network", "pipe", "scheduler", "interrupt", "os"]
# Stressors that may not complete an operation within the one or two seconds of their class.
SLOW = ["vm-segv"]
# Messages of stress-ng about wrong results and failed stressors.
WRONG = ("fail:", "unsuccessful", "verification failed", "corrupt")


def check_stressors(sandbox, command, seconds):
    """Runs stress-ng. Fails if it reports a wrong result."""
    status, text = sandbox.run(f"cd /home/user && {command}", user="user", timeout=seconds)
    wrong = [line for line in text.splitlines() if any(word in line for word in WRONG)]
    # Exit status 0: success; 3: some stressors lack resources; 4: not supported on this system.
    if status not in (0, 3, 4) or wrong:
        raise Failed(f"{command}: exit {status}\n" + "\n".join(wrong[:40]) + "\n" + text[-3000:])


def brief(engine, seconds=30):
    """stress-ng finds no wrong result in half a minute of some stressors of every class."""
    sandbox = Sandbox.create(memory="1GiB")
    seconds_each = max(1, seconds // len(STRESSORS))
    for name in STRESSORS:
        check_stressors(sandbox, f"stress-ng --verify --timeout {seconds_each}s --{name} 2 --vm-bytes 64M --hdd-bytes 64M", seconds_each + 90)
    sandbox.check_kernel()


def classes(engine, seconds=600):
    """stress-ng finds no wrong result in ten minutes of all stressors of its classes."""
    sandbox = Sandbox.create(memory="2GiB")
    for name in CLASSES:
        seconds_each = seconds // len(CLASSES)
        # All stressors of the class run one after the other and share its time.
        count = f"$(stress-ng --class {name}? 2>&1 | tail -n +1 | tr ' ' '\\n' | grep -c '^[a-z]')"
        check_stressors(sandbox, f"n={count}; s=$(({seconds_each} / (n > 0 ? n : 1))); [ $s -ge 1 ] || s=1; "
                                 f"stress-ng --verify --class {name} --exclude {','.join(SLOW)} --sequential 2 --timeout ${{s}}s "
                                 "--vm-bytes 128M --hdd-bytes 64M", 1800)
    for name in SLOW:
        check_stressors(sandbox, f"stress-ng --verify --{name} 2 --timeout 30s", 120)
    sandbox.check_kernel()

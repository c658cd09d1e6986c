"""Other sandboxes of this host: create to the first `true`, snapshot, restore to the first `true`.

A peer's `missing` is the reason why it cannot be measured on this host, or `None`. Peers manage
sandboxes with `create`, `exec`, `snapshot`, `restore` and `remove`. `snapshots` is false if the peer
does not support snapshots.
"""
import json, os, pathlib, shutil, socket, subprocess, tempfile, time

from daemon import REAL, ROOT

# Bytes that `peer_init.c` writes at its start, and after a successful program.
READY, RAN = b"\x01", b"\x02"
# Maximum seconds of a command, and of an answer of a guest on the serial port.
LIMIT, SERIAL_LIMIT = 60, 10
# KVM without VT-x rejects the register of this feature.
CPU = "host,arch-capabilities=off"


def run(*words, **more):
    """Runs a command. Returns its output. Raises `RuntimeError` if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=LIMIT, **more)
    if done.returncode:
        raise RuntimeError(f"{pathlib.Path(words[0]).name}: {done.stdout}{done.stderr}")
    return done.stdout


def found(variable, name):
    """Returns the path of a program: from the environment variable, or from PATH."""
    return os.environ.get(variable) or shutil.which(name)


def built_init(work):
    """Builds the static program that all guests of peers run, and an initial ramdisk with it."""
    root = pathlib.Path(work) / "root"
    root.mkdir()
    run("cc", "-static", "-Os", "-o", root / "init", ROOT / "bench/lib/peer_init.c")
    shutil.copy(root / "init", root / "true")
    for name in ("dev", "proc", "sys", "tmp"):
        (root / name).mkdir()
    with open(pathlib.Path(work) / "initrd", "wb") as out:
        names = b"\n".join(str(path.relative_to(root)).encode() for path in sorted(root.rglob("*")))
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names, stdout=out, check=True)
    return root


class Jiffy:
    """Daemon of this tree with default settings: jail, network, API, a Debian template."""

    snapshots = True

    def __init__(self, daemon, engine):
        self.daemon, self.engine, self.name = daemon, engine, f"jiffy, {engine}"
        usable = {each["name"]: each for each in daemon.request("GET", "/engines")}
        self.missing = None if usable[engine]["usable"] else usable[engine].get("why", "not usable")

    def create(self):
        return self.daemon.create("base", engine=self.engine)

    def exec(self, sandbox):
        self.daemon.exec(sandbox, "true")

    def snapshot(self, sandbox):
        return self.daemon.request("POST", f"/sandboxes/{sandbox[0]}/snapshots", {})["snapshotID"]

    def restore(self, snapshot):
        return self.daemon.create(snapshot)

    def remove(self, sandbox):
        self.daemon.request("DELETE", f"/sandboxes/{sandbox[0]}")

    def remove_snapshot(self, snapshot):
        self.daemon.request("DELETE", f"/templates/{snapshot}")


class Container:
    """OCI container runtime: a static program as the first process, separate namespaces,
    no network."""

    def __init__(self, work, name, program, options=(), snapshots=False):
        self.name, self.program, self.snapshots = name, program, snapshots
        self.missing = None if program else f"no {name.split(',')[0]}"
        self.work, self.number, self.root = pathlib.Path(work), 0, pathlib.Path(work) / "root"
        state = self.work / f"state-{name.split(',')[0]}"
        state.mkdir()
        self.options = ["--root", state, *options]

    def bundle(self):
        """Returns the directory with the configuration of a container, which is created by the
        first call."""
        path = self.work / f"bundle-{self.name.split(',')[0]}"
        if not path.exists():
            path.mkdir()
            spaces = ("pid", "mount", "ipc", "uts", "network")
            mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
            (path / "config.json").write_text(json.dumps({
                "ociVersion": "1.0.2", "root": {"path": str(self.root), "readonly": True}, "mounts": mounts,
                "process": {"args": ["/init", "wait"], "cwd": "/", "user": {"uid": 0, "gid": 0},
                            "env": ["PATH=/"], "terminal": False},
                "linux": {"namespaces": [{"type": space} for space in spaces]}}))
        return path

    def call(self, *words):
        # Remaining processes must not inherit the pipes.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run([self.program, *map(str, self.options), *map(str, words)], stdin=subprocess.DEVNULL,
                                  stdout=output, stderr=output, timeout=LIMIT)
            if done.returncode:
                output.seek(0)
                raise RuntimeError(f"{self.name} {words[0]}: {output.read().decode(errors='replace')}")

    def new_name(self):
        self.number += 1
        return f"peer-{os.getpid()}-{self.number}"

    def create(self):
        name = self.new_name()
        self.call("run", "--detach", "--bundle", self.bundle(), name)
        return name

    def exec(self, name):
        self.call("exec", name, "/true", "exit")

    def snapshot(self, name):
        image = self.work / f"image-{name}"
        image.mkdir()
        self.call("checkpoint", "--image-path", image, "--leave-running", name)
        return image

    def restore(self, image):
        name = self.new_name()
        self.call("restore", "--detach", "--image-path", image, "--bundle", self.bundle(), name)
        return name

    def remove(self, name):
        self.call("delete", "--force", name)

    def remove_snapshot(self, image):
        shutil.rmtree(image)


class Podman:
    """podman with an image of the static program, without a network."""

    name, snapshots = "podman", False

    def __init__(self, work):
        self.program = found("PODMAN", "podman")
        self.missing = None if self.program else "no podman"
        self.root = pathlib.Path(work) / "root"

    def create(self):
        return run(self.program, "run", "--detach", "--network", "none", "--rootfs", self.root, "/init", "wait").strip()

    def exec(self, name):
        run(self.program, "exec", name, "/true", "exit")

    def remove(self, name):
        run(self.program, "rm", "--force", "--time", "0", name)


class Qemu:
    """QEMU's machine `microvm` with the guest kernel of this tree: a ramdisk with one static program,
    controlled over a serial port. No jail, no network, no disk."""

    name, snapshots = "qemu, microvm", True

    def __init__(self, work):
        self.work, self.number = pathlib.Path(work), 0
        self.program = found("QEMU", "qemu-system-x86_64")
        self.missing = None
        if not self.program:
            self.missing = "no qemu-system-x86_64"
        elif not os.access("/dev/kvm", os.W_OK):
            self.missing = "no /dev/kvm"
        elif not shutil.which("zstd"):
            self.missing = "no zstd"
        else:
            self.kernel = self.work / "vmlinux"
            run("zstd", "-dq", ROOT / "kernel/vmlinux.zst", "-o", self.kernel)

    def start(self, *more):
        """Starts QEMU. Returns its process and its connections: serial port, control socket
        (QMP), and a reader of the answers on the control socket."""
        self.number += 1
        sockets = [self.work / f"qemu-{self.number}-{what}" for what in ("serial", "control")]
        listeners = []
        for path in sockets:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(LIMIT)
            listeners.append(listener)
        serial, control = sockets
        process = subprocess.Popen([
            self.program, "-M", "microvm,acpi=off", "-accel", "kvm", "-cpu", CPU, "-smp", "2", "-m", "256",
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-kernel", str(self.kernel),
            "-initrd", str(self.work / "initrd"), "-append", "quiet console=hvc9 panic=-1 reboot=t",
            "-chardev", f"socket,id=s,path={serial}", "-serial", "chardev:s",
            "-chardev", f"socket,id=c,path={control}", "-mon", "chardev=c,mode=control", *more],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        machine = {"process": process}
        try:
            for name, listener in zip(("serial", "control"), listeners):
                machine[name] = listener.accept()[0]
                machine[name].settimeout(SERIAL_LIMIT if name == "serial" else LIMIT)
        except TimeoutError:
            process.kill()
            raise RuntimeError(f"{self.name} does not start: {process.stderr.read().decode(errors='replace')}")
        finally:
            for path, listener in zip(sockets, listeners):
                listener.close()
                path.unlink()
        machine["answers"] = machine["control"].makefile("r")
        machine["answers"].readline()
        try:
            self.control(machine, "qmp_capabilities")
        except RuntimeError:
            process.kill()
            raise RuntimeError(f"{self.name} ended: {process.stderr.read().decode(errors='replace')}")
        return machine

    @staticmethod
    def control(machine, command, **arguments):
        """Executes a command of QMP. Returns its result."""
        machine["control"].sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        for line in machine["answers"]:
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"qemu: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise RuntimeError(f"qemu exited during {command}")

    @staticmethod
    def await_byte(machine, wanted):
        """Reads the answer byte after the output of firmware and kernel."""
        while byte := machine["serial"].recv(1):
            if byte == wanted:
                return
        raise RuntimeError("a guest of qemu exited")

    def create(self):
        machine = self.start()
        try:
            self.await_byte(machine, READY)
        except BaseException:
            self.remove(machine)
            raise
        return machine

    def exec(self, machine):
        machine["serial"].sendall(b"x")
        try:
            self.await_byte(machine, RAN)
        except TimeoutError:
            raise RuntimeError(f"the guest does not answer within {SERIAL_LIMIT} s: QEMU may not support registers of KVM "
                               "without VT-x, and restore a guest without them")

    def snapshot(self, machine):
        image = self.work / f"image-qemu-{self.number}"
        self.control(machine, "migrate", uri=f"exec:cat >{image}")
        while (state := self.control(machine, "query-migrate").get("status")) not in ("completed", "failed"):
            time.sleep(0.001)
        if state == "failed":
            raise RuntimeError("qemu: the migration to a file failed")
        self.control(machine, "cont")
        return image

    def restore(self, image):
        machine = self.start("-incoming", f"exec:cat {image}")
        try:
            while self.control(machine, "query-status")["status"] == "inmigrate":
                time.sleep(0.001)
            if self.control(machine, "query-status")["status"] != "running":
                self.control(machine, "cont")
        except BaseException:
            self.remove(machine)
            raise
        return machine

    def remove(self, machine):
        machine["process"].kill()
        machine["process"].wait()
        machine["process"].stderr.close()
        machine["answers"].close()
        for name in ("serial", "control"):
            machine[name].close()

    def remove_snapshot(self, image):
        image.unlink()

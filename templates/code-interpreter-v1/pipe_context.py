"""Bash, JavaScript and TypeScript: a process per context that is told over a socket what to run and writes into pipes."""

import asyncio
import codecs
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import termios

from contexts import Context, Died

HERE = os.path.dirname(os.path.abspath(__file__))
COMING_UP = 60.0
# After something was read, what comes next may gather for so long: a line at a time would be slow.
GATHER = 0.002
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Pipe:
    """Output of a process: to whatever execution there is, at its pace, else nowhere."""

    def __init__(self, stream, fd, context):
        self.stream, self.fd, self.context = stream, fd, context
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._loop = asyncio.get_running_loop()
        self._paused = None
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._readable)

    def _readable(self):
        self._read(1 << 16)
        if self.fd is not None:
            self._loop.remove_reader(self.fd)
            self._paused = asyncio.ensure_future(self._resume())

    async def _resume(self):
        await asyncio.sleep(GATHER)
        if self.context.output:
            await self.context.output.room()
        self._paused = None
        if self.fd is not None:
            self._loop.add_reader(self.fd, self._readable)

    def _read(self, most):
        try:
            data = os.read(self.fd, most)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self.close()
        output = self.context.output
        if output and data:
            output.text(self.stream, self._decoder.decode(data))
        return len(data)

    def drain(self):
        """Takes what is there already, and not what a busy child goes on to write."""
        if self.fd is None:
            return
        left = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, b"\0" * 4))[0]
        while left > 0 and self.fd is not None:
            got = self._read(left)
            if got == 0:
                break
            left -= got

    def finish(self):
        """The execution is over: half a character will not become a whole one."""
        output = self.context.output
        if output:
            output.text(self.stream, self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def close(self):
        if self._paused:
            self._paused.cancel()
        if self.fd is not None:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = None


class PipeContext(Context):
    """One process. What it says over the socket, a line per answer, is the subclass's to understand."""

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self.output = None
        self._process = self._pidfd = self._socket = self._answer = None
        self._pipes = []

    def command(self, fd):
        raise NotImplementedError

    async def set_up(self):
        """Returns when the process listens."""
        raise NotImplementedError

    async def start(self):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        pipes = [os.pipe(), os.pipe()]
        try:
            self._process = subprocess.Popen(
                self.command(theirs.fileno()),
                stdin=subprocess.PIPE,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                pass_fds=[theirs.fileno()],
                cwd=self.cwd,
                env=self.process_env(),
                start_new_session=True,
            )
        finally:
            self._fd = theirs.fileno()
            theirs.close()
            for _, writer in pipes:
                os.close(writer)
            self._pipes = [Pipe(name, pipe[0], self) for name, pipe in zip(("stdout", "stderr"), pipes)]
            self._socket = ours
        loop = asyncio.get_running_loop()
        self._rest = b""
        loop.add_reader(ours, self._heard)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._ended)
        self._answer = loop.create_future()
        await asyncio.wait_for(self.set_up(), COMING_UP)
        self.drain()

    def alive(self):
        return self._process is not None and self._process.poll() is None

    def _heard(self):
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            answer = self.understand(line)
            if answer is not None and self._answer and not self._answer.done():
                self._answer.set_result(answer)

    def understand(self, line):
        """The answer in a line, if it is one to the last question."""
        return line

    def _ended(self):
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # What it said last counts, if it said it.
        self._heard()
        self.drain()
        if self._answer and not self._answer.done():
            self._answer.set_exception(Died())
            self._answer.exception()

    async def ask(self, data):
        """Sends an order and returns the answer's line."""
        if not self.alive():
            raise Died
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self.send(data)
        except OSError:
            raise Died from None
        return await self._answer

    async def send(self, data):
        raise NotImplementedError

    def drain(self):
        for pipe in self._pipes:
            pipe.drain()

    async def evaluate(self, code, env, output):
        self.output = output
        try:
            await self.evaluate_in(code, env, output)
        finally:
            self.drain()
            for pipe in self._pipes:
                pipe.finish()
            self.output = None

    async def evaluate_in(self, code, env, output):
        raise NotImplementedError

    def _signal(self, number):
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    async def interrupt(self):
        if self.alive():
            self._signal(signal.SIGINT)

    async def stop(self):
        loop = asyncio.get_running_loop()
        if self._process:
            self._signal(signal.SIGKILL)
        process, self._process = self._process, None
        if process:
            process.stdin.close()
            await loop.run_in_executor(None, process.wait)
        for fd in (self._socket, self._pidfd):
            if fd is not None:
                loop.remove_reader(fd)
        if self._socket:
            self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._socket = self._pidfd = None
        self.drain()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        if self._answer and not self._answer.done():
            self._answer.set_exception(Died())
            self._answer.exception()


class BashContext(PipeContext):
    """An interactive shell without a terminal: after an interrupt it is at its prompt again, which is never shown."""

    SETUP = "PS1= PS2= PS0=; unset PROMPT_COMMAND HISTFILE; set +H +m +o history; history -c\n"

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self._marks = 0

    def command(self, fd):
        return ["/bin/bash", "--noprofile", "--norc", "--noediting", "-i"]

    async def set_up(self):
        await self.ask((self.SETUP + self._mark()).encode())

    def _mark(self, status='"$?"'):
        """Has the shell say that it has come so far."""
        self._marks += 1
        return self._repeated_mark(status)

    def _repeated_mark(self, status):
        return f"printf '%s %s\\n' {self._marks} {status} >&{self._fd}\n"

    def understand(self, line):
        number, _, status = line.partition(b" ")
        return status if number == b"%d" % self._marks else None

    async def interrupt(self):
        await super().interrupt()
        if self.alive():
            # The mark may be what was interrupted. Whichever comes second is not understood any
            # more.
            await self.send(self._repeated_mark("130").encode())

    async def send(self, data):
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._write, self._process.stdin, data)

    @staticmethod
    def _write(stdin, data):
        stdin.write(data)
        stdin.flush()

    async def evaluate_in(self, code, env, output):
        if "\0" in code:
            output.error("ValueError", "Bash knows no NUL characters", "")
            return
        before, after = [], []
        for number, (key, value) in enumerate((k, v) for k, v in env.items() if IDENTIFIER.match(k)):
            had, old = f"__jiffy_h{number}", f"__jiffy_v{number}"
            before.append(f"{had}=${{{key}+x}} {old}=${{{key}-}}; export {key}={shlex.quote(value)}\n")
            after.append(f'if [ -n "${had}" ]; then {key}=${old}; else unset {key}; fi; unset {had} {old}\n')
        body = f"eval -- {shlex.quote(code)} </dev/null {self._fd}>&-\n"
        status = await self.ask("".join([*before, body, self._mark()]).encode("utf-8", "surrogateescape"))
        self.drain()
        if after:
            await self.ask("".join([*after, self._mark()]).encode())
        if status != b"0":
            number = status.decode("ascii", "replace")
            output.error("ExitStatus", number, f"exit status {number}")

    async def adopt(self, reseed, env, dropped):
        lines = [f"unset {key}\n" for key in dropped if IDENTIFIER.match(key)]
        lines += [f"export {k}={shlex.quote(v)}\n" for k, v in env.items() if IDENTIFIER.match(k)]
        if reseed:
            lines.append(f"RANDOM={int.from_bytes(os.urandom(4), 'little')}\n")
        await self.ask("".join([*lines, self._mark()]).encode())


class NodeContext(PipeContext):
    """`node.js`, which answers each order with a line of JSON."""

    def command(self, fd):
        return ["node", os.path.join(HERE, "node.js"), str(fd)]

    async def set_up(self):
        # It speaks first.
        await self._answer

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def _order(self, **order):
        return json.dumps(order).encode() + b"\n"

    async def evaluate_in(self, code, env, output):
        order = self._order(do="execute", id=self.count, code=code, env=env, typescript=self.language == "typescript")
        outcome = json.loads(await self.ask(order))
        self.drain()
        error, result = outcome.get("error"), outcome.get("result")
        if error:
            output.error(error["name"], error["value"], error["traceback"])
        elif result:
            output.result(result, True)

    # An endless loop behind an `await` hears no interrupt.
    KILLED_IF_DEAF = True

    async def adopt(self, reseed, env, dropped):
        seed = list(struct.unpack("4I", os.urandom(16))) if reseed else None
        changes = {**{key: None for key in dropped}, **env}
        await self.ask(self._order(do="adopt", id=self.count, changes=changes, seed=seed))

"""Bash, JavaScript and TypeScript contexts: one process per context, which receives code over a socket and writes output to pipes."""

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
# Seconds that a process may take to start.
START_TIMEOUT = 60.0
# Seconds to wait after each read, so that output is forwarded in larger pieces than single lines.
COALESCE_TIME = 0.002
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Pipe:
    """Reads output of a process for the current execution, at the client's pace. Discards output between executions."""

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
        await asyncio.sleep(COALESCE_TIME)
        if self.context.output:
            await self.context.output.room()
        self._paused = None
        if self.fd is not None:
            self._loop.add_reader(self.fd, self._readable)

    def _read(self, max_bytes):
        try:
            data = os.read(self.fd, max_bytes)
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
        """Reads the bytes that are in the pipe now. Does not wait for a child that continues to write."""
        if self.fd is None:
            return
        remaining = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, b"\0" * 4))[0]
        while remaining > 0 and self.fd is not None:
            count = self._read(remaining)
            if count == 0:
                break
            remaining -= count

    def finish(self):
        """Flushes the decoder at the end of an execution. An incomplete character is replaced."""
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
    """One process. It sends one line per reply over the socket; the subclass parses the lines."""

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self.output = None
        self._process = self._pidfd = self._socket = self._answer = None
        self._pipes = []

    def command(self, fd):
        raise NotImplementedError

    async def set_up(self):
        """Waits until the process accepts code."""
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
        loop.add_reader(ours, self._receive)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._ended)
        self._answer = loop.create_future()
        await asyncio.wait_for(self.set_up(), START_TIMEOUT)
        self.drain()

    def alive(self):
        return self._process is not None and self._process.poll() is None

    def _receive(self):
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
            answer = self.parse(line)
            if answer is not None and self._answer and not self._answer.done():
                self._answer.set_result(answer)

    def parse(self, line):
        """Returns the reply in a line, or `None` if it is not the reply to the last request."""
        return line

    def _ended(self):
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # The reply may have arrived just before the exit.
        self._receive()
        self.drain()
        if self._answer and not self._answer.done():
            self._answer.set_exception(Died())
            self._answer.exception()

    async def request(self, data):
        """Sends a request and returns the reply."""
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
    """An interactive shell without a terminal. Only an interactive shell survives an interrupt. Its prompt is empty."""

    SETUP = "PS1= PS2= PS0=; unset PROMPT_COMMAND HISTFILE; set +H +m +o history; history -c\n"

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self._marks = 0

    def command(self, fd):
        return ["/bin/bash", "--noprofile", "--norc", "--noediting", "-i"]

    async def set_up(self):
        await self.request((self.SETUP + self._mark()).encode())

    def _mark(self, status='"$?"'):
        """Returns a command that reports a new mark number and `status` over the socket."""
        self._marks += 1
        return self._repeated_mark(status)

    def _repeated_mark(self, status):
        return f"printf '%s %s\\n' {self._marks} {status} >&{self._fd}\n"

    def parse(self, line):
        number, _, status = line.partition(b" ")
        return status if number == b"%d" % self._marks else None

    async def interrupt(self):
        await super().interrupt()
        if self.alive():
            # The interrupt may have hit the command that prints the mark, so send it again.
            # `parse` ignores the second of two equal marks.
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
            output.error("ValueError", "Bash does not support NUL characters", "")
            return
        before, after = [], []
        for number, (key, value) in enumerate((k, v) for k, v in env.items() if IDENTIFIER.match(k)):
            had, old = f"__jiffy_h{number}", f"__jiffy_v{number}"
            before.append(f"{had}=${{{key}+x}} {old}=${{{key}-}}; export {key}={shlex.quote(value)}\n")
            after.append(f'if [ -n "${had}" ]; then {key}=${old}; else unset {key}; fi; unset {had} {old}\n')
        body = f"eval -- {shlex.quote(code)} </dev/null {self._fd}>&-\n"
        status = await self.request("".join([*before, body, self._mark()]).encode("utf-8", "surrogateescape"))
        self.drain()
        if after:
            await self.request("".join([*after, self._mark()]).encode())
        if status != b"0":
            number = status.decode("ascii", "replace")
            output.error("ExitStatus", number, f"exit status {number}")

    async def adopt(self, reseed, env, dropped):
        lines = [f"unset {key}\n" for key in dropped if IDENTIFIER.match(key)]
        lines += [f"export {k}={shlex.quote(v)}\n" for k, v in env.items() if IDENTIFIER.match(k)]
        if reseed:
            lines.append(f"RANDOM={int.from_bytes(os.urandom(4), 'little')}\n")
        await self.request("".join([*lines, self._mark()]).encode())


class NodeContext(PipeContext):
    """A process of `node.js`, which replies to each request with a line of JSON."""

    def command(self, fd):
        return ["node", os.path.join(HERE, "node.js"), str(fd)]

    async def set_up(self):
        # The process sends a first line without a request.
        await self._answer

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def _order(self, **order):
        return json.dumps(order).encode() + b"\n"

    async def evaluate_in(self, code, env, output):
        order = self._order(do="execute", id=self.count, code=code, env=env, typescript=self.language == "typescript")
        outcome = json.loads(await self.request(order))
        self.drain()
        error, result = outcome.get("error"), outcome.get("result")
        if error:
            output.error(error["name"], error["value"], error["traceback"])
        elif result:
            output.result(result, True)

    # An endless loop after an `await` cannot be interrupted.
    KILL_IF_UNRESPONSIVE = True

    async def adopt(self, reseed, env, dropped):
        seed = list(struct.unpack("4I", os.urandom(16))) if reseed else None
        changes = {**{key: None for key in dropped}, **env}
        await self.request(self._order(do="adopt", id=self.count, changes=changes, seed=seed))

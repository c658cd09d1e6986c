"""Python: an IPython kernel of its own for each context, driven over the Jupyter protocol."""

import asyncio
import json
import logging
import os
import queue
import shutil
import site
import tempfile

import zmq
from jupyter_client.manager import AsyncKernelManager

from contexts import INTERRUPTS, Context, Died

HERE = os.path.dirname(os.path.abspath(__file__))
# How long a kernel may take to answer when it comes up: the first time fonts are looked for, too.
COMING_UP = 120.0
# After the reply to an execution: how long for the rest of its output.
LAST_WORDS = 5.0
# Between two looks at whether a busy kernel lives.
LOOK = 0.5

log = logging.getLogger(__name__)

SETUP = """
def _jiffy_setup():
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("jiffy_kernel", {path!r})
    module = sys.modules["jiffy_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.set_up(get_ipython())
_jiffy_setup()
del _jiffy_setup
"""


class PythonContext(Context):
    """One kernel. What it shows comes over `iopub`, its answers over `shell`."""

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self._manager = self._client = self._place = self._listener = None
        self._requests = {}
        self._evaluating = self._interrupted = self._exiting = False

    async def start(self):
        self._exiting = False
        # A kernel looks for packages of the user only if their directory exists when it starts.
        try:
            os.makedirs(site.getusersitepackages(), exist_ok=True)
        except OSError as error:
            log.warning("packages that the user installs are not found: %s", error)
        self._place = tempfile.mkdtemp(prefix="jiffy-kernel-")
        manager = AsyncKernelManager(
            kernel_name="python3",
            transport="ipc",
            ip=os.path.join(self._place, "k"),
            connection_file=os.path.join(self._place, "connection.json"),
        )
        await manager.start_kernel(cwd=self.cwd, env={**self.process_env(), "MPLBACKEND": "agg"})
        self._manager, self._client = manager, manager.client()
        self._client.start_channels(stdin=False, hb=False, control=False)
        self._listener = [asyncio.ensure_future(self._hear_output()), asyncio.ensure_future(self._hear_replies())]
        # The first answer shows that it listens; the first output, that it is heard.
        await asyncio.wait_for(self._until_heard(), COMING_UP)
        await asyncio.wait_for(self._silently(SETUP.format(path=os.path.join(HERE, "kernel.py"))), COMING_UP)

    async def _until_heard(self):
        while True:
            request = self._send("pass", silent=True)
            try:
                await asyncio.wait_for(request.idle.wait(), 1.0)
                return
            except asyncio.TimeoutError:
                if not self.alive():
                    raise Died from None
            finally:
                self._requests.pop(request.id, None)

    def alive(self):
        if self._manager is None or self._manager.provisioner is None:
            return False
        process = getattr(self._manager.provisioner, "process", None)
        return process is not None and process.poll() is None

    async def stop(self):
        manager, client, place = self._manager, self._client, self._place
        self._manager = self._client = self._place = None
        for task in self._listener or ():
            task.cancel()
        self._listener = None
        for request in self._requests.values():
            request.fail()
        self._requests.clear()
        if client:
            client.stop_channels()
        if manager:
            await manager.shutdown_kernel(now=True)
        if place:
            shutil.rmtree(place, ignore_errors=True)

    async def interrupt(self):
        # Only what the client asked for: our own calls are short, and must be made.
        if self.alive() and self._evaluating:
            self._interrupted = True
            await self._manager.interrupt_kernel()

    async def adopt(self, reseed, env, dropped):
        await self._call("adopt", reseed, env, dropped)

    async def evaluate(self, code, env, output):
        await self._call("begin", env)
        request = self._send(code, silent=False, output=output)
        self._evaluating, self._interrupted = True, False
        try:
            reply = await self._reply(request)
            try:
                await asyncio.wait_for(request.idle.wait(), LAST_WORDS)
            except asyncio.TimeoutError:
                # A flood was cut short somewhere on its way: the reply is what counts.
                pass
            content = reply["content"]
            self._exiting = any(map(is_exit, content.get("payload") or ()))
            if content.get("status") != "ok" and not request.failed:
                output.error(*failure(content))
        except Lost:
            output.error("KeyboardInterrupt", "", "")
        finally:
            self._evaluating = False
            self._requests.pop(request.id, None)
        if not self._exiting:
            await self._call("end")

    def exiting(self):
        return self._exiting

    def _send(self, code, silent, output=None):
        # An error must not have the kernel refuse what comes next, which is ours.
        options = {"store_history": not silent, "allow_stdin": False, "stop_on_error": False}
        message_id = self._client.execute(code, silent=silent, **options)
        # Sending takes note of replies that have come, and tells nobody: our listener would wait
        # for news that it had already. Asked in its own name, its socket looks again.
        self._client.shell_channel.socket.get(zmq.EVENTS)
        request = self._requests[message_id] = Request(message_id, output)
        return request

    async def _reply(self, request):
        """The answer to a request, or `Died`, or `Lost`."""
        later = []
        try:
            while True:
                done, _ = await asyncio.wait({request.reply}, timeout=LOOK)
                if done:
                    return request.reply.result()
                if not self.alive():
                    raise Died
                # Requests are answered in their order.
                if any(other.reply.done() for other in later):
                    raise Lost
                # More than one, because an interrupt may meet them, too.
                if self._interrupted and len(later) < INTERRUPTS * 2:
                    later.append(self._send("pass", silent=True))
        finally:
            for other in later:
                self._requests.pop(other.id, None)

    async def _silently(self, code):
        content = {"status": "lost"}
        # An interrupt may arrive after what it was meant for.
        for _ in range(3):
            request = self._send(code, silent=True)
            try:
                content = (await self._reply(request))["content"]
            except Lost:
                continue
            finally:
                self._requests.pop(request.id, None)
            if content.get("ename") != "KeyboardInterrupt":
                break
        if content.get("status") != "ok":
            # Whoever breaks our module from inside gets a fresh kernel, not half a sandbox's
            # identity.
            log.warning("the kernel does not do as told: %s", "\n".join(failure(content)))
            raise Died

    async def _call(self, function, *arguments):
        given = json.dumps(arguments)
        await self._silently(f"__import__('sys').modules['jiffy_kernel'].{function}(*__import__('json').loads({given!r}))")

    async def _hear_output(self):
        client = self._client
        while True:
            try:
                message = await client.get_iopub_msg(timeout=None)
            except (queue.Empty, ValueError):
                continue
            request = self._requests.get(message["parent_header"].get("msg_id"))
            if request:
                request.hear(message)

    async def _hear_replies(self):
        client = self._client
        while True:
            try:
                message = await client.get_shell_msg(timeout=None)
            except (queue.Empty, ValueError):
                continue
            request = self._requests.get(message["parent_header"].get("msg_id"))
            if request and message["msg_type"] == "execute_reply" and not request.reply.done():
                request.reply.set_result(message)


def is_exit(payload):
    """Returns whether a payload of a reply says that the code called `exit()` or `quit()`."""
    return payload.get("source") == "ask_exit" and not payload.get("keepkernel")


class Lost(Exception):
    """An interrupt met the kernel at a moment when it forgets to answer."""


def failure(content):
    name = str(content.get("ename") or content.get("status") or "Error")
    return name, str(content.get("evalue", "")), "\n".join(content.get("traceback") or [])


class Request:
    """An execution that was asked for, and what the kernel says about it."""

    def __init__(self, message_id, output):
        self.id = message_id
        self.output = output
        self.idle = asyncio.Event()
        self.reply = asyncio.get_running_loop().create_future()
        self.failed = False

    def fail(self):
        if not self.reply.done():
            self.reply.set_exception(Died())
            # Nobody may be waiting.
            self.reply.exception()

    def hear(self, message):
        kind, content, output = message["msg_type"], message["content"], self.output
        if kind == "status" and content["execution_state"] == "idle":
            self.idle.set()
        elif output is None:
            return
        elif kind == "stream":
            output.text(content["name"], content["text"])
        elif kind in ("display_data", "execute_result"):
            output.result(content["data"], kind == "execute_result")
        elif kind == "error":
            self.failed = True
            output.error(*failure(content))

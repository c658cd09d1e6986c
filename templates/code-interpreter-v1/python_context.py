"""Python contexts: one IPython kernel per context, controlled over the Jupyter protocol."""

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
# Seconds that a kernel may take to start. The first start includes matplotlib's search for fonts.
START_TIMEOUT = 120.0
# Seconds to wait for the rest of an execution's output after its reply.
OUTPUT_TIMEOUT = 5.0
# Seconds between checks whether a busy kernel is still running.
POLL_INTERVAL = 0.5

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
    """One kernel. It sends output over `iopub` and replies over `shell`."""

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        self._manager = self._client = self._place = self._listener = None
        self._requests = {}
        self._evaluating = self._interrupted = self._exiting = False

    async def start(self):
        self._exiting = False
        # Python adds the user's package directory to its path only if it exists at start.
        try:
            os.makedirs(site.getusersitepackages(), exist_ok=True)
        except OSError as error:
            log.warning("cannot create the user's package directory, packages installed by the user will not be found: %s", error)
        self._place = tempfile.mkdtemp(prefix="jiffy-kernel-")
        manager = AsyncKernelManager(connection_file=os.path.join(self._place, "connection.json"), **self.kernel(self._place))
        await manager.start_kernel(cwd=self.cwd, env={**self.process_env(), "MPLBACKEND": "agg"})
        self._manager, self._client = manager, manager.client()
        self._client.start_channels(stdin=False, hb=False, control=False)
        self._listener = [asyncio.ensure_future(self._receive_output()), asyncio.ensure_future(self._receive_replies())]
        # Output sent before the subscription to `iopub` takes effect is lost. Repeat an empty
        # execution until its output arrives.
        await asyncio.wait_for(self._connect(), START_TIMEOUT)
        await asyncio.wait_for(self.set_up(), START_TIMEOUT)

    def kernel(self, place):
        """Returns the kernel and the form of its connections, which may use files in `place`."""
        return {"kernel_name": "python3", "transport": "ipc", "ip": os.path.join(place, "k")}

    async def set_up(self):
        """Prepares a new kernel for the calls below."""
        await self._silently(SETUP.format(path=os.path.join(HERE, "kernel.py")))

    async def _connect(self):
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
        # Interrupt only code of the client: internal calls are short and must complete.
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
                await asyncio.wait_for(request.idle.wait(), OUTPUT_TIMEOUT)
            except asyncio.TimeoutError:
                # Some output was dropped because there was too much of it. The reply is complete.
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
        # By default a kernel aborts queued executions after an error. Internal calls may be queued.
        options = {"store_history": not silent, "allow_stdin": False, "stop_on_error": False}
        message_id = self._client.execute(code, silent=silent, **options)
        # Sending consumes the notification of replies that have already arrived, so that the
        # listener would wait although messages are queued. Reading the state of the listener's own
        # socket raises the notification again.
        self._client.shell_channel.socket.get(zmq.EVENTS)
        request = self._requests[message_id] = Request(message_id, output)
        return request

    async def _reply(self, request):
        """Returns the reply to a request. Raises `Died` or `Lost`."""
        probes = []
        try:
            while True:
                done, _ = await asyncio.wait({request.reply}, timeout=POLL_INTERVAL)
                if done:
                    return request.reply.result()
                if not self.alive():
                    raise Died
                # A kernel replies in the order of requests: a reply to a later request means that
                # the kernel will not reply to this one.
                if any(probe.reply.done() for probe in probes):
                    raise Lost
                # Send several probes, because an interrupt may hit a probe, too.
                if self._interrupted and len(probes) < INTERRUPTS * 2:
                    probes.append(self._send("pass", silent=True))
        finally:
            for probe in probes:
                self._requests.pop(probe.id, None)

    async def _silently(self, code):
        content = {"status": "lost"}
        # An interrupt of the client's code may arrive late and hit this call: repeat it.
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
            # The client's code has broken this module's functions in the kernel. Start a new
            # kernel: a kernel with only a part of the sandbox's identity is unsafe.
            log.warning("internal call to the kernel failed: %s", "\n".join(failure(content)))
            raise Died

    async def _call(self, function, *arguments):
        given = json.dumps(arguments)
        await self._silently(f"__import__('sys').modules['jiffy_kernel'].{function}(*__import__('json').loads({given!r}))")

    async def _receive_output(self):
        client = self._client
        while True:
            try:
                message = await client.get_iopub_msg(timeout=None)
            except (queue.Empty, ValueError):
                continue
            request = self._requests.get(message["parent_header"].get("msg_id"))
            if request:
                request.receive(message)

    async def _receive_replies(self):
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
    """Returns whether a reply's payload means that the code called `exit()` or `quit()`."""
    return payload.get("source") == "ask_exit" and not payload.get("keepkernel")


class Lost(Exception):
    """The kernel was interrupted in a state in which it does not send a reply."""


def failure(content):
    name = str(content.get("ename") or content.get("status") or "Error")
    return name, str(content.get("evalue", "")), "\n".join(content.get("traceback") or [])


class Request:
    """An execution request and the state of its replies."""

    def __init__(self, message_id, output):
        self.id = message_id
        self.output = output
        self.idle = asyncio.Event()
        self.reply = asyncio.get_running_loop().create_future()
        self.failed = False

    def fail(self):
        if not self.reply.done():
            self.reply.set_exception(Died())
            # Mark the exception as retrieved: there may be no waiter.
            self.reply.exception()

    def receive(self, message):
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

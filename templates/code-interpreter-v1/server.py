"""The code interpreter: HTTP on loopback, port 49999. POST /execute streams newline-delimited JSON; /contexts, /health.

Requests need no token. The guest's loopback is reachable from inside the sandbox, where all processes are trusted, and
through the gateway on the host, which authenticates its clients.
"""

import asyncio
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys

import tornado.httpserver
import tornado.netutil
import tornado.web

from contexts import Contexts, RequestError
from output import Output, line
from python_context import PythonContext
from pipe_context import BashContext, NodeContext

PORT = int(os.environ.get("JIFFY_PORT", "49999"))
# Seconds between keep-alive messages, which prevent timeouts in clients and proxies.
KEEPALIVE = 5.0
MAX_BODY = 64 << 20
NAME = "=\0"


def optional(request, key, kind):
    value = request.get(key)
    if value is not None and not isinstance(value, kind):
        raise RequestError(400, f"`{key}` is not a {kind.__name__}")
    return value


def variables(request):
    env = optional(request, "env_vars", dict) or {}
    for key, value in env.items():
        if not key or any(c in key for c in NAME) or not isinstance(value, str) or "\0" in value:
            raise RequestError(400, f"`env_vars` has an invalid name or value at {key!r}")
    return env


class Handler(tornado.web.RequestHandler):
    @property
    def contexts(self):
        return self.application.settings["contexts"]

    def body(self):
        try:
            request = json.loads(self.request.body or b"{}")
        except ValueError:
            raise RequestError(400, "The body is not JSON") from None
        if not isinstance(request, dict):
            raise RequestError(400, "The body is not a JSON object")
        return request

    def write_error(self, status, **kwargs):
        error = kwargs.get("exc_info", (None, None, None))[1]
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(str(error) if isinstance(error, RequestError) else self._reason)

    def _handle_request_exception(self, error):
        if isinstance(error, RequestError) and not self._headers_written:
            self.send_error(error.status, exc_info=(type(error), error, None))
        else:
            super()._handle_request_exception(error)

    def answer(self, value, status=200):
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


class Execute(Handler):
    output = None

    async def post(self):
        request = self.body()
        code = optional(request, "code", str)
        if code is None:
            raise RequestError(400, "`code` is missing")
        context_id, language = optional(request, "context_id", str), optional(request, "language", str)
        if context_id and language:
            raise RequestError(400, "Only one of context_id or language can be provided")
        env = variables(request)
        context = self.contexts.find(context_id) if context_id else await self.contexts.default(language)
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("X-Accel-Buffering", "no")
        output = self.output = Output()
        if self.request.connection.stream.closed():
            return
        work = asyncio.ensure_future(context.run(code, env, output))
        try:
            await self.stream(output)
            # The client does not wait for a restart of the process, which may follow.
            await self.finish()
        except tornado.iostream.StreamClosedError:
            pass
        finally:
            if not output.closed:
                output.abandon()
        await work

    async def stream(self, output):
        await self.flush()
        pending = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(output.next())
                await asyncio.wait({pending}, timeout=KEEPALIVE)
                if not pending.done():
                    self.write(line({"type": "keepalive"}))
                else:
                    lines, pending = pending.result(), None
                    if lines is None:
                        return
                    self.write(lines)
                # Wait until the bytes are sent, so that a slow reader slows down the code.
                await self.flush()
        finally:
            if pending:
                pending.cancel()

    def on_connection_close(self):
        if self.output:
            self.output.abandon()


def description(context):
    return {"id": context.id, "language": context.language, "cwd": context.cwd}


class ContextList(Handler):
    def get(self):
        self.answer([description(c) for c in self.contexts.list()])

    async def post(self):
        request = self.body()
        context = await self.contexts.create(optional(request, "language", str), optional(request, "cwd", str))
        self.answer(description(context))


class OneContext(Handler):
    async def delete(self, context_id):
        await self.contexts.remove(context_id)
        self.set_status(204)
        self.finish()


class Restart(Handler):
    async def post(self, context_id):
        await self.contexts.find(context_id).restart()
        self.set_status(204)
        self.finish()


class Health(Handler):
    def get(self):
        if self.application.settings["warm"].is_set():
            self.finish("OK")
        else:
            raise RequestError(503, "Warming up")


def further_languages():
    """Returns the languages of a template that is based on this one: the kinds in its `further_languages.py`."""
    if importlib.util.find_spec("further_languages") is None:
        return {}
    return importlib.import_module("further_languages").KINDS


async def main():
    kinds = {
        "python": PythonContext,
        "bash": BashContext,
        "javascript": NodeContext,
        "typescript": NodeContext,
        **further_languages(),
    }
    contexts, warm = Contexts(kinds), asyncio.Event()
    one = r"/contexts/([0-9A-Za-z-]+)"
    application = tornado.web.Application(
        [
            (r"/execute", Execute),
            (r"/contexts", ContextList),
            (one, OneContext),
            (one + "/restart", Restart),
            (r"/health", Health),
        ],
        contexts=contexts,
        warm=warm,
        log_function=lambda handler: None,
    )
    server = tornado.httpserver.HTTPServer(application, max_body_size=MAX_BODY, max_buffer_size=MAX_BODY)
    # The gateway connects to a guest's port on either of the loopback addresses.
    server.add_sockets(tornado.netutil.bind_sockets(PORT, "127.0.0.1"))
    try:
        server.add_sockets(tornado.netutil.bind_sockets(PORT, "::1"))
    except OSError:
        # The sandbox has no IPv6.
        pass
    shutdown = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, shutdown.set)
    # E2B's template starts these contexts in advance. Other contexts start at their first request.
    await contexts.default("python")
    if shutil.which("node"):
        await contexts.default("javascript")
    warm.set()
    await shutdown.wait()
    await contexts.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(main())

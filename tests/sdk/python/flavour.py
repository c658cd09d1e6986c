"""The two flavours of the Python client, controlled by the same tests.

A test is a coroutine. `await sdk(function, ...)` calls a function of the client: in a thread of its
own if the client is the blocking one, awaiting it if it is the asynchronous one. Where the two
differ in more than that (output of background commands, watching, streamed input) there is a helper
here; nothing of the client is replaced.
"""

import asyncio
import inspect

import e2b
import e2b_code_interpreter
from following import Command, Terminal, Watch


class Flavour:
    def __init__(self, name):
        self.name = name
        self.blocking = name == "sync"
        self.Sandbox = e2b.Sandbox if self.blocking else e2b.AsyncSandbox
        self.Interpreter = e2b_code_interpreter.Sandbox if self.blocking else e2b_code_interpreter.AsyncSandbox

    async def __call__(self, function, *args, **options):
        if self.blocking:
            return await asyncio.to_thread(function, *args, **options)
        answer = function(*args, **options)
        return await answer if inspect.isawaitable(answer) else answer

    async def pages(self, paginator):
        """Returns all pages of a listing."""
        pages = []
        while paginator.has_next:
            pages.append(await self(paginator.next_items))
        return pages

    async def all(self, paginator):
        return [item for page in await self.pages(paginator) for item in page]

    async def start(self, sandbox, command, **options):
        """Starts a background command and collects its output."""
        return await Command(self).follow(sandbox.commands.run, command, background=True, **options)

    async def attach(self, sandbox, pid):
        """Collects the output of a command that is already running."""
        return await Command(self).follow(sandbox.commands.connect, pid)

    async def terminal(self, sandbox, **options):
        """Opens a terminal and collects its output."""
        return await Terminal(self, sandbox).open(sandbox.pty.create, **options)

    async def attach_terminal(self, sandbox, pid):
        """Collects the output of a terminal that is already open."""
        return await Terminal(self, sandbox).open(sandbox.pty.connect, pid=pid)

    async def watch(self, sandbox, path, **options):
        """Watches a directory and collects its events."""
        return await Watch(self).open(sandbox, path, **options)

    async def stream_input(self, module, pid, chunks):
        """Sends `chunks` as one stream of input to a command or a terminal."""
        if self.blocking:
            await asyncio.to_thread(module.stream_input, pid, chunks)
            return
        async with module.stream_input(pid) as handle:
            for chunk in chunks:
                await handle.send(chunk)

    async def chunks(self, stream):
        """Yields the pieces of a streamed download."""
        if self.blocking:
            return await asyncio.to_thread(list, stream)
        return [chunk async for chunk in stream]

    def body(self, chunks):
        """Returns an upload body that is generated while it is sent."""
        if self.blocking:
            return iter(chunks)

        async def made():
            for chunk in chunks:
                yield chunk

        return made()

"""Collects output and events of a sandbox as they arrive, so that tests can wait for them."""

import asyncio

LIMIT = 20


class Collected:
    """A collection that any thread appends to and tests wait for."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def notify(self):
        self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, holds, limit=LIMIT):
        """Waits until `holds()` is true. Fails with the current content at the deadline."""

        async def wait():
            while not holds():
                self._changed.clear()
                # An item may have been added between the check and the clearing of the event.
                if holds():
                    return
                await self._changed.wait()

        try:
            await asyncio.wait_for(wait(), limit)
        except TimeoutError:
            raise AssertionError(f"not within {limit} s; so far: {self}") from None


class Command(Collected):
    """A background command."""

    def __init__(self, sdk):
        super().__init__()
        self.sdk, self.handle, self.stdout, self.stderr, self._end = sdk, None, "", "", None

    def __str__(self):
        return f"stdout {self.stdout[-500:]!r}, stderr {self.stderr[-500:]!r}"

    def _on_stdout(self, text):
        self.stdout += text
        self.notify()

    def _on_stderr(self, text):
        self.stderr += text
        self.notify()

    async def follow(self, begin, *args, **options):
        """Starts the command with `begin`, and collects its output until it ends."""
        callbacks = {"on_stdout": self._on_stdout, "on_stderr": self._on_stderr}
        if self.sdk.blocking:
            self.handle = await asyncio.to_thread(begin, *args, **options)
            self._end = asyncio.create_task(asyncio.to_thread(self.handle.wait, **callbacks))
        else:
            self.handle = await begin(*args, **options, **callbacks)
            self._end = asyncio.create_task(self.handle.wait())
        # Retrieve the exception of the task, so that asyncio does not log it if the test ignores
        # it.
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())
        return self

    @property
    def pid(self):
        return self.handle.pid

    async def wait_for_output(self, text):
        await self.until(lambda: text in self.stdout)

    async def end(self, limit=LIMIT):
        """Returns the result. Raises the client's exception."""
        return await asyncio.wait_for(asyncio.shield(self._end), limit)


class Terminal(Collected):
    """A pseudo-terminal with a shell."""

    def __init__(self, sdk, sandbox):
        super().__init__()
        self.sdk, self.sandbox, self.handle, self.output, self._end = sdk, sandbox, None, b"", None

    def __str__(self):
        return repr(self.output[-500:])

    def _on_data(self, data):
        self.output += data
        self.notify()

    async def open(self, begin, **options):
        """Opens the terminal with `begin`, and collects its output until it ends."""
        if self.sdk.blocking:
            self.handle = await asyncio.to_thread(begin, **options)
            self._end = asyncio.create_task(asyncio.to_thread(self.handle.wait, on_pty=self._on_data))
        else:
            self.handle = await begin(on_data=self._on_data, **options)
            self._end = asyncio.create_task(self.handle.wait())
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())
        return self

    @property
    def pid(self):
        return self.handle.pid

    async def type(self, text):
        await self.sdk(self.sandbox.pty.send_stdin, self.pid, text.encode())

    async def wait_for_output(self, text):
        await self.until(lambda: text.encode() in self.output)

    async def end(self, limit=LIMIT):
        return await asyncio.wait_for(asyncio.shield(self._end), limit)


class Watch(Collected):
    """Events of a directory. The blocking client has no callback and is polled."""

    def __init__(self, sdk):
        super().__init__()
        self.sdk, self.events, self._handle, self._poll_task = sdk, [], None, None

    def __str__(self):
        return repr(self.seen())

    def seen(self):
        return [(event.type.value, event.name) for event in self.events]

    def _on_event(self, event):
        self.events.append(event)
        self.notify()

    async def open(self, sandbox, path, **options):
        """Starts the watch of a directory."""
        if self.sdk.blocking:
            self._handle = await asyncio.to_thread(sandbox.files.watch_dir, path, **options)
            self._poll_task = asyncio.create_task(self._poll())
        else:
            self._handle = await sandbox.files.watch_dir(path, on_event=self._on_event, **options)
        return self

    async def _poll(self):
        while True:
            for event in await asyncio.to_thread(self._handle.get_new_events):
                self._on_event(event)
            await asyncio.sleep(0.02)

    async def wait_for_event(self, kind, name):
        await self.until(lambda: (kind, name) in self.seen())
        return next(e for e in self.events if (e.type.value, e.name) == (kind, name))

    async def stop(self):
        if self._poll_task:
            self._poll_task.cancel()
            await asyncio.wait([self._poll_task])
        await self.sdk(self._handle.stop)

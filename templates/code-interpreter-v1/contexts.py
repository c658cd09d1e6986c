"""Contexts: each runs code in a process that preserves state between executions."""

import asyncio
import getpass
import os
import uuid

import identity

HOME = os.environ.get("JIFFY_WORKDIR", "/home/user")
# Maximum number of contexts. Each is a process with tens of MiB.
MAX_CONTEXTS = 64
# Seconds between interrupts of an abandoned execution, and their maximum number.
INTERRUPT_INTERVAL = 2.0
INTERRUPTS = 5


class RequestError(Exception):
    """Error response to a request: HTTP status and reason."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


class Died(Exception):
    """The process of a context has exited."""


class Context:
    """One context. Its executions run one after the other. Executions of different contexts run concurrently."""

    # Whether a process that ignores interrupts is killed. Otherwise the abandoned code runs until
    # it finishes or the client restarts the context.
    KILL_IF_UNRESPONSIVE = False

    def __init__(self, language, cwd):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self.count = 0
        self.is_removed = False
        self._lock = asyncio.Lock()
        self._generation = None
        self._stamp = None
        self._env = {}

    # Each language implements the following methods.
    async def start(self):
        raise NotImplementedError

    async def stop(self):
        """Kills the process."""
        raise NotImplementedError

    def alive(self):
        raise NotImplementedError

    def exiting(self):
        """Returns whether the code requested the exit of its process. The process may still be running."""
        return False

    async def evaluate(self, code, env, output):
        """Runs `code` with the additional variables `env`. Raises `Died` if the process exits."""
        raise NotImplementedError

    async def interrupt(self):
        raise NotImplementedError

    async def adopt(self, reseed, env, dropped):
        """Applies a new sandbox identity: new random state if `reseed`, sets `env`, unsets the variables `dropped`."""
        raise NotImplementedError

    async def launch(self):
        """Starts the process with the current identity of the sandbox."""
        self._generation, self._stamp = identity.generation(), identity.environment_stamp()
        self._env = identity.environment()
        await self.start()

    async def _be_current(self):
        """Applies a changed identity. Costs a read and a stat if nothing has changed."""
        generation, stamp = identity.generation(), identity.environment_stamp()
        if generation == self._generation and stamp == self._stamp:
            return
        env = identity.environment()
        dropped = [key for key in self._env if key not in env]
        await self.adopt(generation != self._generation, env, dropped)
        self._generation, self._stamp, self._env = generation, stamp, env

    def process_env(self):
        """Environment of a new process of this context."""
        return {**os.environ, **self._env}

    async def run(self, code, env, output):
        """Waits for earlier executions, then runs `code`. Errors of the code become output, not exceptions."""
        try:
            async with self._lock:
                if not output.abandoned.is_set():
                    await self._run(code, env, output)
        except Died:
            how = "was terminated" if self.is_removed else "exited unexpectedly and was restarted; its state is lost"
            output.error("KernelDied", f"the {self.language} process {how}", "")
        finally:
            output.close()

    async def _run(self, code, env, output):
        if self.is_removed:
            raise Died
        if not self.alive():
            await self.stop()
            await self.launch()
        try:
            await self._be_current()
            self.count += 1
            output.count(self.count)
            work = asyncio.ensure_future(self.evaluate(code, env, output))
            disconnect = asyncio.ensure_future(output.abandoned.wait())
            try:
                await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
                for _ in range(INTERRUPTS):
                    if work.done():
                        break
                    await self.interrupt()
                    await asyncio.wait({work}, timeout=INTERRUPT_INTERVAL)
                if not work.done() and self.KILL_IF_UNRESPONSIVE:
                    await self.stop()
                await work
                if self.exiting():
                    # Complete the response first: only the next execution waits for the restart.
                    output.close()
                    await self.stop()
                    await self.launch()
            finally:
                disconnect.cancel()
                work.cancel()
        except Died:
            if not self.is_removed:
                await self.stop()
                await self.launch()
            raise

    async def restart(self):
        """Discards the state. A running execution ends with an error."""
        await self.stop()
        async with self._lock:
            if not self.is_removed and not self.alive():
                await self.stop()
                await self.launch()
                self.count = 0

    async def remove(self):
        self.is_removed = True
        await self.stop()


class Contexts:
    """All contexts, and the default context of each language."""

    def __init__(self, kinds):
        self._kinds = kinds
        self._all = {}
        self._defaults = {}
        self._creation_locks = {}

    def list(self):
        return list(self._all.values())

    def find(self, context_id):
        try:
            return self._all[context_id]
        except (KeyError, TypeError):
            raise RequestError(404, f"Context {context_id} not found") from None

    def kind(self, language):
        """Returns the name and the class of a language. Accepts usual abbreviations."""
        name = (language or "python").strip().lower()
        name = {"python3": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}.get(name, name)
        if name not in self._kinds:
            supported = ", ".join(sorted(self._kinds))
            raise RequestError(400, f"Language {language!r} is not supported; supported languages: {supported}")
        return name, self._kinds[name]

    async def create(self, language, cwd):
        name, kind = self.kind(language)
        cwd = cwd or HOME
        if not os.path.isdir(cwd):
            raise RequestError(400, f"The directory {cwd} does not exist")
        if not os.access(cwd, os.X_OK):
            raise RequestError(400, f"The directory {cwd} cannot be entered: {getpass.getuser()} has no permission")
        if len(self._all) >= MAX_CONTEXTS:
            raise RequestError(429, f"The limit of {MAX_CONTEXTS} contexts is reached; remove a context")
        context = kind(name, cwd)
        self._all[context.id] = context
        try:
            await context.launch()
        except BaseException as error:
            self._all.pop(context.id, None)
            await context.remove()
            if isinstance(error, (OSError, Died, asyncio.TimeoutError)):
                why = str(error) or type(error).__name__
                raise RequestError(500, f"The {name} process did not start: {why}") from error
            raise
        return context

    async def default(self, language):
        """Returns the default context of a language. Creates it at the first request."""
        name, _ = self.kind(language)
        async with self._creation_locks.setdefault(name, asyncio.Lock()):
            context = self._all.get(self._defaults.get(name))
            if context is None:
                context = await self.create(name, None)
                self._defaults[name] = context.id
        return context

    async def remove(self, context_id):
        context = self.find(context_id)
        del self._all[context_id]
        await context.remove()

    async def close(self):
        for context in self.list():
            await context.remove()

"""Contexts: places where code runs and leaves its state for the next piece."""

import asyncio
import getpass
import os
import uuid

import identity

HOME = os.environ.get("JIFFY_WORKDIR", "/home/user")
# Contexts at once; each is a process with tens of MiB.
MOST = 64
# After an interrupt: how long until the next, and how many there are.
PATIENCE = 2.0
INTERRUPTS = 5


class Refused(Exception):
    """A request that cannot be served: HTTP status and reason."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


class Died(Exception):
    """The process behind a context has ended."""


class Context:
    """One context. Its executions run one after the other; those of different contexts at the same time."""

    # Whether a process that hears no interrupt is ended. Others go on to their end, or until
    # somebody restarts them.
    KILLED_IF_DEAF = False

    def __init__(self, language, cwd):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self.count = 0
        self.doomed = False
        self._turn = asyncio.Lock()
        self._generation = None
        self._stamp = None
        self._env = {}

    # What each language does in its own way.
    async def start(self):
        raise NotImplementedError

    async def stop(self):
        """Ends the process, whatever it does."""
        raise NotImplementedError

    def alive(self):
        raise NotImplementedError

    def exiting(self):
        """Returns whether the code asked its process to exit, which takes the process a while."""
        return False

    async def evaluate(self, code, env, output):
        """Runs `code` with `env` on top; raises `Died` if the process ends."""
        raise NotImplementedError

    async def interrupt(self):
        raise NotImplementedError

    async def adopt(self, reseed, env, dropped):
        """Becomes another sandbox's: new random state if `reseed`, `env` set, the variables `dropped` unset."""
        raise NotImplementedError

    async def launch(self):
        """Starts the process as what this sandbox is now."""
        self._generation, self._stamp = identity.generation(), identity.environment_stamp()
        self._env = identity.environment()
        await self.start()

    async def _be_current(self):
        """Two looks at files if nothing changed."""
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
        """One execution, from its turn to its last line. Never raises what the code is to blame for."""
        try:
            async with self._turn:
                if not output.abandoned.is_set():
                    await self._run(code, env, output)
        except Died:
            how = "was ended" if self.doomed else "ended unexpectedly; a new one takes its place, without its state"
            output.error("KernelDied", f"the {self.language} process {how}", "")
        finally:
            output.close()

    async def _run(self, code, env, output):
        if self.doomed:
            raise Died
        if not self.alive():
            await self.stop()
            await self.launch()
        try:
            await self._be_current()
            self.count += 1
            output.count(self.count)
            work = asyncio.ensure_future(self.evaluate(code, env, output))
            gone = asyncio.ensure_future(output.abandoned.wait())
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                for _ in range(INTERRUPTS):
                    if work.done():
                        break
                    await self.interrupt()
                    await asyncio.wait({work}, timeout=PATIENCE)
                if not work.done() and self.KILLED_IF_DEAF:
                    await self.stop()
                await work
                if self.exiting():
                    # The caller has its answer; the next one waits for the new process.
                    output.close()
                    await self.stop()
                    await self.launch()
            finally:
                gone.cancel()
                work.cancel()
        except Died:
            if not self.doomed:
                await self.stop()
                await self.launch()
            raise

    async def restart(self):
        """Throws the state away. What runs is ended, as an error."""
        await self.stop()
        async with self._turn:
            if not self.doomed and not self.alive():
                await self.stop()
                await self.launch()
                self.count = 0

    async def remove(self):
        self.doomed = True
        await self.stop()


class Contexts:
    """All contexts, and the default one of each language."""

    def __init__(self, kinds):
        self._kinds = kinds
        self._all = {}
        self._defaults = {}
        self._making = {}

    def list(self):
        return list(self._all.values())

    def find(self, context_id):
        try:
            return self._all[context_id]
        except (KeyError, TypeError):
            raise Refused(404, f"Context {context_id} not found") from None

    def kind(self, language):
        """The class for a language, by any of its usual names."""
        name = (language or "python").strip().lower()
        name = {"python3": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}.get(name, name)
        if name not in self._kinds:
            known = ", ".join(sorted(self._kinds))
            raise Refused(400, f"Language {language!r} is not supported here; there are: {known}")
        return name, self._kinds[name]

    async def create(self, language, cwd):
        name, kind = self.kind(language)
        cwd = cwd or HOME
        if not os.path.isdir(cwd):
            raise Refused(400, f"There is no directory {cwd}")
        if not os.access(cwd, os.X_OK):
            raise Refused(400, f"The directory {cwd} cannot be entered: {getpass.getuser()} may not")
        if len(self._all) >= MOST:
            raise Refused(429, f"There are {MOST} contexts already; remove one")
        context = kind(name, cwd)
        self._all[context.id] = context
        try:
            await context.launch()
        except BaseException as error:
            self._all.pop(context.id, None)
            await context.remove()
            if isinstance(error, (OSError, Died, asyncio.TimeoutError)):
                why = str(error) or type(error).__name__
                raise Refused(500, f"The {name} process did not come up: {why}") from error
            raise
        return context

    async def default(self, language):
        """The context of those who name none; made when it is first asked for."""
        name, _ = self.kind(language)
        async with self._making.setdefault(name, asyncio.Lock()):
            found = self._all.get(self._defaults.get(name))
            if found is None:
                found = await self.create(name, None)
                self._defaults[name] = found.id
        return found

    async def remove(self, context_id):
        context = self.find(context_id)
        del self._all[context_id]
        await context.remove()

    async def close(self):
        for context in self.list():
            await context.remove()

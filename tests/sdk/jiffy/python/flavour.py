"""The blocking and the asynchronous classes of the SDK, controlled by the same tests.

`await sdk(function, ...)` calls a function: in a thread if the class is blocking, by awaiting its
result otherwise.
"""

import asyncio
import inspect
from contextlib import asynccontextmanager

import e2b
import jiffy


class Flavour:
    def __init__(self, name):
        self.blocking = name == "sync"
        prefix = "" if self.blocking else "Async"
        for kind in ("Sandbox", "Snapshot", "Function", "Host", "Template", "Volume"):
            setattr(self, kind, getattr(jiffy, prefix + kind))
        self.base = e2b.Sandbox if self.blocking else e2b.AsyncSandbox

    async def __call__(self, function, *args, **options):
        if self.blocking:
            return await asyncio.to_thread(function, *args, **options)
        answer = function(*args, **options)
        return await answer if inspect.isawaitable(answer) else answer

    @asynccontextmanager
    async def within(self, context):
        """Enters a context manager of either kind."""
        if not self.blocking:
            async with context as value:
                yield value
            return
        value = await asyncio.to_thread(context.__enter__)
        try:
            yield value
        except BaseException as error:
            if not await asyncio.to_thread(context.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await asyncio.to_thread(context.__exit__, None, None, None)

    async def items(self, iterator):
        """Returns all items of an iterator of either kind."""
        if self.blocking:
            return await asyncio.to_thread(list, iterator)
        return [item async for item in iterator]

    def function(self, function):
        """Turns a blocking function with a sandbox as argument into one for `try_each`.

        `function` yields calls of the SDK as tuples and receives their results.
        """
        if self.blocking:
            return lambda fork: self._run(function(fork))

        async def attempt(fork):
            return await self._arun(function(fork))

        return attempt

    def _run(self, steps):
        value = None
        try:
            while True:
                call, *args = steps.send(value)
                value = call(*args)
        except StopIteration as end:
            return end.value

    async def _arun(self, steps):
        value = None
        try:
            while True:
                call, *args = steps.send(value)
                value = call(*args)
                if inspect.isawaitable(value):
                    value = await value
        except StopIteration as end:
            return end.value

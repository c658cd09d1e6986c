"""R and Java: one Jupyter kernel per context. The server of the code interpreter finds this module by its name."""

import json
import os

from python_context import PythonContext


def r_text(text):
    """Returns a string literal of R. JSON's escapes are valid in R, except for surrogates and slashes."""
    return json.dumps(text, ensure_ascii=False)


class KernelContext(PythonContext):
    """A context whose kernel receives variables as code of its language."""

    KERNEL = None

    def __init__(self, language, cwd):
        super().__init__(language, cwd)
        # Code that restores the variables after an execution.
        self._restore = []

    def kernel(self, place):
        # Connections use the loopback interface, and are signed with the connection file's key.
        return {"kernel_name": self.KERNEL}

    async def set_up(self):
        pass

    def set_variable(self, key, value):
        raise NotImplementedError

    def unset_variable(self, key):
        raise NotImplementedError

    def reseed(self):
        """Returns code that replaces the state of the random numbers."""
        return []

    async def _call(self, function, *arguments):
        lines = []
        if function == "begin":
            (env,) = arguments
            known = {**os.environ, **self._env}
            self._restore = [self.set_variable(k, known[k]) if k in known else self.unset_variable(k) for k in env]
            lines = [self.set_variable(key, value) for key, value in env.items()]
        elif function == "end":
            lines, self._restore = self._restore, []
        elif function == "adopt":
            reseed, env, dropped = arguments
            lines = [self.unset_variable(key) for key in dropped]
            lines += [self.set_variable(key, value) for key, value in env.items()]
            if reseed:
                lines += self.reseed()
        if lines:
            await self._silently("\n".join(lines))


class RContext(KernelContext):
    KERNEL = "ir"

    def set_variable(self, key, value):
        return f"do.call(Sys.setenv, stats::setNames(list({r_text(value)}), {r_text(key)}))"

    def unset_variable(self, key):
        return f"Sys.unsetenv({r_text(key)})"

    def reseed(self):
        return [f"set.seed({int.from_bytes(os.urandom(4), 'little') & 0x7FFFFFFF})"]


class JavaContext(KernelContext):
    """The environment of a Java process cannot change: variables are properties of the system, as in E2B's template."""

    KERNEL = "java"

    def set_variable(self, key, value):
        return f"System.setProperty({json.dumps(key)}, {json.dumps(value)});"

    def unset_variable(self, key):
        return f"System.clearProperty({json.dumps(key)});"


KINDS = {"r": RContext, "java": JavaContext}

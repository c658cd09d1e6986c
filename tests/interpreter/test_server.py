"""The code interpreter's server as a process on this machine: protocol, bounds, interrupts,
identity, and the stock client."""

import asyncio
import base64
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from datetime import datetime, timedelta, timezone
from pathlib import Path

SERVER = Path(__file__).resolve().parents[2] / "templates/code-interpreter-v1/server.py"
NODE = shutil.which("node")
# Imports in JavaScript require the parser that Debian's Node.js includes.
ACORN = NODE and subprocess.run([NODE, "-e", "require('acorn')"], capture_output=True).returncode == 0
LIMIT = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self):
        self.dir = tempfile.TemporaryDirectory()
        self.home = Path(self.dir.name)
        self.port = free_port()
        self.become("one", {"NAME": "one", "ONLY": "1"})
        env = {
            **os.environ,
            "HOME": self.dir.name,
            "TMPDIR": self.dir.name,
            "JIFFY_PORT": str(self.port),
            "JIFFY_WORKDIR": self.dir.name,
            "JIFFY_GENERATION_FILE": str(self.home / "generation"),
            "JIFFY_ENVIRONMENT_FILE": str(self.home / "environment"),
        }
        self.log = open(self.home / "log", "wb")
        self.process = subprocess.Popen([sys.executable, "-B", str(SERVER)], env=env, stdout=self.log, stderr=self.log)
        end = time.monotonic() + LIMIT
        while True:
            try:
                if self.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError((self.home / "log").read_text())
            time.sleep(0.05)

    def become(self, generation, env):
        """Writes the files that the agent writes when a sandbox receives its identity."""
        for name, text in (("environment", json.dumps(env)), ("generation", generation)):
            (self.home / f".{name}").write_text(text)
            (self.home / f".{name}").rename(self.home / name)

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read()

    def open(self, **body):
        """Starts an execution without reading its response."""
        stream = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        data = json.dumps(body).encode()
        stream.sendall(b"POST /execute HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        return stream

    def execute(self, code, **more):
        """Executes code. Returns the events of the response without keep-alive messages."""
        status, text = self.request("POST", "/execute", {"code": code, **more})
        assert status == 200, text
        lines = text.split(b"\n")
        assert lines.pop() == b"" and b"" not in lines, "a blank line breaks the clients"
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["type"] in ("stdout", "stderr"):
                age = datetime.now(timezone.utc) - datetime.fromisoformat(event["timestamp"])
                assert timedelta(0) <= age < timedelta(minutes=5), event
        assert events[-1]["type"] == "end_of_execution"
        return [e for e in events if e["type"] != "keepalive"]

    def result(self, code, **more):
        """Returns the text of the main result of code."""
        return next(e["text"] for e in self.execute(code, **more) if e.get("is_main_result"))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(LIMIT)
        self.log.close()
        self.dir.cleanup()


def text(events, stream="stdout"):
    return "".join(e["text"] for e in events if e["type"] == stream)


def read_until(stream, word):
    data = b""
    while word not in data:
        piece = stream.recv(65536)
        assert piece, data
        data += piece
    return data


class Protocol(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.stop)
        cls.languages = ["python", "bash"] + (["javascript"] if NODE else [])

    def test_state_persists_and_explicit_nulls_mean_absent(self):
        nothing = {"context_id": None, "language": None, "env_vars": None}
        first = self.server.execute("s = 41", **nothing)
        self.assertEqual([e["type"] for e in first], ["number_of_executions", "end_of_execution"])
        second = self.server.execute("s + 1")
        self.assertEqual(second[1], {"type": "result", "text": "42", "is_main_result": True})
        self.assertEqual(second[0]["execution_count"], first[0]["execution_count"] + 1)

    def test_text_results_lose_their_quotes(self):
        self.assertEqual(self.server.result("'word'"), "word")

    def test_every_representation_is_returned(self):
        code = "class All:\n" + "".join(
            f"    def {name}(self): return {value!r}\n"
            for name, value in {
                "_repr_html_": "<b>", "_repr_markdown_": "*m*", "_repr_svg_": "<svg/>", "_repr_png_": b"png",
                "_repr_jpeg_": b"jpeg", "_repr_pdf_": b"pdf", "_repr_latex_": "$x$", "_repr_json_": {"k": 1},
                "_repr_javascript_": "f()", "__repr__": "All",
            }.items()
        ) + "All()"
        (result,) = (e for e in self.server.execute(code) if e["type"] == "result")
        encoded = lambda raw: base64.b64encode(raw).decode()
        self.assertEqual(
            {k: v.strip() if isinstance(v, str) else v for k, v in result.items()},
            {
                "type": "result", "text": "All", "html": "<b>", "markdown": "*m*", "svg": "<svg/>", "png": encoded(b"png"),
                "jpeg": encoded(b"jpeg"), "pdf": encoded(b"pdf"), "latex": "$x$", "json": {"k": 1}, "javascript": "f()",
                "is_main_result": True,
            },
        )

    def test_errors_have_name_value_and_traceback(self):
        (error,) = (e for e in self.server.execute("print('before')\n1/0") if e["type"] == "error")
        self.assertEqual((error["name"], error["value"]), ("ZeroDivisionError", "division by zero"))
        self.assertIn("ZeroDivisionError", error["traceback"])
        (error,) = (e for e in self.server.execute("(") if e["type"] == "error")
        for _ in range(20):
            (error,) = (e for e in self.server.execute("kept = 1\n1/0") if e["type"] == "error")
            self.assertEqual(error["name"], "ZeroDivisionError")
            self.assertEqual(self.server.result("kept"), "1")
        (error,) = (e for e in self.server.execute("(") if e["type"] == "error")
        self.assertEqual(error["name"], "SyntaxError")

    def test_tables_and_not_a_number_are_json(self):
        table = "import pandas as pd\npd.DataFrame({'n': [1.5, float('nan')], 't': pd.to_datetime(['2024-01-02', None])})"
        (result,) = (e for e in self.server.execute(table) if e["type"] == "result")
        self.assertEqual(result["data"], {"n": [1.5, None], "t": ["2024-01-02T00:00:00", None]})

    def test_charts_survive_the_inline_magic(self):
        plot = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [3, 4], label='g')\nplt.ylabel('Size (m)')\nplt.show()"
        (result,) = (e for e in self.server.execute(plot) if e["type"] == "result")
        self.assertFalse(result["is_main_result"])
        chart = result["chart"]
        self.assertEqual((chart["type"], chart["y_unit"]), ("bar", "m"))
        self.assertEqual(chart["elements"][1], {"label": "b", "group": "g", "value": 4.0})

    def test_invalid_requests_get_an_error_status(self):
        def status(method, path, body):
            return self.server.request(method, path, body)[0]

        self.assertEqual(status("POST", "/execute", {"code": "1", "context_id": "a", "language": "python"}), 400)
        self.assertEqual(status("POST", "/execute", {"code": "1", "context_id": "nope"}), 404)
        self.assertEqual(status("POST", "/execute", {"code": "1", "language": "cobol"}), 400)
        self.assertEqual(status("POST", "/execute", {"code": 1}), 400)
        self.assertEqual(status("POST", "/execute", {}), 400)
        self.assertEqual(status("POST", "/execute", {"code": "1", "env_vars": {"A=B": "c"}}), 400)
        self.assertEqual(status("POST", "/execute", []), 400)
        self.assertEqual(status("POST", "/contexts", {"cwd": "/not/there"}), 400)
        self.assertEqual(status("POST", "/contexts", {"cwd": "/etc/passwd"}), 400)
        self.assertEqual(status("DELETE", "/contexts/nope", None), 404)
        self.assertEqual(status("POST", "/contexts/nope/restart", None), 404)
        self.assertIn(b"cobol", self.server.request("POST", "/execute", {"code": "1", "language": "cobol"})[1])

    def test_contexts_are_isolated_and_can_be_restarted_and_removed(self):
        for language in self.languages:
            _, made = self.server.request("POST", "/contexts", {"language": language, "cwd": "/tmp"})
            made = json.loads(made)
            self.assertEqual((made["language"], made["cwd"]), (language, "/tmp"))
            self.assertIn(made, json.loads(self.server.request("GET", "/contexts")[1]))
            self.server.execute({"bash": "v=1", "javascript": "var v = 1"}.get(language, "v = 1"), context_id=made["id"])
            show = {"bash": "echo $v $PWD", "javascript": "console.log(typeof v, process.cwd())"}
            show = show.get(language, "import os; print('v' in globals(), os.getcwd())")
            before = text(self.server.execute(show, context_id=made["id"]))
            self.assertIn(before, ["1 /tmp\n", "True /tmp\n", "number /tmp\n"])
            one = f"/contexts/{made['id']}"
            self.assertEqual(self.server.request("POST", one + "/restart")[0], 204)
            after = text(self.server.execute(show, context_id=made["id"]))
            self.assertIn(after, ["/tmp\n", "False /tmp\n", "undefined /tmp\n"])
            self.assertEqual(self.server.request("DELETE", one)[0], 204)
            self.assertEqual(self.server.request("POST", "/execute", {"code": "1", "context_id": made["id"]})[0], 404)

    def test_default_contexts_of_python_and_javascript_exist_at_start(self):
        listed = json.loads(self.server.request("GET", "/contexts")[1])
        languages = [context["language"] for context in listed]
        self.assertEqual(languages[:2] if NODE else languages[:1], ["python", "javascript"][: 2 if NODE else 1])

    def test_pictures_of_pil_are_results_when_they_are_shown_or_saved(self):
        make = "from PIL import Image\nimage = Image.new('RGBA', (16, 16), 'red')\n"
        saved = self.server.home / "saved.png"
        pictures = lambda code: [e for e in self.server.execute(code) if e["type"] == "result"]
        for code in ("image.show()", f"image.save({str(saved)!r})", "image"):
            (result,) = pictures(make + code)
            png = base64.b64decode(result["png"])
            self.assertTrue(png.startswith(b"\x89PNG"), code)
        self.assertTrue(saved.exists())
        # Pictures saved to memory and formats that PNG lacks are not shown; a figure is shown once.
        self.assertEqual(pictures(make + "import io; image.save(io.BytesIO(), 'PNG')"), [])
        self.assertEqual(pictures(f"Image.new('F', (2, 2)).save({str(saved.with_suffix('.tiff'))!r})"), [])
        plot = f"import matplotlib.pyplot as plt; plt.plot([1]); plt.savefig({str(saved)!r}); plt.show()"
        (result,) = pictures(plot)
        self.assertIn("chart", result)

    def test_variables_of_one_execution_are_unset_in_the_next(self):
        show = {
            "python": "import os; print(os.environ.get('NAME'), os.environ.get('ONCE'))",
            "bash": "echo $NAME ${ONCE-None}",
            "javascript": "console.log(process.env.NAME, process.env.ONCE ?? 'None')",
        }
        for language in self.languages:
            name = text(self.server.execute(show[language], language=language)).split()[0]
            with_it = self.server.execute(show[language], language=language, env_vars={"NAME": "x'$y", "ONCE": "1"})
            self.assertEqual(text(with_it), "x'$y 1\n", language)
            self.assertEqual(text(self.server.execute(show[language], language=language)), f"{name} None\n", language)

    def test_a_new_identity_has_its_own_environment_and_random_numbers(self):
        draw = {
            "python": "import random, numpy; print(random.random(), numpy.random.rand())",
            "bash": "echo $RANDOM $RANDOM $RANDOM",
            "javascript": "console.log(Math.random())",
        }
        same = {"python": "random.seed(1); numpy.random.seed(1)", "bash": "RANDOM=1"}
        show = {
            "python": "import os; print(os.environ['NAME'], os.environ.get('ONLY', ''))",
            "bash": "echo $NAME $ONLY",
            "javascript": "console.log(process.env.NAME, process.env.ONLY ?? '')",
        }
        self.server.become("one", {"NAME": "one", "ONLY": "1"})
        drawn = {}
        for language in self.languages:
            self.server.execute(draw[language], language=language)
            shown = self.server.execute(show[language], language=language)
            self.assertEqual(text(shown).split(), ["one", "1"], (language, shown))
            if language in same:
                self.server.execute(same[language], language=language)
                drawn[language] = text(self.server.execute(draw[language], language=language))
                self.server.execute(same[language], language=language)
        # A new environment without a new generation does not reseed random generators.
        self.server.become("one", {"NAME": "still one", "ONLY": "1"})
        for language in same:
            self.assertEqual(text(self.server.execute(draw[language], language=language)), drawn[language])
            self.server.execute(same[language], language=language)
        self.server.become("two", {"NAME": "two"})
        for language in self.languages:
            if language in same:
                self.assertNotEqual(text(self.server.execute(draw[language], language=language)), drawn[language])
            self.assertEqual(text(self.server.execute(show[language], language=language)).split(), ["two"])
        self.server.become("one", {"NAME": "one", "ONLY": "1"})

    def test_a_disconnect_of_the_client_interrupts_its_code(self):
        endless = {
            "python": "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.1)",
            "bash": "echo begun; while :; do :; done",
            "javascript": "console.log('begun'); while (true) {}",
        }
        for language in self.languages:
            stream = self.server.open(code=endless[language], language=language)
            read_until(stream, b"begun")
            gone = time.monotonic()
            stream.close()
            self.server.execute({"bash": ":"}.get(language, "1"), language=language)
            self.assertLess(time.monotonic() - gone, 15, language)

    def test_executions_of_one_context_wait_for_each_other_and_others_do_not(self):
        stream = self.server.open(code="import time\nprint('begun', flush=True)\ntime.sleep(30)\nlate = 1")
        read_until(stream, b"begun")
        self.assertEqual(text(self.server.execute("echo hi", language="bash")), "hi\n")
        waiting = self.server.open(code="print('second')")
        waiting.settimeout(0.5)
        with self.assertRaises(TimeoutError):
            read_until(waiting, b"second")
        stream.close()
        waiting.settimeout(LIMIT)
        read_until(waiting, b"second")

    def test_a_silent_execution_sends_keep_alive_messages(self):
        stream = self.server.open(code="import time; time.sleep(7); print('late')")
        data = read_until(stream, b"late")
        self.assertIn(b'{"type":"keepalive"}\n', data)

    def test_the_exit_of_a_process_is_reported_and_the_process_replaced(self):
        die = {"python": "import os; os._exit(3)", "bash": "kill -9 $$", "javascript": "process.exit(3)"}
        for language in self.languages:
            (error,) = (e for e in self.server.execute(die[language], language=language) if e["type"] == "error")
            self.assertEqual(error["name"], "KernelDied")
            self.server.execute({"bash": ":"}.get(language, "1"), language=language)

    def test_exit_in_python_restarts_the_kernel_and_the_next_execution_works(self):
        for code in ("kept = 1\nexit()",):
            events = self.server.execute(code)
            self.assertEqual([e for e in events if e["type"] == "error"], [])
            began = time.monotonic()
            self.assertEqual(self.server.result("'kept' in globals()"), "False")
            self.assertLess(time.monotonic() - began, 30)
        self.server.execute("kept = 2\nexit(keep_kernel=True)")
        self.assertEqual(self.server.result("kept"), "2")

    def test_a_restart_terminates_an_endless_execution(self):
        made = json.loads(self.server.request("POST", "/contexts", {})[1])
        deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun', flush=True)\nwhile True: pass"
        stream = self.server.open(code=deaf, context_id=made["id"])
        read_until(stream, b"begun")
        self.assertEqual(self.server.request("POST", f"/contexts/{made['id']}/restart")[0], 204)
        read_until(stream, b"KernelDied")
        self.assertEqual(self.server.result("1 + 1", context_id=made["id"]), "2")
        self.server.request("DELETE", f"/contexts/{made['id']}")

    def test_excessive_output_is_truncated_and_a_stuck_reader_costs_no_memory(self):
        events = self.server.execute("for _ in range(80): print('x' * (1 << 20))")
        self.assertLess(len(text(events)), 66 << 20)
        self.assertIn("output truncated", text(events))
        stuck = self.server.open(code="yes", language="bash")
        read_until(stuck, b"stdout")
        before = self.memory()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            self.assertEqual(text(self.server.execute("print(1)")), "1\n")
        self.assertLess(self.memory() - before, 32)
        stuck.close()
        self.assertEqual(text(self.server.execute("echo ok", language="bash")), "ok\n")

    def memory(self):
        """Returns the resident memory of the server in MiB."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) >> 10

    @unittest.skipUnless(NODE, "there is no Node.js")
    def test_javascript_imports_awaits_and_declares_again(self):
        result = lambda code: self.server.result(code, language="javascript")
        self.assertEqual(result("const a = 1; const { b } = await Promise.resolve({ b: 2 }); a + b"), "3")
        self.assertEqual(result("const a = 5; a + b"), "7")
        self.assertEqual(result("typeof require('fs').readFileSync"), "function")
        if ACORN:
            self.assertEqual(result("import { sep } from 'path'; sep + (await import('path')).join('x', 'y')"), "/x/y")
        self.assertEqual(result("({ n: [1, 'two'] })"), "{ n: [ 1, 'two' ] }")
        (error,) = (e for e in self.server.execute("throw new TypeError('no')", language="javascript") if e["type"] == "error")
        self.assertEqual((error["name"], error["value"]), ("TypeError", "no"))

    def test_the_stock_client_works(self):
        client = """
import os, sys
from e2b_code_interpreter import Sandbox
import e2b_code_interpreter.code_interpreter_sync as sync
sync.JUPYTER_PORT = int(sys.argv[1])
sandbox = Sandbox.create()
run = sandbox.run_code("print('out'); 6 * 7")
assert run.text == "42" and run.logs.stdout == ["out\\n"], run
plot = sandbox.run_code("import matplotlib.pyplot as plt; plt.pie([90, 10], labels=['n', 'm']); plt.show()").results[0]
assert plot.png and [(e.label, e.angle) for e in plot.chart.elements] == [("n", 324.0), ("m", 36.0)], plot
context = sandbox.create_code_context(language="bash", cwd="/tmp")
assert sandbox.run_code("pwd", context=context).logs.stdout == ["/tmp\\n"]
sandbox.remove_code_context(context)
"""
        env = {**os.environ, "E2B_DEBUG": "true", "E2B_API_KEY": "e2b_00"}
        run = subprocess.run([sys.executable, "-c", client, str(self.server.port)], env=env, capture_output=True, timeout=LIMIT)
        self.assertEqual(run.returncode, 0, run.stderr.decode())


class Directories(unittest.IsolatedAsyncioTestCase):
    @unittest.skipIf(os.geteuid() != 0, "requires root to change the user")
    async def test_a_directory_without_permission_is_reported(self):
        closed = tempfile.mkdtemp()
        self.addCleanup(os.rmdir, closed)
        code = f"""
import asyncio, os, sys
sys.path.insert(0, {str(SERVER.parent)!r})
import contexts
from pipe_context import BashContext
os.setuid(65534)
async def main():
    try:
        await contexts.Contexts({{"bash": BashContext}}).create("bash", {closed!r})
    except contexts.RequestError as error:
        print(error.status, error)
asyncio.run(main())
"""
        run = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=LIMIT)
        self.assertIn(f"400 The directory {closed} cannot be entered", run.stdout, run.stderr)


class Replies(unittest.IsolatedAsyncioTestCase):
    async def test_a_reply_that_arrives_while_the_next_request_is_sent_is_received(self):
        sys.path.insert(0, str(SERVER.parent))
        from python_context import PythonContext

        context = PythonContext("python", "/")
        await context.launch()
        try:
            first = context._send("pass", silent=True)
            # The listener does not run during this sleep, in which the reply arrives.
            time.sleep(1)
            second = context._send("pass", silent=True)
            await asyncio.wait_for(asyncio.gather(first.reply, second.reply), LIMIT)
        finally:
            await context.stop()


class FurtherLanguages(unittest.IsolatedAsyncioTestCase):
    """The module that `code-interpreter-r-java` adds, with the kernel of Python: R and Java are not installed here."""

    async def test_a_kernel_of_another_language_receives_variables_as_code(self):
        sys.path[:0] = [str(SERVER.parent), str(SERVER.parents[1] / "code-interpreter-r-java")]
        import further_languages
        from output import Output

        class Kernel(further_languages.KernelContext):
            KERNEL = "python3"

            def set_variable(self, key, value):
                return f"import os; os.environ[{key!r}] = {value!r}"

            def unset_variable(self, key):
                return f"import os; os.environ.pop({key!r}, None)"

        context = Kernel("other", "/")
        await context.launch()

        async def run(code, env):
            output = Output()
            await context.run(code, env, output)
            lines = await output.next()
            return [json.loads(line) for line in lines.splitlines()]

        try:
            read = "print(os.environ.get('WORD'), x)"
            await run("import os; x = 3", {})
            self.assertEqual(text(await run(read, {"WORD": 'a "b"'})), 'a "b" 3\n')
            self.assertEqual(text(await run(read, {})), "None 3\n")
            failed = next(e for e in await run("1 / 0", {}) if e["type"] == "error")
            self.assertEqual(failed["name"], "ZeroDivisionError")
        finally:
            await context.stop()
        self.assertEqual(set(further_languages.KINDS), {"r", "java"})
        self.assertEqual(
            further_languages.RContext("r", "/").set_variable("A", 'a "b"'),
            'do.call(Sys.setenv, stats::setNames(list("a \\"b\\""), "A"))',
        )


if __name__ == "__main__":
    unittest.main(verbosity=2)

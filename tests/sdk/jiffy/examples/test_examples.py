"""The examples of `examples/agents` run and print the expected results."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples" / "agents"
NODE_ENVIRONMENT = os.environ | {
    "JIFFY_URL": os.environ["JIFFY_TEST_URL"],
    "JIFFY_API_KEY": os.environ["JIFFY_TEST_KEY"],
}
COMMANDS = ["echo 6 >number; cat number", "cat number; exit 3"]


def run(name, *arguments, **variables):
    command = [sys.executable, EXAMPLES / name, *arguments]
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Model:
    """A model that requests the commands one after the other, and then answers with the results."""

    def __init__(self, reply):
        self.requests = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                model.requests.append((self.path, dict(self.headers), body))
                content = json.dumps(reply(len(model.requests) - 1, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}).start()


@pytest.fixture
def model():
    models = []

    def start(reply):
        models.append(Model(reply))
        return models[-1]

    yield start
    for one in models:
        one.server.shutdown()
        one.server.server_close()


def test_the_loop_for_openai_runs_the_commands_of_the_model(model):
    def reply(step, body):
        if step == len(COMMANDS):
            message = {"role": "assistant", "content": body["messages"][-1]["content"]}
        else:
            function = {"name": "shell", "arguments": json.dumps({"command": COMMANDS[step]})}
            calls = [{"id": f"call-{step}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        return {"choices": [{"message": message}]}

    server = model(reply)
    output = run("openai_loop.py", "count", OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="k", MODEL="m")
    assert output == "exit code 3\n6\n\n"
    path, headers, body = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert body["messages"] == [{"role": "user", "content": "count"}]
    results = [message for message in server.requests[-1][2]["messages"] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call-0", "call-1"]
    assert results[0]["content"] == "exit code 0\n6\n"


def test_the_loop_for_anthropic_runs_the_commands_of_the_model(model):
    def reply(step, body):
        if step == len(COMMANDS):
            return {"content": [{"type": "text", "text": body["messages"][-1]["content"][0]["content"]}]}
        use = {"type": "tool_use", "id": f"use-{step}", "name": "shell", "input": {"command": COMMANDS[step]}}
        return {"content": [{"type": "text", "text": "trying"}, use]}

    server = model(reply)
    output = run("anthropic_loop.py", "count", ANTHROPIC_BASE_URL=server.url, ANTHROPIC_API_KEY="k", MODEL="m")
    assert output == "exit code 3\n6\n\n"
    path, headers, _ = server.requests[0]
    assert (path, headers["x-api-key"]) == ("/v1/messages", "k")
    results = server.requests[1][2]["messages"][-1]["content"]
    assert results == [{"type": "tool_result", "tool_use_id": "use-0", "content": "exit code 0\n6\n"}]


def test_the_page_shows_the_loops():
    page = (ROOT / "docs" / "connect-an-llm.md").read_text()
    for name in ("openai_loop.py", "anthropic_loop.py"):
        assert (EXAMPLES / name).read_text() in page, f"docs/connect-an-llm.md does not show {name}"


def test_the_best_of_five_fixes_is_promoted():
    output = run("five_fixes.py")
    # The other fixes fail a test, or take too long.
    assert output == "fix 3 passes the tests:\nimport statistics\nmedian = statistics.median\n"


def test_a_table_is_analysed_without_a_network():
    output = run("data_analysis.py")
    assert '{"Oslo": 2, "Rome": -3}\n0 connections\n' in output
    assert "bytes" in output.splitlines()[0]


def test_two_changes_are_tested_from_one_snapshot():
    output = run("test_repository.py").splitlines()
    assert output == ["rename: passed", "shout: failed", "FAILED (failures=1)"]


@pytest.mark.skipif(
    not Path(os.environ["JIFFY_SDK_HOME"], "templates", "browser").exists(), reason="template browser is not built"
)
def test_a_browser_fills_a_form(tmp_path):
    packages = Path(os.environ["JIFFY_NODE_PACKAGES"])
    # Node.js finds packages from the directory of the program.
    program = packages / "browser.mjs"
    program.write_bytes((EXAMPLES / "browser.mjs").read_bytes())
    picture = tmp_path / "page.png"
    done = subprocess.run(["node", program, picture], capture_output=True, text=True, timeout=50, env=NODE_ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "greeting: Hello, Ada\n"), done
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_daemon_serves_the_pages_as_texts_for_agents():
    url = os.environ["JIFFY_TEST_URL"]

    def text(path):
        with urlopen(f"{url}/{path}", timeout=50) as answer:
            assert answer.headers["content-type"].startswith("text/")
            return answer.read().decode()

    index, full = text("llms.txt"), text("llms-full.txt")
    listed = re.findall(r"\]\(([\w/.-]+\.md)\)", (ROOT / "docs" / "SUMMARY.md").read_text())
    assert len(listed) > 40
    for page in listed:
        content = (ROOT / "docs" / page).read_text()
        assert f"](docs/{page}): " in index and content in full, page
        assert text(f"docs/{page}") == content, page
    with pytest.raises(HTTPError, match="404"):
        text("docs/SUMMARY.md")

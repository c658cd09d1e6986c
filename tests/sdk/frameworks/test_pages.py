"""The Python programs of docs/integrations run, with a scripted model."""

import re
import subprocess
import sys
from pathlib import Path

PAGES = Path(__file__).resolve().parents[3] / "docs/integrations"


def run_program(name, monkeypatch, server, timeout=60):
    """Runs the program of a page as a user would, in an interpreter of its own."""
    (program,) = re.findall(r"^```python [^\n]*\n(.*?)^```", (PAGES / name).read_text(), re.M | re.S)
    for variable in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL"):
        monkeypatch.setenv(variable, server.url)
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(variable, "k")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_program_for_deepagents(model, monkeypatch):
    server = model([("execute", {"command": "echo x >>log; cat log"})], "one", [("execute", {"command": "cat log"})])
    run_program("langchain.md", monkeypatch, server)
    # The second invocation starts before the file was written.
    assert "No such file" in server.results[-1]


def test_the_program_for_the_openai_agents_sdk(model, monkeypatch):
    server = model([("exec_command", {"cmd": "cat answer"})], lambda results: results[-1])
    output = run_program("openai-agents.md", monkeypatch, server)
    assert "41" in output and "42" not in output

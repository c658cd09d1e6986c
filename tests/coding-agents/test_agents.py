"""The programs Claude Code, Codex and OpenCode with scripted models that damage the project."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from models import Model
from support import JIFFY, ProjectTest, tree

PROGRAMS = Path(os.environ["AGENT_PROGRAMS"]) / "node_modules/.bin"
HOME = Path(os.environ["HOME"])


class Agent:
    """Tests of every agent."""

    # Name of the integration, and path of its file below the home directory.
    integration = ""
    file = ""

    def command(self, model):
        """Arguments and variables of the agent."""
        raise NotImplementedError

    def setUp(self):
        super().setUp()
        if not PROGRAMS.exists():
            self.skipTest("the programs are not installed")
        self.install()
        self.addCleanup(self.jiffy, "integrate", self.integration, "--remove")

    def install(self, *options):
        done = self.jiffy("integrate", self.integration, *options)
        self.assertEqual(done.returncode, 0, done)
        return done.stdout

    def converse(self, turns, **variables):
        """Runs the agent with a scripted model until all turns are used. Returns the model."""
        model = Model(turns)
        self.addCleanup(model.close)
        words, environment = self.command(model)
        kept = ("PATH", "HOME", "JIFFY_HOME", "TMPDIR")
        environment = {**{name: os.environ[name] for name in kept if name in os.environ}, **environment, **variables}
        done = subprocess.run(
            words, cwd=self.root, env=environment, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
        )
        self.assertEqual(model.turns, [], (done.stdout[-3000:], done.stderr[-3000:]))
        return model

    def test_damage_by_the_agent_is_undone(self):
        self.write("src/main.c", "int main() {}\n").chmod(0o640)
        self.write("src/data", os.urandom(50_000))
        self.write("notes.txt", "one\n")
        before = tree(self.root)

        def edit_and_damage():
            self.write("notes.txt", "edited on the host\n")
            return ["cat notes.txt; rm -rf src; echo $'it\\'s' >notes.txt"]

        turns = [["rm src/main.c", "echo damaged >>src/data"], edit_and_damage, ["uname -n; ls -A"]]
        model = self.converse(turns)
        self.assertTrue(any("edited on the host" in result for result in model.results), model.results)
        self.assertNotIn(f"{os.uname().nodename}\n", model.results[-1])
        self.assertEqual(sorted(tree(self.root)), ["notes.txt"])
        self.assertEqual((self.root / "notes.txt").read_text(), "it's\n")
        self.assertEqual(len(self.history()), 4)
        self.undo("2")
        self.assertEqual((self.root / "notes.txt").read_text(), "edited on the host\n")
        self.undo("2")
        self.write("notes.txt", "one\n")
        self.assertEqual(tree(self.root), before)

    def test_commands_do_not_run_without_a_sandbox(self):
        self.write("f", "1\n")
        model = self.converse([["rm f; touch ran"]], JIFFY_URL="http://127.0.0.1:1", JIFFY_API_KEY="e2b_" + "0" * 40)
        self.assertEqual(sorted(tree(self.root)), ["f"])
        self.assertTrue(any("the command was not run" in result for result in model.results), model.results)

    def test_hostile_commands_arrive_unchanged(self):
        commands = [
            "cat <<'EOF' >a\n$HOME `id` \\ \" '\nEOF",
            "printf '%s' $'x\\ty' \"'; touch outside; '\" >b",
            "cat >c <<'EOF'\n" + "y" * (100 << 10) + "\nEOF",
        ]
        self.converse([[command] for command in commands])
        self.assertEqual((self.root / "a").read_text(), "$HOME `id` \\ \" '\n")
        self.assertEqual((self.root / "b").read_text(), "x\ty'; touch outside; '")
        self.assertEqual((self.root / "c").stat().st_size, (100 << 10) + 1)
        self.assertEqual(sorted(tree(self.root)), ["a", "b", "c"])

    def test_the_integration_is_removed_and_the_rest_of_the_file_is_preserved(self):
        path = HOME / self.file
        present = path.read_bytes()
        self.assertIn("needs no change", self.install())
        self.assertIn("+", self.jiffy("integrate", self.integration, "--allow", "--dry-run").stdout)
        self.assertEqual(path.read_bytes(), present)
        self.assertEqual(self.jiffy("integrate", self.integration, "--remove").returncode, 0)
        self.assertNotIn("agent-shell", path.read_text() if path.exists() else "")


class ClaudeCode(Agent, ProjectTest):
    integration = "claude-code"
    file = ".claude/settings.json"

    def command(self, model):
        words = [PROGRAMS / "claude", "-p", "go", "--allowedTools", "Bash"]
        return words, {
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_API_KEY": "sk-ant-test",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        }


class Codex(Agent, ProjectTest):
    integration = "codex"
    file = ".codex/hooks.json"

    def command(self, model):
        settings = {
            "model": "m",
            "model_provider": "local",
            "sandbox_mode": "danger-full-access",
            "approval_policy": "never",
        }
        provider = {"name": "local", "base_url": f"{model.url}/v1", "wire_api": "responses", "env_key": "MODEL_ACCESS"}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
        lines += ["[model_providers.local]\n", *(f"{name} = {json.dumps(value)}\n" for name, value in provider.items())]
        (HOME / ".codex/config.toml").write_text("".join(lines))
        words = [PROGRAMS / "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-hook-trust", "go"]
        return words, {"MODEL_ACCESS": "x"}


class OpenCode(Agent, ProjectTest):
    integration = "opencode"
    file = ".config/opencode/plugins/jiffy.js"

    def command(self, model):
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{model.url}/v1", "apiKey": "x"},
            "models": {"m": {}},
        }
        settings = {"provider": {"local": provider}, "model": "local/m", "small_model": "local/m", "autoupdate": False}
        (HOME / ".config/opencode/opencode.json").write_text(json.dumps(settings))
        variables = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
        return [PROGRAMS / "opencode", "run", "go"], variables


class McpClients(ProjectTest):
    """Clients list the server that `jiffy mcp install` adds, and connect to it."""

    def setUp(self):
        super().setUp()
        # Other tests change the files of the clients at the same time.
        home = tempfile.mkdtemp(prefix="home-")
        self.addCleanup(shutil.rmtree, home)
        self.enterContext(mock.patch.dict(os.environ, HOME=home))

    def list_servers(self, client, words):
        """Adds the server to a client. Returns the list that a command of the client prints."""
        if not PROGRAMS.exists():
            self.skipTest("the programs are not installed")
        self.addCleanup(self.jiffy, "mcp", "install", client, "--remove")
        self.assertEqual(self.jiffy("mcp", "install", client, "--", "--read-only").returncode, 0)
        listed = self.run_client(words)
        self.assertEqual(self.jiffy("mcp", "install", client, "--remove").returncode, 0)
        self.assertNotIn("jiffy", self.run_client(words))
        return listed

    def run_client(self, words):
        done = subprocess.run(words, cwd=self.root, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done)
        return done.stdout

    def test_claude_code_connects_to_the_server(self):
        listed = self.list_servers("claude", [PROGRAMS / "claude", "mcp", "list"])
        self.assertRegex(listed, r"jiffy: .*mcp --read-only.*Connected")

    def test_codex_lists_the_server(self):
        listed = self.list_servers("codex", [PROGRAMS / "codex", "mcp", "list"])
        self.assertRegex(listed, r"jiffy .*mcp --read-only.*enabled")


class Plugin(ProjectTest):
    def test_the_plugin_of_claude_code_is_valid(self):
        if not PROGRAMS.exists():
            self.skipTest("the programs are not installed")
        plugin = Path(__file__).resolve().parents[2] / "integrations/claude-code"
        validate = [PROGRAMS / "claude", "plugin", "validate", plugin]
        done = subprocess.run(validate, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done)


if __name__ == "__main__":
    unittest.main()

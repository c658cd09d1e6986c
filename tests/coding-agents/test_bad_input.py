"""Hostile commands, guests and conflicts."""

import os
import subprocess

from support import ProjectTest, tree


class Quoting(ProjectTest):
    def test_commands_are_not_changed_on_their_way(self):
        commands = {
            "cat <<'EOF'\n$HOME `id` \\ \"\nEOF": "$HOME `id` \\ \"\n",
            "cat <<EOF\n$((1+1)) 'x'\nEOF\n": "2 'x'\n",
            "printf '%s|' $'a\\tb\\'c' \"d\ne\"": "a\tb'c|d\ne|",
            "echo \"$0\" | grep -c . ; echo $#": "1\n0\n",
            "-n": None,
            "echo '\u00e9\u4e2d'": "\u00e9\u4e2d\n",
            "! true || echo no; (exit 0) && { echo group; }": "no\ngroup\n",
            "echo a;\n\n# comment\necho b \\\n c": "a\nb c\n",
        }
        for command, expected in commands.items():
            done = self.run_command(command)
            if expected is not None:
                self.assertEqual(done.stdout, expected, (command, done.stderr))
        self.assertEqual(self.run_command("echo (").returncode, 2)
        done = self.jiffy("agent-shell", "exec", "--", "printf", "%s|", "a b", "it's", "$x")
        self.assertEqual(done.stdout, "a b|it's|$x|")

    def test_long_commands_are_run_and_zero_bytes_are_rejected(self):
        path = self.outside / "command"
        text = "x" * (300 << 10)
        path.write_text(f"printf %s '{text}' | wc -c")
        done = self.jiffy("agent-shell", "exec", "--file", str(path))
        self.assertEqual(done.stdout, f"{300 << 10}\n", done.stderr)
        self.assertFalse(path.exists())
        for content in (b"echo a\0b", b"\xff\xfe", b"x" * (2 << 20)):
            path.write_bytes(content)
            self.assertEqual(self.jiffy("agent-shell", "exec", "--file", str(path)).returncode, 125)


class HostileGuest(ProjectTest):
    def test_links_and_special_files_of_the_sandbox_have_no_effect_outside(self):
        victim = self.outside / "victim"
        victim.write_text("mine")
        os.symlink(self.outside, self.root / "out")
        before = tree(self.outside)
        done = self.run_command(
            f"rm out; mkdir out; echo theirs >out/victim; ln -s {victim} l1; ln -s ../../etc/passwd l2; "
            "ln -s . d; ln -s d/../x l3; mkfifo pipe; mknod null c 1 3; cp /bin/true setuid; chmod 6755 setuid; "
            "mkdir -p a/b; ln -s ../a a/fine"
        )
        self.assertEqual(tree(self.outside), before)
        self.assertEqual((self.root / "out/victim").read_text(), "theirs\n")
        for name in ("l1", "l2", "l3", "pipe", "null"):
            self.assertFalse(os.path.lexists(self.root / name), name)
        for name in ("l1", "l2", "l3"):
            self.assertIn(f"not copied: {name}:", done.stderr)
        self.assertEqual((self.root / "setuid").stat().st_mode & 0o7777, 0o755)
        self.assertEqual(os.readlink(self.root / "a/fine"), "../a")
        self.undo()
        self.assertEqual(os.readlink(self.root / "out"), str(self.outside))
        self.assertEqual(tree(self.outside), before)

    def test_a_link_that_appears_on_the_host_is_not_followed(self):
        self.write("dir/file", "1\n")
        self.ok("true")
        command = "echo begun; until [ -e /tmp/go ]; do sleep 0.05; done; echo 2 >dir/file; echo n >dir/new"
        process = self.start("agent-shell", "exec", "--", command, stdin=subprocess.PIPE)
        self.assertEqual(process.stdout.readline(), b"begun\n")
        os.rename(self.root / "dir", self.root / "moved")
        os.symlink(self.outside, self.root / "dir")
        # Ids of sandboxes have 20 characters.
        sandbox = [e for e in self.jiffy("agent-shell", "status").stdout.split() if len(e) == 20][0]
        self.assertEqual(self.jiffy("exec", sandbox, "--", "touch", "/tmp/go").returncode, 0)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 125, error)
        self.assertIn(b"conflict: dir/file", error)
        self.assertEqual(os.listdir(self.outside), [])
        self.assertEqual((self.root / "moved/file").read_text(), "1\n")

    def test_files_that_start_programs_of_the_host_are_not_changed(self):
        subprocess.run(["git", "init", "-q", self.root], check=True)
        config = (self.root / ".git/config").read_bytes()
        done = self.run_command(
            "echo '[core] fsmonitor = touch /tmp/x' >>.git/config; echo '#!/bin/sh' >.git/hooks/pre-commit; "
            "mkdir .claude; echo '{}' >.claude/settings.json; echo x >normal; printf 'ref: x' >.git/HEAD"
        )
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual((self.root / ".git/config").read_bytes(), config)
        self.assertFalse((self.root / ".git/hooks/pre-commit").exists())
        self.assertFalse((self.root / ".claude").exists())
        self.assertEqual((self.root / ".git/HEAD").read_text(), "ref: x")
        self.assertIn("not copied: .git/config", done.stderr)
        copy = done.stderr.split("not copied: .git/config")[1].splitlines()[0].split("version is ")[1]
        with open(copy) as file:
            self.assertIn("fsmonitor", file.read())
        # The sandbox has the version of the host again.
        self.assertEqual(self.ok("grep -c fsmonitor .git/config || true; ls -A .claude 2>/dev/null | wc -l"), "0\n0\n")


class Conflicts(ProjectTest):
    def test_a_file_changed_on_both_sides_is_not_overwritten(self):
        self.write("both", "0\n")
        self.write("gone", "0\n")
        self.write("other", "0\n")
        self.ok("true")
        change = "echo guest >both; rm gone; echo guest >other"
        wait = "echo begun; until [ -e /tmp/go ]; do sleep 0.05; done"
        process = self.start("agent-shell", "exec", "--", f"{change}; {wait}")
        self.assertEqual(process.stdout.readline(), b"begun\n")
        self.write("both", "host\n")
        self.write("gone", "host\n")
        # Ids of sandboxes have 20 characters.
        sandbox = [e for e in self.jiffy("agent-shell", "status").stdout.split() if len(e) == 20][0]
        self.assertEqual(self.jiffy("exec", sandbox, "--", "touch", "/tmp/go").returncode, 0)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 125, error)
        self.assertEqual((self.root / "both").read_text(), "host\n")
        self.assertEqual((self.root / "gone").read_text(), "host\n")
        self.assertEqual((self.root / "other").read_text(), "guest\n")
        entry = self.history()[-1]
        self.assertEqual(sorted(r["path"] for r in entry["not_copied"] if r["conflict"]), ["both", "gone"])
        copy = [r["copy"] for r in entry["not_copied"] if r["path"] == "both"][0]
        with open(copy) as file:
            self.assertEqual(file.read(), "guest\n")
        self.assertEqual(self.ok("cat both gone"), "host\nhost\n")
        self.undo("2")
        self.assertEqual((self.root / "both").read_text(), "host\n")
        self.assertEqual((self.root / "other").read_text(), "0\n")

"""Synchronisation, history and undo."""

import os
import signal
import subprocess
import unittest

from support import JIFFY, ProjectTest, tree


class Synchronisation(ProjectTest):
    def test_changes_are_copied_in_both_directions(self):
        self.write("a/one", "1\n")
        self.write("a/run", "#!/bin/sh\necho ran\n").chmod(0o755)
        self.write("bytes", bytes(range(256)) * 300)
        self.write(b"\xff\n name".decode("utf8", "surrogateescape"), "odd")
        os.symlink("a/one", self.root / "link")
        (self.root / "empty").mkdir(mode=0o750)
        self.assertEqual(self.ok("a/run; cat link; ls -d empty"), "ran\n1\nempty\n")
        before = tree(self.root)
        self.assertEqual(self.ok("true"), "")
        self.assertEqual(tree(self.root), before)
        self.ok(
            "echo 2 >a/one; mkdir -m 700 new; echo n >new/file; rm bytes; ln -s new/file l2; "
            "chmod 640 a/run; rmdir empty"
        )
        self.assertEqual((self.root / "a/one").read_text(), "2\n")
        self.assertEqual((self.root / "new/file").read_text(), "n\n")
        self.assertEqual((self.root / "new").stat().st_mode & 0o777, 0o700)
        self.assertEqual((self.root / "a/run").stat().st_mode & 0o777, 0o640)
        self.assertEqual(os.readlink(self.root / "l2"), "new/file")
        self.assertFalse((self.root / "bytes").exists() or (self.root / "empty").exists())
        # Changes of the host arrive before the next command, deletions too.
        self.write("a/one", "3\n")
        (self.root / "new/file").unlink()
        self.assertEqual(self.ok("cat a/one; ls new"), "3\n")
        changes = {change["path"]: change["kind"] for change in self.history()[-2]["changes"]}
        expected = {"a/one": "C", "a/run": "C", "bytes": "D", "empty": "D", "l2": "A", "new": "A", "new/file": "A"}
        self.assertEqual(changes, expected)

    def test_ignored_files_stay_on_their_side(self):
        self.write(".gitignore", "target/\n*.secret\n")
        self.write("k.secret", "mine")
        self.write("target/host", "mine")
        self.assertEqual(self.ok("ls -A; mkdir target; echo x >target/guest; echo y >g.secret"), ".gitignore\n")
        self.assertEqual(sorted(os.listdir(self.root / "target")), ["host"])
        self.assertFalse((self.root / "g.secret").exists())
        # Rules that a command creates apply to its own files.
        self.ok("echo out/ >>.gitignore; mkdir out; echo z >out/big; ls target")
        self.assertFalse((self.root / "out").exists())
        self.assertEqual(self.ok("cat out/big target/guest k.secret 2>/dev/null || true"), "z\nx\n")

    def test_directory_and_variables_persist_and_exit_codes_are_returned(self):
        self.write("sub/deep/file", "")
        self.ok("cd sub/deep; export A='it'\\''s \"x\"\n$y' B=2; C=3")
        self.assertEqual(self.ok('pwd; echo "$A$B-$C"'), f"{self.root}/sub/deep\nit's \"x\"\n$y2-\n")
        self.ok("unset A")
        self.assertEqual(self.ok('echo "${A-unset}"', "--workdir", str(self.root / "sub")), "unset\n")
        self.assertEqual(self.ok("pwd"), f"{self.root}/sub\n")
        self.assertEqual(self.run_command("echo out; echo err >&2; exit 7").returncode, 7)
        done = self.run_command("kill -9 $$")
        self.assertEqual(done.returncode, 137)
        self.assertEqual([entry["exit_code"] for entry in self.history()][-2:], [7, 137])

    def test_parallel_commands_run_one_after_the_other(self):
        self.write("log", "")
        script = "n=$(cat n 2>/dev/null || echo 0); sleep 0.2; echo $((n + 1)) >n"
        processes = [self.start("agent-shell", "exec", "--", script) for _ in range(4)]
        for process in processes:
            self.assertEqual(process.communicate(timeout=120)[1], b"")
            self.assertEqual(process.returncode, 0)
        self.assertEqual((self.root / "n").read_text(), "4\n")
        self.undo("2")
        self.assertEqual((self.root / "n").read_text(), "2\n")

    def test_background_commands_do_not_delay_others(self):
        command = "echo up; until [ -e stop ]; do sleep 0.05; done; echo late >late"
        background = self.start("agent-shell", "exec", "--background", "--", command)
        self.assertEqual(background.stdout.readline(), b"up\n")
        self.ok("touch stop")
        background.communicate(timeout=60)
        self.assertEqual(background.returncode, 0)
        self.assertEqual((self.root / "late").read_text(), "late\n")

    def test_signals_end_the_command(self):
        process = self.start("agent-shell", "exec", "--", "echo begun; echo x >partial; exec sleep 1000")
        self.assertEqual(process.stdout.readline(), b"begun\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        self.assertNotEqual(process.returncode, 0)
        self.assertEqual((self.root / "partial").read_text(), "x\n")
        self.assertEqual(self.ok("pgrep -x sleep || echo none"), "none\n")


class Undo(ProjectTest):
    def damage(self):
        """Writes the files that the commands of a test damage. Returns the state of the project."""
        self.write("src/main.c", "int main() {}\n").chmod(0o640)
        self.write("src/data", os.urandom(100_000))
        self.write("docs/a b.md", "text\n")
        os.symlink("src/main.c", self.root / "main")
        (self.root / "empty").mkdir()
        return tree(self.root)

    def test_undo_restores_every_byte(self):
        before = self.damage()
        self.ok(
            "rm -rf src empty main; echo x >'docs/a b.md'; mkdir src; ln -s docs src/link; echo f >empty; "
            "chmod 700 docs"
        )
        self.assertNotEqual(tree(self.root), before)
        self.undo()
        self.assertEqual(tree(self.root), before)
        self.assertEqual(self.ok("cat src/main.c; stat -c %a src/main.c docs"), "int main() {}\n640\n755\n")
        self.assertEqual(len(self.history()), 1)

    def test_several_commands_are_undone_in_host_and_sandbox(self):
        before = self.damage()
        self.ok("echo kept >/root/state; cd src; export V=1")
        for number in range(3):
            self.ok(f"echo {number} >>data; rm -f main.c; echo {number} >/root/state; cd /; export V={number}")
            self.ok(f"cd {self.root}/src; echo n >new-{number}")
        self.undo("6")
        self.assertEqual(tree(self.root), before)
        self.assertEqual(self.ok('cat /root/state; pwd; echo "$V"'), f"kept\n{self.root}/src\n1\n")
        self.assertEqual(len(self.history()), 2)

    def test_host_edits_between_commands_are_kept(self):
        before = self.damage()
        self.ok("echo c1 >>src/data")
        self.write("docs/a b.md", "edited on the host\n")
        self.ok("rm -rf docs src/data")
        self.undo()
        self.assertEqual((self.root / "docs/a b.md").read_text(), "edited on the host\n")
        self.assertTrue((self.root / "src/data").read_bytes().endswith(b"c1\n"))
        self.undo()
        self.assertEqual((self.root / "docs/a b.md").read_text(), "edited on the host\n")
        self.write("docs/a b.md", "text\n")
        self.assertEqual(tree(self.root), before)
        self.assertEqual(self.ok("cat 'docs/a b.md'"), "text\n")

    def test_files_edited_after_the_command_are_restored_only_with_force(self):
        before = self.damage()
        self.ok("echo damaged >src/main.c; rm 'docs/a b.md'")
        self.write("src/main.c", "my edit\n")
        damaged = tree(self.root)
        done = self.jiffy("undo")
        self.assertEqual(done.returncode, 1)
        self.assertIn("src/main.c", done.stderr)
        self.assertIn("--force", done.stderr)
        self.assertEqual(tree(self.root), damaged)
        output = self.undo("--force")
        self.assertEqual(tree(self.root), before)
        directory = output.strip().splitlines()[-1].split(" are in ")[1]
        with open(f"{directory}/src/main.c") as file:
            self.assertEqual(file.read(), "my edit\n")

    def test_a_missing_sandbox_is_replaced_and_the_host_can_be_restored(self):
        before = self.damage()
        self.ok("echo installed >/root/state")
        self.ok("rm -rf src")
        status = self.jiffy("agent-shell", "status").stdout.splitlines()
        name = next(line.split()[1] for line in status if line.startswith("sandbox"))
        self.assertEqual(self.jiffy("rm", "-y", name).returncode, 0)
        self.assertEqual(self.ok("cat /root/state; ls"), "installed\ndocs\nempty\nmain\n")
        self.undo("2")
        self.assertEqual(tree(self.root), before)
        self.assertEqual(self.ok("cat /root/state src/main.c"), "installed\nint main() {}\n")
        self.ok("rm -rf src")
        self.undo("--files-only")
        self.assertEqual(tree(self.root), before)
        self.assertEqual(self.ok("cat src/main.c; ls /root/state 2>&1 | wc -l"), "int main() {}\n1\n")

    def test_the_history_is_bounded(self):
        self.assertEqual(self.jiffy("agent-shell", "start", "--keep", "2", "--saved-size", "1MiB").returncode, 0)
        self.write("big", os.urandom(900_000))
        for number in range(3):
            self.ok(f"echo {number} >>big")
        self.assertLessEqual(len(self.history()), 2)
        self.write("huge", os.urandom(3_000_000))
        done = self.run_command("rm huge")
        self.assertEqual(done.returncode, 125)
        self.assertIn("--saved-size", done.stderr)
        self.assertTrue((self.root / "huge").exists())
        self.undo()
        self.assertEqual(self.ok("wc -c <huge"), "3000000\n")


class Crashes(ProjectTest):
    def test_a_killed_program_leaves_a_command_that_can_be_undone(self):
        self.write("f", "1\n")
        before = tree(self.root)
        process = self.start("agent-shell", "exec", "--", "echo 2 >f; echo begun; sleep 1000")
        self.assertEqual(process.stdout.readline(), b"begun\n")
        process.kill()
        process.communicate()
        self.assertEqual((self.root / "f").read_text(), "1\n")
        self.assertEqual(self.ok("cat f; pgrep -x sleep || echo none"), "2\nnone\n")
        self.assertEqual([e["status"] for e in self.history()], ["interrupted", "exited"])
        self.undo("2")
        self.assertEqual(tree(self.root), before)

    def test_a_program_killed_at_any_time_loses_no_file(self):
        self.write("f", "0\n")
        self.ok("true")
        for delay in (0.01, 0.03, 0.06, 0.1, 0.15, 0.2):
            before = tree(self.root)
            count = len(self.history())
            process = self.start("agent-shell", "exec", "--", "rm f; echo n >>g")
            try:
                process.communicate(timeout=delay)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            self.ok("true")
            self.undo(str(len(self.history()) - count))
            self.assertEqual(tree(self.root), before, delay)
            self.assertEqual(self.ok("cat f; ls"), "0\nf\n")


class FailClosed(ProjectTest):
    def test_without_a_daemon_no_command_runs(self):
        environment = {**os.environ, "JIFFY_URL": "http://127.0.0.1:1", "JIFFY_API_KEY": "e2b_" + "0" * 40}
        marker = self.outside / "ran"
        done = subprocess.run(
            [JIFFY, "agent-shell", "exec", "--", f"touch {marker}"],
            cwd=self.root, env=environment, capture_output=True, text=True, timeout=60,
        )
        self.assertEqual(done.returncode, 125)
        self.assertIn("the command was not run", done.stderr)
        self.assertFalse(marker.exists())

    def test_home_and_system_directories_are_rejected(self):
        for directory in ("/", "/etc", os.environ["HOME"]):
            done = self.run_command("true", cwd=directory)
            self.assertEqual(done.returncode, 125)
            self.assertIn("cannot be a project", done.stderr)


if __name__ == "__main__":
    unittest.main()

// Runs the shell commands of OpenCode in a sandbox of the project, with undo. Installed by
// `jiffy integrate opencode`.
import { spawnSync } from "node:child_process";

const PROGRAM = "jiffy";

export const Jiffy = async ({ directory }) => ({
  "tool.execute.before": async (input, output) => {
    if (input.tool !== "bash") return;
    const call = JSON.stringify({ cwd: directory, tool_input: output.args });
    const words = ["agent-shell", "hook", "opencode"];
    const done = spawnSync(PROGRAM, words, { input: call, encoding: "utf8", maxBuffer: 64 << 20 });
    if (done.status !== 0) {
      // The error prevents the call.
      throw new Error(`the command was not run: ${done.error?.message ?? done.stderr}`);
    }
    output.args.command = JSON.parse(done.stdout).hookSpecificOutput.updatedInput.command;
  },
});

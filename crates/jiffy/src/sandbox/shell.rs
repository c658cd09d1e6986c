//! `jiffy shell`: a shell in a sandbox, with a terminal where there is one.

use crate::cli::{ExecArgs, SandboxExecArgs, ShellArgs};
use std::io::IsTerminal;
use std::process::ExitCode;

/// Becomes a login shell of the best kind that there is.
const LOGIN_SHELL_SCRIPT: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";

/// Runs it and returns its exit code.
pub fn run(args: &ShellArgs) -> anyhow::Result<ExitCode> {
    let terminal = std::io::stdin().is_terminal();
    let command = match &args.shell {
        Some(shell) => vec![shell.clone()],
        None => ["sh", "-c", LOGIN_SHELL_SCRIPT].map(str::to_owned).to_vec(),
    };
    super::exec::run(&SandboxExecArgs {
        id: args.id.clone(),
        exec: ExecArgs {
            env: args.env.clone(),
            workdir: args.workdir.clone(),
            user: args.user.clone(),
            timeout: None,
            interactive: true,
            tty: terminal,
            json: false,
            command,
        },
        host: args.host.clone(),
    })
}

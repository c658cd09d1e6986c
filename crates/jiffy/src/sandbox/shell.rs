//! `jiffy shell`: opens a shell in a sandbox, with a terminal if standard input is a terminal.

use crate::cli::{ExecArgs, SandboxExecArgs, ShellArgs};
use std::io::IsTerminal;
use std::process::ExitCode;

/// Runs bash as a login shell if it is installed, otherwise sh.
const LOGIN_SHELL_SCRIPT: &str = "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l";

/// Runs the shell and returns its exit code.
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
            // Without a terminal, the shell reads commands from standard input.
            tty: terminal,
            json: false,
            command,
        },
        host: args.host.clone(),
    })
}

//! Shell in a sandbox, as a process of `jiffy shell` on the same terminal.

use super::input::Input;
use crate::FAILURE_EXIT_CODE;
use crate::cli::HostArgs;
use crate::run::Signals;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{SetArg, tcgetattr, tcsetattr};
use nix::unistd::Pid;
use std::io;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::process::{Child, Command};

/// This program, even if its file was replaced.
const PROGRAM: &str = "/proc/self/exe";
/// Time for a shell to exit after SIGHUP.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(2);

/// End of a shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShellEnd {
    /// The shell has exited.
    Exited,
    /// This process received a signal that ends it.
    Signal(i32),
}

/// Runs a shell in a sandbox until it exits. The terminal must be in its usual mode. A separate
/// process leaves no thread that reads the terminal.
pub async fn run(
    id: &str,
    host: &HostArgs,
    input: &mut Input,
    signals: &mut Signals,
) -> io::Result<ShellEnd> {
    let mut command = Command::new(PROGRAM);
    command.arg0("jiffy").args(["shell", id]).kill_on_drop(true);
    if let Some(url) = &host.url {
        command.args(["--url", url]);
    }
    if let Some(file) = &host.key_file {
        command.arg("--key-file").arg(file);
    }
    let mode = tcgetattr(io::stdin())?;
    let mut child = command.spawn()?;
    let end = wait(&mut child, signals).await;
    // A shell that was killed cannot restore the mode.
    tcsetattr(io::stdin(), SetArg::TCSANOW, &mode)?;
    let status = match end? {
        Ok(status) => status,
        Err(number) => return Ok(ShellEnd::Signal(number)),
    };
    if status.code() != Some(FAILURE_EXIT_CODE.into()) {
        return Ok(ShellEnd::Exited);
    }
    // The message of `jiffy shell` would disappear with the return to full-screen mode.
    errln!("jiffy: press Enter to return to `jiffy top`");
    tokio::select! {
        keys = input.next() => {
            keys?;
            Ok(ShellEnd::Exited)
        }
        number = signals.next() => Ok(match number {
            libc::SIGINT => ShellEnd::Exited,
            number => ShellEnd::Signal(number),
        }),
    }
}

/// Waits for the shell. Returns the number of a signal that ends this process.
async fn wait(child: &mut Child, signals: &mut Signals) -> io::Result<Result<ExitStatus, i32>> {
    loop {
        tokio::select! {
            status = child.wait() => return status.map(Ok),
            number = signals.next() => {
                // The terminal sends Ctrl-C to both processes, and the shell handles it.
                if number == libc::SIGINT {
                    continue;
                }
                hang_up(child).await?;
                return Ok(Err(number));
            }
        }
    }
}

/// Ends the shell. Interactive shells ignore SIGTERM, but not SIGHUP.
async fn hang_up(child: &mut Child) -> io::Result<()> {
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        // An error means that the shell has exited.
        let _ = kill(Pid::from_raw(pid), Signal::SIGHUP);
    }
    if tokio::time::timeout(HANG_UP_TIMEOUT, child.wait())
        .await
        .is_err()
    {
        child.kill().await?;
    }
    Ok(())
}

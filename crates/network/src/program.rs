//! Runs `ip`, `nft` and `iptables` as programs. Their languages are more stable than the kernel's
//! interfaces, and operators can repeat their commands.

use crate::NetError;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Directories searched after `PATH`, which often omits the administrative ones.
const SEARCH_DIRS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Returns the path of program `name`.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let named = std::env::split_paths(&path);
    let mut places = named.chain(SEARCH_DIRS.iter().map(|p| Path::new(p).to_owned()));
    places.find_map(|place| Some(place.join(name)).filter(|path| path.is_file()))
}

/// Returns the path of program `name`. The error has the Debian package to install.
pub(crate) fn require(name: &str) -> Result<PathBuf, NetError> {
    let package = match name {
        "ip" => "iproute2",
        "nft" => "nftables",
        other => other,
    };
    find(name).ok_or_else(|| {
        NetError::Unable(format!(
            "`{name}` is not installed: run `apt-get install {package}`"
        ))
    })
}

/// Runs a program with `input` in the network namespace of this thread. Returns its output.
pub(crate) fn run(program: &'static str, args: &[&str], input: &str) -> Result<String, NetError> {
    let path = require(program)?;
    let failed = || NetError::host(format!("running {}", path.display()));
    let mut command = Command::new(&path);
    command
        .args(args)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // The child must not outlive a killed process: clean-up would miss objects that it creates
    // later.
    // SAFETY: the closure makes one system call between fork and exec.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
    let mut child = command.spawn().map_err(failed())?;
    // Dropping `stdin` after the write closes it, which the program awaits.
    if let Some(mut stdin) = child.stdin.take() {
        // If the program exits without reading its input, its error output has the reason.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    // The first line states the error, the others repeat the input.
    let message = message
        .lines()
        .next()
        .unwrap_or("no error message")
        .to_owned();
    Err(NetError::Program { program, message })
}

/// Runs an `nft` script, which is applied atomically.
pub(crate) fn nft(script: &str) -> Result<(), NetError> {
    run("nft", &["-f", "-"], script).map(drop)
}

/// Runs a list of `ip` commands. Stops at the first failure.
pub(crate) fn ip(commands: &[String]) -> Result<(), NetError> {
    run("ip", &["-batch", "-"], &commands.join("\n")).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error = require("no-such-program").unwrap_err().to_string();
        assert!(error.contains("apt-get install no-such-program"), "{error}");
    }
}

//! Key broker of the fetcher. The key file may name a command (for example of a KMS), which the
//! confined fetcher cannot start. The broker is a separate process that runs this command.
//!
//! The *fetcher* is the process of this host that downloads missing memory of guests from the
//! store.

use crate::host::RemoteError;
use crate::{KeyBroker, Keyring};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use std::error::Error;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// First argument of a program that runs as the key broker. The second argument is the path of the
/// key file, and standard input is the socket to the fetcher.
pub const KEY_BROKER_ARGUMENT: &str = "--as-key-broker";

/// Returns the keyring of the fetcher for the key file at `path`. If the file has a command, starts
/// a broker that runs the command.
pub(super) fn keyring(path: &Path, keyring: Keyring) -> Result<Keyring, RemoteError> {
    if !keyring.has_command() {
        return Ok(keyring);
    }
    let start = || -> io::Result<KeyBroker> {
        let (ours, theirs) = UnixStream::pair()?;
        Command::new("/proc/self/exe")
            .arg0("jiffy")
            .arg(KEY_BROKER_ARGUMENT)
            .arg(path)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()?;
        KeyBroker::new(ours)
    };
    let broker = start().map_err(RemoteError::io(path))?;
    Ok(keyring.with_broker(broker))
}

/// Main function of the key broker's process, which exits together with the fetcher.
pub fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!(error = %e, "the key broker exited");
            ExitCode::FAILURE
        }
    }
}

/// Serves the keys of the key file in the second argument to the process at descriptor 0.
fn serve() -> Result<(), Box<dyn Error>> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    prctl::set_dumpable(false)?;
    let path = std::env::args_os().nth(2).unwrap_or_default();
    let keyring = Keyring::load(Path::new(&path))?;
    // SAFETY: descriptor 0 is open for as long as the process runs, and nothing else owns it.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    Ok(KeyBroker::serve(socket, &keyring)?)
}

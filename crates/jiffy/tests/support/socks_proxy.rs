//! A real SOCKS5 proxy (microsocks) in the internet of a lab.

use super::lab::Lab;
use super::wait_for;
use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Address of the proxy in the lab's internet.
pub const ADDRESS: &str = "8.8.8.8:1080";
pub const USER: &str = "user-7f3a";
pub const PASSWORD: &str = "password-91c2";

/// Returns the program that `scripts/test-servers` downloads.
pub fn microsocks() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/microsocks");
    let is_ci = std::env::var_os("CI").is_some();
    let exists = program.exists();
    assert!(
        exists || !is_ci,
        "microsocks is missing: run scripts/test-servers"
    );
    exists.then_some(program)
}

/// Running proxy. Its log has the hosts of its connections.
pub struct SocksProxy {
    child: Child,
    log: PathBuf,
}

impl SocksProxy {
    /// Starts the proxy, and waits until it accepts connections.
    pub fn start(program: &Path, log: PathBuf, lab: &Lab) -> Self {
        let file = fs::File::create(&log).unwrap();
        let words = ["-i", "8.8.8.8", "-p", "1080", "-u", USER, "-P", PASSWORD];
        let child = lab.in_internet(|| {
            let child = Command::new(program).args(words).stderr(file).spawn();
            wait_for("the proxy", || TcpStream::connect(ADDRESS).ok());
            child.unwrap()
        });
        Self { child, log }
    }

    /// Returns whether the proxy connected to `server`.
    pub fn connected_to(&self, server: &str) -> bool {
        let log = fs::read_to_string(&self.log).unwrap();
        log.contains(&format!("connected to {server}"))
    }

    /// Empties the log.
    pub fn forget(&self) {
        // The proxy appends at its own position, which leaves a hole of zeros. They match no host.
        fs::write(&self.log, "").unwrap();
    }
}

impl Drop for SocksProxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

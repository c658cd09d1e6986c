//! Connection of a command to the daemon of this host. If no daemon runs, it is started in the
//! background. This code runs in the process of the command.

use anyhow::{Context, bail};
use jiffy_client::{Client, ServerOptions};
use jiffy_image::Home;
use jiffy_installation::Installation;
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;

/// Timeout for the start of a daemon.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval of connection attempts to a daemon that is starting.
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Delay before the next start while another daemon holds the lock of the data directory.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of bytes of the log that are searched for the cause of a failed start.
const MAX_SEARCHED_BYTES: u64 = 64 * 1024;

/// Returns the path of the socket of the daemon of `home`.
pub fn socket(home: &Home) -> PathBuf {
    home.run().join("jiffy.sock")
}

/// Returns the path of the log of a background daemon.
fn log_path(home: &Home) -> PathBuf {
    home.run().join("jiffy.log")
}

/// Connects to the daemon of `home`. `None` if no daemon runs.
pub async fn connect(home: &Home) -> Option<UnixStream> {
    UnixStream::connect(socket(home)).await.ok()
}

/// Connects to the daemon of `home`. Starts a background daemon if none runs.
pub async fn connect_or_start(home: &Home) -> anyhow::Result<UnixStream> {
    match connect(home).await {
        Some(stream) => Ok(stream),
        // A daemon that is started implicitly does not listen on a TCP port.
        None => spawn_and_wait(home, &["--no-listen".to_owned()]).await,
    }
}

/// Returns the daemon at the other end of `stream` with its arguments. `None` if the process is not
/// a daemon. Works with daemons of all versions.
pub fn process_of(stream: &UnixStream) -> Option<(Pid, Vec<String>)> {
    let pid = stream.peer_cred().ok()?.pid()?;
    // The first argument of a daemon is `serve`.
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8(line).ok()?;
    let mut arguments = line.split_terminator('\0').skip(1);
    let is_daemon = arguments.next() == Some("serve");
    is_daemon.then(|| (Pid::from_raw(pid), arguments.map(str::to_owned).collect()))
}

/// Returns a client of the daemon that `options` or the environment specify. Defaults to the daemon
/// of this host, which is started if necessary.
pub async fn open_client(options: &ServerOptions) -> anyhow::Result<Client> {
    match Client::remote(options).await? {
        Some(client) => Ok(client),
        None => local_client().await,
    }
}

/// Returns a client of the daemon of this host, which is started if necessary.
pub async fn local_client() -> anyhow::Result<Client> {
    let home = Home::locate()?;
    let stream = connect_or_start(&home).await?;
    client_over(&home, stream).await
}

/// Returns a client of the daemon of `home` over `stream`.
pub async fn client_over(home: &Home, stream: UnixStream) -> anyhow::Result<Client> {
    let name = format!("the daemon of {}", home.path().display());
    Client::local(socket(home), name, stream).await
}

/// Starts a daemon in the background and waits until it accepts connections.
pub async fn spawn_and_wait(home: &Home, options: &[String]) -> anyhow::Result<UnixStream> {
    let log = log_path(home);
    // Only lines that the new daemon writes explain its failure.
    let log_offset = std::fs::metadata(&log).map_or(0, |m| m.len());
    let mut child = start(&log, options).context("cannot start the daemon (`jiffy serve`)")?;
    crate::rootless_notice::show_daemon_notice(home);
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(stream) = connect(home).await {
            return Ok(stream);
        }
        match child.try_wait()? {
            // The new daemon exits successfully if another daemon holds the lock. That daemon may
            // be starting, so that it will accept connections soon, or it may be stopping.
            Some(status) if status.success() && Instant::now() < deadline => {
                tokio::time::sleep(RETRY_INTERVAL).await;
                if connect(home).await.is_none() {
                    child = start(&log, options)?;
                }
            }
            // The daemon is still starting.
            None if Instant::now() < deadline => {}
            _ => {
                let reason = last_line(&log, log_offset);
                bail!(
                    "the daemon did not start: {reason} (run it in the foreground with `jiffy serve`)"
                );
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Opens a log file for appending. New files are readable by their owner only.
pub fn open_log(path: &Path) -> io::Result<File> {
    File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
}

/// Starts a daemon in the background, with its log in the file `path`.
fn start(path: &Path, options: &[String]) -> io::Result<std::process::Child> {
    let log = open_log(path)?;
    Command::new(Installation::current()?.jiffy())
        .args(["serve", "--log-file"])
        .arg(path)
        .args(options)
        // The daemon must not keep the caller's file system mounted.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        // The daemon must not receive signals of the terminal.
        .process_group(0)
        .spawn()
}

/// Returns the last line of the log after the first `offset` bytes.
fn last_line(path: &Path, offset: u64) -> String {
    let mut text = String::new();
    let _ = File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(offset))?;
        // Errors are ignored: the caller then receives the path of the log.
        file.take(MAX_SEARCHED_BYTES).read_to_string(&mut text)
    });
    let line = text.lines().rev().find(|l| !l.trim().is_empty());
    line.map_or_else(
        || format!("see {}", path.display()),
        |l| l.trim_start_matches("jiffy: ").to_owned(),
    )
}

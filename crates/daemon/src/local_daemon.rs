//! The daemon of this host: found, or started in the background.

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

/// Time a daemon has to come up.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time between two looks for a daemon that comes up.
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Time between two tries while another daemon holds the data directory.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Socket of the daemon of `home`.
pub fn socket(home: &Home) -> PathBuf {
    home.run().join("jiffy.sock")
}

/// Log of a daemon that was started in the background.
fn log_path(home: &Home) -> PathBuf {
    home.run().join("jiffy.log")
}

/// A connection to the daemon of `home`, if one runs.
pub async fn connect(home: &Home) -> Option<UnixStream> {
    UnixStream::connect(socket(home)).await.ok()
}

/// The same; if none runs, one is started in the background.
pub async fn connect_or_start(home: &Home) -> anyhow::Result<UnixStream> {
    match connect(home).await {
        Some(stream) => Ok(stream),
        // A user who only types commands has not asked for an open port.
        None => spawn_and_wait(home, &["--no-listen".to_owned()]).await,
    }
}

/// The process that listens at the other end of `stream`, if it is a daemon of whatever version,
/// with the arguments it was started with.
pub fn process_of(stream: &UnixStream) -> Option<(Pid, Vec<String>)> {
    let pid = stream.peer_cred().ok()?.pid()?;
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8(line).ok()?;
    let mut words = line.split_terminator('\0').skip(1);
    let serves = words.next() == Some("serve");
    serves.then(|| (Pid::from_raw(pid), words.map(str::to_owned).collect()))
}

/// Returns a client of the control plane that `options` or the environment name; if they name none,
/// of this host's daemon, which is started unless it runs.
pub async fn open_client(options: &ServerOptions) -> anyhow::Result<Client> {
    match Client::remote(options).await? {
        Some(client) => Ok(client),
        None => local_client().await,
    }
}

/// Returns a client of this host's daemon, which is started unless it runs.
pub async fn local_client() -> anyhow::Result<Client> {
    let home = Home::locate()?;
    let stream = connect_or_start(&home).await?;
    client_over(&home, stream).await
}

/// Returns a client of the daemon of `home` at the other end of `stream`.
pub async fn client_over(home: &Home, stream: UnixStream) -> anyhow::Result<Client> {
    let name = format!("the daemon of {}", home.path().display());
    Client::local(socket(home), name, stream).await
}

/// A new one in the background, once it listens.
pub async fn spawn_and_wait(home: &Home, options: &[String]) -> anyhow::Result<UnixStream> {
    let log = log_path(home);
    let before = std::fs::metadata(&log).map_or(0, |m| m.len());
    let mut child = start(&log, options).context("cannot start the daemon (`jiffy serve`)")?;
    crate::rootless_notice::show_daemon_notice(home);
    let limit = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(stream) = connect(home).await {
            return Ok(stream);
        }
        match child.try_wait()? {
            // One that another command started at the same moment makes ours leave: then that one
            // is about to listen. But it may also have been one that was about to end.
            Some(status) if status.success() && Instant::now() < limit => {
                tokio::time::sleep(RETRY_INTERVAL).await;
                if connect(home).await.is_none() {
                    child = start(&log, options)?;
                }
            }
            None if Instant::now() < limit => {}
            _ => {
                let why = last_line(&log, before);
                bail!(
                    "the daemon did not come up: {why} (`jiffy serve` runs it in the foreground)"
                );
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Opens a log to append to, readable by its owner only.
pub fn open_log(path: &Path) -> io::Result<File> {
    File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
}

fn start(path: &Path, options: &[String]) -> io::Result<std::process::Child> {
    let log = open_log(path)?;
    Command::new(Installation::current()?.jiffy())
        .args(["serve", "--log-file"])
        .arg(path)
        .args(options)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        // Signals of our terminal are not for it.
        .process_group(0)
        .spawn()
}

/// The last that was written after the first `before` bytes.
fn last_line(path: &Path, before: u64) -> String {
    let mut text = String::new();
    let _ = File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(before))?;
        file.take(64 * 1024).read_to_string(&mut text)
    });
    let line = text.lines().rev().find(|l| !l.trim().is_empty());
    line.map_or_else(
        || format!("see {}", path.display()),
        |l| l.trim_start_matches("jiffy: ").to_owned(),
    )
}

//! The daemon from the commands' side: found or started, and called.

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use jiffy_image::Home;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Time a daemon has to come up.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Time between two tries while another daemon holds the data directory.
const RESTART_PAUSE: Duration = Duration::from_millis(50);
/// Longest head of an answer to an upgrade.
const MAX_HEAD: usize = 8192;

/// Where the daemon of `home` listens.
pub fn socket(home: &Home) -> PathBuf {
    home.run().join("jiffy.sock")
}

/// Where a daemon that was started in the background says what went wrong.
fn log(home: &Home) -> PathBuf {
    home.run().join("jiffy.log")
}

/// A daemon that listens.
#[derive(Debug, Clone)]
pub struct Daemon {
    socket: PathBuf,
}

impl Daemon {
    /// The one that runs, if one does.
    pub async fn find(home: &Home) -> Option<Self> {
        let socket = socket(home);
        UnixStream::connect(&socket).await.ok()?;
        Some(Self { socket })
    }

    /// The one that runs, or a new one in the background.
    pub async fn find_or_start() -> anyhow::Result<Self> {
        let home = Home::locate()?;
        if let Some(daemon) = Self::find(&home).await {
            return Ok(daemon);
        }
        // Whoever only types commands has not asked for a port to be opened.
        spawn_and_wait(&home, &["--no-listen".to_owned()]).await
    }

    /// Calls it; errors are those it tells.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .context("the daemon went away")?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "jiffy")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(serde_json::to_vec(body)?)))?;
        let answer = sender
            .send_request(request)
            .await
            .context("the daemon went away before it answered")?;
        let status = answer.status();
        let bytes = answer.into_body().collect().await?.to_bytes();
        if status.is_success() {
            return serde_json::from_slice(&bytes)
                .context("the daemon's answer is not understood: is it another version?");
        }
        Err(refusal(&bytes))
    }

    /// A stream to `port` in sandbox `id`.
    pub async fn connect(&self, id: &str, port: u32) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        let head = format!(
            "POST /sandboxes/{id}/connect/{port} HTTP/1.1\r\nhost: jiffy\r\nconnection: upgrade\r\nupgrade: jiffy-stream\r\ncontent-length: 0\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::with_capacity(256);
        // To the last byte of the head and not one further: what follows is the guest's.
        while !answer.ends_with(b"\r\n\r\n") {
            if answer.len() > MAX_HEAD {
                return Err(io::ErrorKind::InvalidData.into());
            }
            answer.push(stream.read_u8().await?);
        }
        if answer.starts_with(b"HTTP/1.1 101 ") {
            return Ok(stream);
        }
        let mut body = Vec::new();
        let mut rest = stream.take(64 * 1024);
        let rest = rest.read_to_end(&mut body);
        // The connection may be kept open behind the refusal.
        let _ = tokio::time::timeout(Duration::from_millis(200), rest).await;
        Err(io::Error::other(refusal(&body).to_string()))
    }
}

/// A new one in the background, once it listens.
pub async fn spawn_and_wait(home: &Home, options: &[String]) -> anyhow::Result<Daemon> {
    let log = log(home);
    let before = std::fs::metadata(&log).map_or(0, |m| m.len());
    let mut child = start(&log, options).context("cannot start the daemon (`jiffy serve`)")?;
    let limit = Instant::now() + START_LIMIT;
    loop {
        if let Some(daemon) = Daemon::find(home).await {
            return Ok(daemon);
        }
        match child.try_wait()? {
            // One that another command started at the same moment makes ours leave: then that one is about to listen. But it may also
            // have been one that was about to end.
            Some(status) if status.success() && Instant::now() < limit => {
                tokio::time::sleep(RESTART_PAUSE).await;
                if Daemon::find(home).await.is_none() {
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
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

fn refusal(body: &[u8]) -> anyhow::Error {
    #[derive(serde::Deserialize)]
    struct Refusal {
        error: String,
    }
    match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => anyhow::Error::msg(refusal.error),
        Err(_) => anyhow::Error::msg("the daemon refused without saying why"),
    }
}

fn start(path: &Path, options: &[String]) -> io::Result<std::process::Child> {
    let log = crate::serve::open_log(path)?;
    Command::new(std::env::current_exe()?)
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

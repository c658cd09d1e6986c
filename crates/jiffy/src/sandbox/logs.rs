//! `jiffy logs`: shows the console or the network connections of a sandbox.

mod console_follower;

use super::table;
use crate::cli::LogsArgs;
use console_follower::ConsoleFollower;
use jiffy_api_types::{HeaderRequest, LogLevel, SandboxState};
use jiffy_client::{Client, has_error_code, terminal};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Maximum number of lines that the API returns.
const MAX_LINES: u16 = 1000;
/// Interval of reads of a console that is followed.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which a last line that has not changed is printed.
const SETTLE_TIME: Duration = Duration::from_millis(250);
/// Maximum pause between attempts to reach a daemon that is restarted.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Last lines of a console.
#[derive(Debug, Serialize, Deserialize)]
pub struct Console {
    /// Lines, oldest first.
    #[serde(rename = "logEntries")]
    pub logs: Vec<ConsoleLine>,
}

/// Line of a console.
#[derive(Debug, Serialize, Deserialize)]
pub struct ConsoleLine {
    /// Text without the line feed. Named `message` in the API and `line` in the output of `--json`.
    #[serde(rename(deserialize = "message"))]
    pub line: String,
    /// Severity: `Error` for the reason why a sandbox is broken, which is its last line.
    #[serde(default, skip_serializing)]
    level: Option<LogLevel>,
}

/// Connection record of a sandbox, as returned by the API.
#[derive(Debug, Serialize, Deserialize)]
pub struct ConnectionRecord {
    /// Start of the record. `None` if no connections are recorded.
    since: Option<String>,
    connections: Vec<Connection>,
    /// Number of connections that were not recorded, because the record is bounded.
    missing: u64,
    /// Information that the host's kernel does not provide, for example `bytes`.
    #[serde(rename = "untold")]
    unavailable: Vec<String>,
}

/// Connection, denied attempt or DNS question.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Connection {
    timestamp: String,
    protocol: String,
    address: Option<IpAddr>,
    port: Option<u16>,
    host: Option<String>,
    question: Option<String>,
    bytes_out: Option<u64>,
    bytes_in: Option<u64>,
    verdict: String,
    reason: Option<String>,
    /// HTTP request, if the host occurs in a rule for headers. Such a rule adds headers with
    /// secrets to requests. `None` for all other entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<HeaderRequest>,
    /// Number of equal events that this entry combines.
    times: u64,
}

/// Prints the console or the connections.
pub async fn run(args: &LogsArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let client = client.on_host(args.only_host);
    if args.network {
        let record: ConnectionRecord = client
            .last_lines(&args.id, "connections", args.lines)
            .await?;
        return table::show(args.json, &record, text);
    }
    if args.follow {
        return follow(client, args).await;
    }
    let console: Console = client.last_lines(&args.id, "logs", args.lines).await?;
    table::show(args.json, &console.logs, |lines| {
        let line = |l: &ConsoleLine| format!("{}\n", terminal::line(&l.line));
        lines.iter().map(line).collect()
    })
}

/// Prints the last lines of a console, and then its new lines until the sandbox ends or standard
/// output is closed.
async fn follow(mut client: Client, args: &LogsArgs) -> anyhow::Result<()> {
    let id = match client.sandbox(&args.id).await {
        Ok(sandbox) => sandbox.record.id,
        // The first read reports the error, or returns the console of a broken sandbox.
        Err(_) => args.id.clone(),
    };
    let mut follower: Option<ConsoleFollower> = None;
    let mut pause = FOLLOW_INTERVAL;
    loop {
        let (lines, has_ended) = match read(&client, &id).await {
            Ok(read) => read,
            Err(e) if follower.is_none() => return Err(e),
            Err(e) if has_error_code(&e, "sandbox_not_found") => (Vec::new(), true),
            // The daemon may be restarted.
            Err(e) => {
                errln!("jiffy: {e:#}; retrying");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(MAX_PAUSE);
                if let Ok(opened) = jiffy_daemon::open_client(&args.host.server()).await {
                    client = opened.on_host(args.only_host);
                }
                continue;
            }
        };
        pause = FOLLOW_INTERVAL;
        let follower =
            follower.get_or_insert_with(|| ConsoleFollower::new(&lines, usize::from(args.lines)));
        let mut new = follower.read(lines, usize::from(MAX_LINES));
        if follower.has_gap() {
            errln!("jiffy: the console has more than {MAX_LINES} new lines: some may be missing");
        }
        if has_ended {
            new.extend(follower.finish());
        }
        if !print_lines(&new, args.json)? || has_ended {
            return Ok(());
        }
        let delay = if follower.has_pending() {
            SETTLE_TIME
        } else {
            FOLLOW_INTERVAL
        };
        tokio::time::sleep(delay).await;
    }
}

/// Reads the last lines of a console. The flag is true if the sandbox has ended.
async fn read(client: &Client, id: &str) -> anyhow::Result<(Vec<String>, bool)> {
    let console: Console = client.last_lines(id, "logs", MAX_LINES).await?;
    let has_ended = match console.logs.last() {
        Some(last) => last.level == Some(LogLevel::Error),
        // The console of a paused or killed sandbox is empty.
        None => has_ended(client, id).await?,
    };
    let lines = console.logs.into_iter().map(|line| line.line).collect();
    Ok((lines, has_ended))
}

/// Returns whether a sandbox was killed or is broken.
async fn has_ended(client: &Client, id: &str) -> anyhow::Result<bool> {
    match client.sandbox(id).await {
        Ok(sandbox) => Ok(matches!(
            sandbox.record.state,
            SandboxState::Killed | SandboxState::Broken { .. }
        )),
        Err(e)
            if has_error_code(&e, "sandbox_not_found") || has_error_code(&e, "sandbox_broken") =>
        {
            Ok(true)
        }
        Err(e) => Err(e),
    }
}

/// Prints lines of a console, as one JSON object per line if `json` is true. Returns false if
/// standard output is closed.
fn print_lines(lines: &[String], json: bool) -> anyhow::Result<bool> {
    let mut text = String::new();
    for line in lines {
        if json {
            text.push_str(&terminal::json_line(&json!({ "line": line }))?);
        } else {
            text.push_str(&terminal::line(line));
        }
        text.push('\n');
    }
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reading process, for example `head`, closed the pipe.
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => {
            result?;
            Ok(true)
        }
    }
}

/// Formats a number of bytes in decimal units.
fn bytes(count: Option<u64>) -> String {
    match count {
        None => "-".to_owned(),
        Some(n @ 0..=99_999) => format!("{n} B"),
        Some(n @ 100_000..=99_999_999) => format!("{} kB", n / 1000),
        Some(n) => format!("{} MB", n / 1_000_000),
    }
}

impl Connection {
    /// Returns whether the host allowed or refused the connection, and the reason.
    fn verdict(&self) -> String {
        match &self.reason {
            Some(reason) => format!("{} ({reason})", self.verdict),
            None => self.verdict.clone(),
        }
    }

    /// Returns the name of the host, and the names of the secrets and identity tokens that a
    /// request contained.
    fn name(&self) -> String {
        let name = self.host.as_deref().unwrap_or("-");
        let Some(request) = &self.request else {
            return name.to_owned();
        };
        let contained = [("secrets", &request.secrets), ("tokens", &request.tokens)];
        let contained = contained.iter().filter(|(_, names)| !names.is_empty());
        let parts: Vec<String> = contained
            .map(|(kind, names)| format!("{kind}: {}", names.join(", ")))
            .collect();
        if parts.is_empty() {
            return name.to_owned();
        }
        format!("{name} ({})", parts.join("; "))
    }

    /// Returns address and port, the type of a DNS question, or method and status of a request.
    fn destination(&self) -> String {
        if let Some(request) = &self.request {
            return format!("{} {}", request.method, request.status);
        }
        match (&self.address, self.port, &self.question) {
            (Some(address), Some(port), _) => SocketAddr::new(*address, port).to_string(),
            (Some(address), None, _) => address.to_string(),
            (None, _, Some(kind)) => kind.clone(),
            (None, ..) => "-".to_owned(),
        }
    }
}

/// Returns the table of connections, with notes about its gaps.
fn text(record: &ConnectionRecord) -> String {
    let Some(since) = &record.since else {
        return "no connections are recorded for this sandbox: it has no network, was killed, or has been \
            paused since before the daemon started\n"
            .to_owned();
    };
    let mut text = format!(
        "{:<24} {:<6} {:<16} {:<21} {:>9} {:>9} {:>6}  NAME\n",
        "TIME", "PROTO", "VERDICT", "TO", "OUT", "IN", "TIMES"
    );
    for c in &record.connections {
        let _ = writeln!(
            text,
            "{:<24} {:<6} {:<16} {:<21} {:>9} {:>9} {:>6}  {}",
            c.timestamp,
            c.protocol,
            c.verdict(),
            c.destination(),
            bytes(c.bytes_out),
            bytes(c.bytes_in),
            c.times,
            terminal::line(&c.name()),
        );
    }
    let _ = writeln!(text, "recorded since {since}");
    if record.missing > 0 {
        let _ = writeln!(
            text,
            "{} further connections were not recorded",
            record.missing
        );
    }
    if !record.unavailable.is_empty() {
        let fields = record.unavailable.join(", ");
        let _ = writeln!(text, "not reported by the kernel of this host: {fields}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_record_shows_its_start_and_its_gaps() {
        let record = serde_json::json!({
            "since": "2026-01-01T00:00:00.000Z",
            "connections": [
                { "timestamp": "2026-01-01T00:00:01.000Z", "protocol": "tcp", "address": "192.0.2.1", "port": 443,
                  "host": "a.example", "question": null, "bytesOut": 10, "bytesIn": 123_456, "verdict": "allowed",
                  "reason": null, "times": 1 },
                { "timestamp": "2026-01-01T00:00:02.000Z", "protocol": "dns", "address": null, "port": null,
                  "host": "b.example", "question": "A", "bytesOut": null, "bytesIn": null, "verdict": "refused",
                  "reason": "rules", "times": 3 },
                { "timestamp": "2026-01-01T00:00:03.000Z", "protocol": "udp", "address": "2001:db8::1", "port": 53,
                  "host": null, "question": null, "bytesOut": null, "bytesIn": null, "verdict": "refused",
                  "reason": "limit", "times": 1 },
                { "timestamp": "2026-01-01T00:00:04.000Z", "protocol": "http", "address": null, "port": 443,
                  "host": "c.example", "question": null, "bytesOut": null, "bytesIn": null, "verdict": "allowed",
                  "reason": null, "times": 2,
                  "request": { "method": "GET", "status": 200, "secrets": ["token"] } },
            ],
            "missing": 7,
            "untold": ["bytes"],
        });
        let text = text(&serde_json::from_value(record).unwrap());
        for part in [
            "tcp    allowed          192.0.2.1:443              10 B    123 kB      1  a.example",
            "dns    refused (rules)  A                             -         -      3  b.example",
            "udp    refused (limit)  [2001:db8::1]:53 ",
            "http   allowed          GET 200                       -         -      2  c.example (secrets: token)",
            "7 further connections were not recorded",
            "not reported by the kernel of this host: bytes",
            "recorded since 2026-01-01T00:00:00.000Z",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}

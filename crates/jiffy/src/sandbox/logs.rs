//! `jiffy logs`: shows the console or the network connections of a sandbox.

use super::table;
use crate::cli::LogsArgs;
use jiffy_api_types::HeaderRequest;
use jiffy_client::terminal;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

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
    let console: Console = client.last_lines(&args.id, "logs", args.lines).await?;
    table::show(args.json, &console.logs, |lines| {
        let line = |l: &ConsoleLine| format!("{}\n", terminal::line(&l.line));
        lines.iter().map(line).collect()
    })
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
    /// Returns the verdict and its reason.
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

//! `jiffy stats`: shows the resource usage of sandboxes periodically.

use super::table::{self, short};
use crate::cli::StatsArgs;
use crate::columns::{Align, Table};
use jiffy_api_types::{Metric, SandboxInfo, SandboxState};
use jiffy_client::{Client, terminal};
use jiffy_sandbox_manager::Bytes;
use serde::Serialize;
use std::io::{IsTerminal, Write};

/// Usage of a sandbox. The field names are part of the JSON output.
#[derive(Debug, Serialize)]
struct UsageLine {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    state: &'static str,
    #[serde(flatten)]
    metric: Option<Metric>,
}

/// Prints the table, and refreshes it until Ctrl-C.
pub async fn run(args: &StatsArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let client = client.on_host(args.only_host);
    // A file or pipe must not receive control sequences of terminals.
    let once = args.json || args.no_stream || !std::io::stdout().is_terminal();
    let mut shown_lines = 0;
    loop {
        let lines = usage(&client, &args.ids).await?;
        if once {
            return table::show(args.json, &lines, text);
        }
        let text = terminal::text(&text(&lines)).into_owned();
        // Moves the cursor to the start of the previous table and clears the screen below.
        let back = match shown_lines {
            0 => String::new(),
            n => format!("\u{1b}[{n}A\u{1b}[J"),
        };
        let mut out = std::io::stdout().lock();
        write!(out, "{back}{text}")?;
        out.flush()?;
        drop(out);
        // The next table replaces this number of lines.
        shown_lines = text.lines().count();
        tokio::select! {
            _ = tokio::time::sleep(args.interval) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

/// Returns the usage of the sandboxes in the arguments, or of all running sandboxes.
async fn usage(client: &Client, ids: &[String]) -> anyhow::Result<Vec<UsageLine>> {
    let records: Vec<SandboxInfo> = match ids {
        [] => {
            let mut all = client.sandboxes(false).await?;
            all.retain(|s| s.state == SandboxState::Running);
            all
        }
        ids => {
            let mut records = Vec::new();
            for id in ids {
                records.push(client.sandbox(id).await?.record);
            }
            records
        }
    };
    let sandbox_ids: Vec<&str> = records.iter().map(|s| &s.id[..]).collect();
    let mut metrics = client.metrics(&sandbox_ids).await?;
    let line = |s: SandboxInfo| UsageLine {
        metric: metrics.remove(&s.id),
        state: s.state.name(),
        id: s.id,
        name: s.name,
    };
    Ok(records.into_iter().map(line).collect())
}

/// Returns the table of `jiffy stats`.
fn text(lines: &Vec<UsageLine>) -> String {
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("CPU", Align::Right),
        ("MEMORY", Align::Right),
        ("OF", Align::Left),
        ("DISK", Align::Right),
        ("OF", Align::Left),
        ("SENT", Align::Right),
        ("RECEIVED", Align::Right),
    ]);
    for line in lines {
        let running = line.metric.as_ref().filter(|_| line.state == "running");
        let size = |of: fn(&Metric) -> Option<u64>| {
            let bytes = running.and_then(of);
            bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string())
        };
        table.row([
            short(&line.id).to_owned(),
            line.name.clone().unwrap_or_default(),
            line.state.to_owned(),
            running.map_or_else(String::new, |m| format!("{:.1} %", m.cpu_used_pct)),
            size(|m| Some(m.mem_used)),
            size(|m| Some(m.mem_total)),
            size(|m| Some(m.disk_used)),
            size(|m| Some(m.disk_total)),
            size(|m| m.net_bytes_out),
            size(|m| m.net_bytes_in),
        ]);
    }
    table.text()
}

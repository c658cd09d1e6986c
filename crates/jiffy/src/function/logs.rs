//! `jiffy function logs`.

use super::path;
use crate::cli::FunctionLogsArgs;
use hyper::Method;
use jiffy_client::Client;
use serde::Deserialize;
use serde_json::Value;
use std::io::Write;

/// Seconds for which one call waits for further entries.
const FOLLOW_WAIT_S: u32 = 20;

#[derive(Deserialize)]
struct LogPage {
    entries: Vec<Value>,
    /// Position behind the last entry.
    next: String,
}

/// Shows the log, and what is added to it.
pub async fn run(args: &FunctionLogsArgs) -> anyhow::Result<()> {
    let client = Client::open(&args.output.host.server()).await?;
    let path = path(&args.name, "/logs")?;
    let mut call = path.clone();
    loop {
        let page: LogPage = client.call(Method::GET, &call, &Value::Null).await?;
        let mut out = std::io::stdout().lock();
        for entry in &page.entries {
            let line = match args.output.json {
                true => entry.to_string(),
                false => line(entry),
            };
            match writeln!(out, "{line}") {
                // A reader that has seen enough.
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                done => done?,
            }
        }
        out.flush()?;
        let wait = match (args.follow, page.entries.is_empty()) {
            (false, true) => return Ok(()),
            (false, false) => 0,
            (true, _) => FOLLOW_WAIT_S,
        };
        call = format!("{path}?after={}&wait={wait}", page.next);
    }
}

fn line(entry: &Value) -> String {
    let field = |name: &str| entry[name].as_str().unwrap_or_default();
    format!(
        "{} {} {:<6} {}",
        field("timestamp"),
        field("requestID"),
        field("stream"),
        field("text").trim_end_matches('\n')
    )
}

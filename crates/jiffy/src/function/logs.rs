//! `jiffy function logs`: prints the log of a function, page by page.

use super::path;
use crate::cli::FunctionLogsArgs;
use hyper::Method;
use jiffy_client::terminal;
use serde::Deserialize;
use serde_json::Value;
use std::io::Write;

/// Maximum time in seconds for which a request waits for further entries.
const FOLLOW_WAIT_S: u32 = 20;

/// Part of a log.
#[derive(Deserialize)]
struct LogPage {
    entries: Vec<Value>,
    /// Position after the last entry.
    next: String,
}

/// Prints the log. With `--follow`, also prints new entries.
pub async fn run(args: &FunctionLogsArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.output.host.server()).await?;
    let path = path(&args.name, "/logs")?;
    let mut call = path.clone();
    loop {
        let page: LogPage = client.call(Method::GET, &call, &Value::Null).await?;
        let mut out = std::io::stdout().lock();
        for entry in &page.entries {
            let lines = if args.output.json {
                terminal::json_line(entry)? + "\n"
            } else {
                lines(entry)
            };
            match out.write_all(lines.as_bytes()) {
                // The reading process, for example `head`, closed the pipe.
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                result => result?,
            }
        }
        out.flush()?;
        // Without --follow, an empty page is the end of the log.
        let wait = match (args.follow, page.entries.is_empty()) {
            (false, true) => return Ok(()),
            (false, false) => 0,
            (true, _) => FOLLOW_WAIT_S,
        };
        call = format!("{path}?after={}&wait={wait}", page.next);
    }
}

/// Formats a log entry. Each line repeats time, request and stream, so that a function cannot forge
/// an entry of another request or stream.
fn lines(entry: &Value) -> String {
    let field = |name: &str| terminal::line(entry[name].as_str().unwrap_or_default());
    let head = format!(
        "{} {} {:<6}",
        field("timestamp"),
        field("requestID"),
        field("stream")
    );
    let text = entry["text"].as_str().unwrap_or_default();
    let text = text.trim_end_matches('\n');
    let lines = text.split('\n');
    lines
        .map(|text| format!("{head} {}\n", terminal::line(text)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_writes_neither_control_characters_nor_entries_of_others() {
        let entry = serde_json::json!({
            "timestamp": "T", "requestID": "r1", "stream": "stdout",
            "text": "one\u{1b}[2J\u{9b}1A\nT r2 stderr forged\n\n",
        });
        assert_eq!(
            lines(&entry),
            "T r1 stdout one\\x1b[2J\\u{9b}1A\nT r1 stdout T r2 stderr forged\n"
        );
    }
}

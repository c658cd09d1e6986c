//! Pages of events and of the audit log: prints all pages of a selection, and follows the log.

use crate::cli::HostArgs;
use hyper::Method;
use jiffy_api_types::{AuditEntry, AuditPage, DroppedEntries, Event, EventPage};
use jiffy_client::{Client, terminal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::time::Duration;

/// Number of entries of a page.
const PAGE: usize = 1000;
/// Maximum time in seconds for which a request waits for further entries.
const FOLLOW_WAIT_S: u64 = 20;
/// Pauses between attempts to reach a daemon that is restarted.
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Page of a log.
pub trait LogPage: DeserializeOwned {
    /// Entry of the log.
    type Entry: Serialize;
    /// Path of the call that returns pages.
    const PATH: &'static str;

    /// Returns the entries, the position after them, and whether the log continues.
    fn parts(self) -> (Vec<Self::Entry>, Option<String>, bool);
    /// Returns the entries that are no longer retained.
    fn dropped(&self) -> Option<&DroppedEntries>;
}

impl LogPage for EventPage {
    type Entry = Event;
    const PATH: &'static str = "/events";

    fn parts(self) -> (Vec<Event>, Option<String>, bool) {
        (self.events, self.next, self.more)
    }

    fn dropped(&self) -> Option<&DroppedEntries> {
        self.dropped.as_ref()
    }
}

impl LogPage for AuditPage {
    type Entry = AuditEntry;
    const PATH: &'static str = "/audit";

    fn parts(self) -> (Vec<AuditEntry>, Option<String>, bool) {
        (self.entries, self.next, self.more)
    }

    fn dropped(&self) -> Option<&DroppedEntries> {
        self.dropped.as_ref()
    }
}

/// Form of the output.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Print further entries as they are recorded.
    pub follow: bool,
    /// Print one JSON object per line.
    pub json: bool,
}

/// Returns the line that begins with `start` and has the fields with a value. Values are escaped.
pub fn with_fields(mut start: String, fields: &[(&str, &Option<String>)]) -> String {
    for (name, value) in fields {
        if let Some(value) = value {
            start += &format!(" {name}={}", terminal::line(value));
        }
    }
    start + "\n"
}

/// Prints the entries with these parameters. `line` formats an entry, with its line feed.
pub async fn print<P: LogPage>(
    host: &HostArgs,
    parameters: &[(&str, String)],
    output: Output,
    line: fn(&P::Entry) -> String,
) -> anyhow::Result<()> {
    let mut client = jiffy_daemon::open_client(&host.server()).await?;
    let mut position: Option<String> = None;
    let mut pause = MIN_PAUSE;
    loop {
        let page: P = match read(&client, parameters, position.as_deref(), output.follow).await {
            Ok(page) => page,
            // The first request reports errors. Later, the daemon may be restarted.
            Err(e) if position.is_none() || !output.follow => return Err(e),
            Err(e) => {
                errln!("jiffy: {e:#}; retrying");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(MAX_PAUSE);
                if let Ok(opened) = jiffy_daemon::open_client(&host.server()).await {
                    client = opened;
                }
                continue;
            }
        };
        pause = MIN_PAUSE;
        if let Some(dropped) = page.dropped() {
            let count = dropped.count.map(|count| format!("{count} "));
            let count = count.unwrap_or_default();
            errln!(
                "jiffy: {count}entries until {} are no longer retained",
                dropped.until
            );
        }
        let (entries, next, more) = page.parts();
        let mut lines = String::new();
        for entry in &entries {
            if output.json {
                lines += &terminal::json_line(entry)?;
                lines.push('\n');
            } else {
                lines += &line(entry);
            }
        }
        let mut out = std::io::stdout().lock();
        match out.write_all(lines.as_bytes()).and_then(|()| out.flush()) {
            // The reading process, for example `head`, closed the pipe.
            Err(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(()),
            result => result?,
        }
        if !more && !output.follow {
            return Ok(());
        }
        position = next.or(position);
    }
}

/// Reads a page of a log. With `follow`, waits for new entries.
async fn read<P: LogPage>(
    client: &Client,
    parameters: &[(&str, String)],
    position: Option<&str>,
    follow: bool,
) -> anyhow::Result<P> {
    let mut call = format!("{}?limit={PAGE}", P::PATH);
    for (name, value) in parameters {
        call += &format!("&{name}={}", utf8_percent_encode(value, NON_ALPHANUMERIC));
    }
    if let Some(position) = position {
        call += &format!("&after={position}");
    }
    if follow {
        call += &format!("&wait={FOLLOW_WAIT_S}");
    }
    client.call(Method::GET, &call, &Value::Null).await
}

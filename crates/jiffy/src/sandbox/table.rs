//! Sandboxes and snapshots as people and programs read them.

use jiffy_engine::VerifiedSnapshot;
use jiffy_host::{SandboxRecord, SnapshotRecord};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Letters of an id that are shown; they are enough to name it.
const SHORT: usize = 8;

/// Prints as JSON or as `text` has it.
pub fn show<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    let text = if json {
        serde_json::to_string_pretty(value)? + "\n"
    } else {
        text(value)
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // A reader that has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A sandbox without the tokens that open it: output ends up in logs and issues.
pub fn without_tokens(sandbox: SandboxRecord) -> SandboxRecord {
    SandboxRecord {
        agent_token: None,
        traffic_token: None,
        ..sandbox
    }
}

fn short(id: &str) -> &str {
    &id[..id.len().min(SHORT)]
}

/// How long ago a moment was, in milliseconds since 1970.
pub fn age(since_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_ms = now.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
    match now_ms.saturating_sub(since_ms) / 1000 {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86_400),
    }
}

/// A table of sandboxes.
pub fn sandboxes(all: &Vec<SandboxRecord>) -> String {
    let mut text = format!(
        "{:<10} {:<9} {:<14} {:>5} {:>9} {:>9}  {:<10} SNAPSHOT\n",
        "ID", "STATE", "TEMPLATE", "VCPUS", "MEMORY", "AGE", "PARENT"
    );
    for s in all {
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "{:<10} {:<9} {:<14} {:>5} {:>5} MiB {:>9}  {:<10} {}",
            short(&s.id),
            s.state.name(),
            s.template,
            s.size.vcpus,
            s.size.memory_mib,
            age(s.created_ms),
            s.forked_from.as_deref().map_or("-", short),
            s.snapshot.as_deref().map_or("-", short),
        );
    }
    text
}

/// A table of snapshots.
pub fn snapshots(all: &Vec<SnapshotRecord>) -> String {
    let mut text = format!(
        "{:<10} {:<16} {:<10} {:<14} {:<10} {:>9} {:>9}\n",
        "ID", "NAME", "SANDBOX", "TEMPLATE", "PARENT", "STOPPED", "AGE"
    );
    for s in all {
        let sandbox = if s.sandbox.is_empty() {
            "-"
        } else {
            short(&s.sandbox)
        };
        let _ = writeln!(
            text,
            "{:<10} {:<16} {:<10} {:<14} {:<10} {:>6.1} ms {:>9}",
            short(&s.id),
            s.name.as_deref().unwrap_or("-"),
            sandbox,
            s.template,
            s.parent.as_deref().map_or("-", short),
            s.stopped_ms,
            age(s.created_ms),
        );
    }
    text
}

/// What became of snapshots since they were sealed.
pub fn verified(all: &Vec<VerifiedSnapshot>) -> String {
    let mut text = String::new();
    for s in all {
        let id = short(&s.id);
        let _ = match (s.sealed, s.damaged.is_empty()) {
            (false, _) => writeln!(
                text,
                "{id}  not sealed yet: nothing to compare with; it is sealed in the background"
            ),
            (true, true) => writeln!(text, "{id}  sound"),
            (true, false) => writeln!(
                text,
                "{id}  DAMAGED: remove it, or restore it from a copy of {}",
                s.id
            ),
        };
        for piece in &s.damaged {
            let _ = match piece.chunk {
                Some(chunk) => writeln!(text, "  {} chunk {chunk} (64 KiB)", piece.file),
                None => writeln!(text, "  {}", piece.file),
            };
        }
    }
    text
}

//! Output of sandboxes and snapshots as tables and JSON, for `jiffy ls` and similar commands.

use crate::columns::{Align, Table};
use jiffy_agent_client::FileChanges;
use jiffy_api_types::{
    Moment, SandboxInfo, SandboxState, SnapshotContent, SnapshotInfo, SnapshotPurpose, StoreState,
};
use jiffy_client::{Listed, terminal};
use jiffy_engine_api::VerifiedSnapshot;
use jiffy_sandbox_manager::Bytes;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Number of characters of an id that are shown. Commands accept them as a prefix.
const SHOWN_ID_LENGTH: usize = 8;

/// Prints a value as JSON, or as the text that `text` returns.
pub fn show<T: Serialize>(
    json: bool,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    let text = if json {
        terminal::json(value)? + "\n"
    } else {
        terminal::text(&text(value)).into_owned()
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reading process, for example `head`, closed the pipe.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Removes the access tokens of a sandbox, because output is stored in logs and bug reports.
pub fn without_tokens(sandbox: SandboxInfo) -> SandboxInfo {
    SandboxInfo {
        agent_token: None,
        traffic_token: None,
        ..sandbox
    }
}

/// Returns the first characters of an id, which is ASCII text.
pub fn short(id: &str) -> &str {
    &id[..id.len().min(SHOWN_ID_LENGTH)]
}

/// Returns the milliseconds since 1970.
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Formats seconds in the largest suitable unit.
pub fn duration_text(seconds: u64) -> String {
    match seconds {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86_400),
    }
}

/// Formats the time since a moment in milliseconds since 1970.
pub fn age(since_ms: u64) -> String {
    duration_text(now_ms().saturating_sub(since_ms) / 1000)
}

/// Formats the age of an object, after a comma. Empty if the time is invalid.
pub fn age_of(moment: &Moment) -> String {
    let time: Result<jiff::Timestamp, _> = moment.0.parse();
    let ms = time
        .ok()
        .and_then(|t| u64::try_from(t.as_millisecond()).ok());
    ms.map_or_else(String::new, |ms| format!(", {} ago", age(ms)))
}

/// Formats the time until a moment in milliseconds since 1970.
pub fn time_left(moment_ms: u64) -> String {
    let now = i64::try_from(now_ms()).unwrap_or(i64::MAX);
    let remaining = i64::try_from(moment_ms).unwrap_or(i64::MAX) - now;
    match u64::try_from(remaining / 1000) {
        Ok(s) if s > 0 => format!("in {}", duration_text(s)),
        _ => "now".to_owned(),
    }
}

/// Formats a size as accepted by `jiffy create`.
pub fn mebibytes(mib: u64) -> String {
    match mib % 1024 {
        0 if mib > 0 => format!("{} GiB", mib / 1024),
        _ => format!("{mib} MiB"),
    }
}

/// Returns a table of sandboxes.
pub fn sandboxes(all: &Vec<Listed<SandboxInfo>>) -> String {
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("STORE", Align::Left),
        ("HOST", Align::Left),
        ("TEMPLATE", Align::Left),
        ("ENGINE", Align::Left),
        ("CPUS", Align::Right),
        ("MEMORY", Align::Right),
        ("AGE", Align::Right),
        ("EXPIRES", Align::Left),
        ("PARENT", Align::Left),
    ]);
    for s in all {
        let expires = match (&s.state, s.deadline_ms) {
            (SandboxState::Running, Some(at)) => time_left(at),
            _ => String::new(),
        };
        table.row([
            short(&s.id).to_owned(),
            s.name.clone().unwrap_or_default(),
            state(s),
            store_state(s.store_state),
            s.host.clone().unwrap_or_default(),
            s.template.clone(),
            s.engine.clone().unwrap_or_default(),
            s.size.vcpus.to_string(),
            mebibytes(s.size.memory_mib.into()),
            age(s.created_ms),
            expires,
            s.forked_from.as_deref().map_or("", short).to_owned(),
        ]);
    }
    if all.iter().all(|s| s.store_state.is_none()) {
        table.remove_column("STORE");
    }
    // Without a fleet, no sandbox has a host.
    if all.iter().all(|s| s.host.is_none()) {
        table.remove_column("HOST");
    }
    table.text()
}

/// Returns the state of a sandbox. A sandbox that is paused without memory boots at its resume.
pub fn state(sandbox: &SandboxInfo) -> String {
    let name = sandbox.state.name();
    match sandbox.pause_mode {
        Some(SnapshotContent::Filesystem) => format!("{name}, disk only"),
        _ => name.to_owned(),
    }
}

/// Returns the state of the copy in the shared store. Empty without a store.
fn store_state(state: Option<StoreState>) -> String {
    state.map_or("", StoreState::name).to_owned()
}

/// Returns the reason for which a snapshot exists.
///
/// The prefix `auto` marks snapshots that exist for an operation of Jiffy or for their descendants,
/// and not because a client requests them. `kept` is false if a client has removed a requested
/// snapshot: its files then remain only as long as sandboxes or snapshots descend from it.
pub fn reason(snapshot: &SnapshotInfo) -> &'static str {
    match snapshot.purpose {
        SnapshotPurpose::Requested if snapshot.kept => "requested",
        SnapshotPurpose::Requested => "auto: removed, in use",
        SnapshotPurpose::Pause => "auto: pause",
        SnapshotPurpose::Fork => "auto: fork",
        SnapshotPurpose::Template => "auto: template",
        SnapshotPurpose::Step => "auto: build step",
    }
}

/// Returns the purpose of a snapshot, and whether it contains the disk only.
pub fn taken(snapshot: &SnapshotInfo) -> String {
    let reason = reason(snapshot);
    match snapshot.content {
        SnapshotContent::Full => reason.to_owned(),
        SnapshotContent::Filesystem => format!("{reason}, disk only"),
    }
}

/// Returns a table of snapshots with their total size.
pub fn snapshots(all: &Vec<Listed<SnapshotInfo>>) -> String {
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("TAKEN", Align::Left),
        ("STORE", Align::Left),
        ("SANDBOX", Align::Left),
        ("TEMPLATE", Align::Left),
        ("PARENT", Align::Left),
        ("SIZE", Align::Right),
        ("AGE", Align::Right),
    ]);
    for s in all {
        table.row([
            short(&s.id).to_owned(),
            s.name.clone().unwrap_or_default(),
            taken(s),
            store_state(s.store_state),
            short(&s.sandbox).to_owned(),
            s.template.clone(),
            s.parent.as_deref().map_or("", short).to_owned(),
            if s.storing {
                "storing".to_owned()
            } else {
                Bytes(s.bytes).to_string()
            },
            age(s.created_ms),
        ]);
    }
    if all.iter().all(|s| s.store_state.is_none()) {
        table.remove_column("STORE");
    }
    let bytes = all.iter().map(|s| s.bytes).sum();
    // Only these snapshots are candidates for `jiffy prune`.
    let automatic = all.iter().filter(|s| reason(s) != "requested").count();
    format!(
        "{}\n{} in total, {automatic} of {} snapshots are automatic; `jiffy prune` removes unused snapshots\n",
        table.text(),
        Bytes(bytes),
        all.len(),
    )
}

/// Returns the files that a sandbox changed in the format of `docker diff`.
pub fn changes(all: &FileChanges) -> String {
    let mut text = String::new();
    for change in &all.changes {
        let path = terminal::line(&change.path);
        let _ = writeln!(text, "{} {path}", change.kind);
    }
    text
}

/// Returns the result of a verification of snapshots.
pub fn verified(all: &Vec<VerifiedSnapshot>) -> String {
    let mut text = String::new();
    for s in all {
        let id = short(&s.id);
        let _ = match (s.has_checksums, s.damaged.is_empty()) {
            (false, _) => writeln!(
                text,
                "{id}  not verified: checksums are still being computed in the background"
            ),
            (true, true) if s.repaired => {
                writeln!(
                    text,
                    "{id}  intact: damaged data was repaired from the store"
                )
            }
            (true, true) => writeln!(text, "{id}  intact"),
            (true, false) => writeln!(
                text,
                "{id}  DAMAGED: remove the snapshot, or restore its files from a copy of {}",
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

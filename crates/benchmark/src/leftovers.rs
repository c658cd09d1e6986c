//! Detects sandboxes, snapshots, processes and files that a benchmark left on the host.
//!
//! A *spare* is a VMM process that the daemon starts in advance for the next guest. A *slot* is a
//! network namespace that the daemon prepares for a guest.

use crate::daemon::BenchmarkDaemon;
use anyhow::Context;
use jiffy_proto::vm::SPARE_NAME;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Timeout for work of the daemon that continues after its response: mappings, slots, files.
const SETTLE_TIME: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);
/// Directories below the data directory in which each sandbox, snapshot or guest has an entry.
const PLACES: [&str; 3] = ["snapshots", "gvisor", "run"];
/// Maximum number of names per kind in the output.
const MAX_PRINTED_NAMES: usize = 5;

/// Names of existing objects, or of objects that remained.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    sandboxes: BTreeSet<String>,
    snapshots: BTreeSet<String>,
    /// Descendants of the daemon, by pid and name. Only for the daemon of this host.
    processes: BTreeSet<String>,
    /// Entries of these directories. Only for the daemon of this host.
    files: BTreeSet<String>,
}

impl Leftovers {
    /// Reads the existing objects.
    pub async fn read(daemon: &BenchmarkDaemon) -> anyhow::Result<Self> {
        let (sandboxes, snapshots) = daemon.names().await?;
        let mut found = Self {
            sandboxes,
            snapshots,
            ..Self::default()
        };
        // Processes and files of another host are not visible.
        if let Some((pid, home)) = daemon.place().await? {
            found.processes = descendants(pid)?;
            for place in PLACES {
                found.files.extend(files(&home, &home.join(place)));
            }
        }
        Ok(found)
    }

    /// Waits until no objects exist in addition to `self`, or until a timeout. Returns the
    /// additional objects.
    pub async fn settled(&self, daemon: &BenchmarkDaemon) -> anyhow::Result<Self> {
        let began = Instant::now();
        loop {
            // The daemon removes files and processes after its answer.
            let remaining = Self::read(daemon).await?.without(self);
            if remaining.is_empty() || began.elapsed() > SETTLE_TIME {
                return Ok(remaining);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Returns the objects that did not exist before.
    fn without(&self, before: &Self) -> Self {
        // Spare guests and slots may be replaced, but their number must not grow.
        let spares = |now: &BTreeSet<String>, then: &BTreeSet<String>| {
            if now.len() > then.len() {
                now - then
            } else {
                BTreeSet::new()
            }
        };
        Self {
            sandboxes: &self.sandboxes - &before.sandboxes,
            snapshots: &self.snapshots - &before.snapshots,
            processes: spares(&self.processes, &before.processes),
            files: spares(&self.files, &before.files),
        }
    }

    /// Returns whether no objects remained.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            ("sandboxes", &self.sandboxes),
            ("snapshots", &self.snapshots),
            ("processes", &self.processes),
            ("files", &self.files),
        ];
        let kinds = kinds.into_iter().filter(|(_, names)| !names.is_empty());
        let texts: Vec<String> = kinds
            .map(|(kind, names)| {
                let few: Vec<&str> = names
                    .iter()
                    .take(MAX_PRINTED_NAMES)
                    .map(String::as_str)
                    .collect();
                let more = if names.len() > few.len() { ", ..." } else { "" };
                format!("{} {kind} ({}{more})", names.len(), few.join(", "))
            })
            .collect();
        f.write_str(&texts.join(", "))
    }
}

/// Returns the descendants of process `root` as `PID NAME`, except for spare processes, which are
/// not assigned to a guest.
fn descendants(root: u32) -> anyhow::Result<BTreeSet<String>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")
        .context("cannot read /proc")?
        .flatten()
    {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        // The process may have exited in the meantime.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some((name, parent)) = name_and_parent(&stat) {
            parents.push((pid, parent, name));
        }
    }
    // `/proc` is not sorted by ancestry, so the set is extended until no process is added.
    let mut family = BTreeSet::from([root]);
    let mut grown = true;
    while grown {
        let before = family.len();
        let children = parents
            .iter()
            .filter(|(_, parent, _)| family.contains(parent));
        let children: Vec<u32> = children.map(|(pid, ..)| *pid).collect();
        family.extend(children);
        grown = family.len() > before;
    }
    let members = parents
        .iter()
        .filter(|(pid, _, name)| *pid != root && family.contains(pid) && name != SPARE_NAME);
    Ok(members
        .map(|(pid, _, name)| format!("{pid} {name}"))
        .collect())
}

/// Parses `/proc/PID/stat`. The name may contain spaces and parentheses.
fn name_and_parent(stat: &str) -> Option<(String, u32)> {
    let (before, after) = stat.rsplit_once(')')?;
    let name = before.split_once('(')?.1;
    let parent = after.split_whitespace().nth(1)?.parse().ok()?;
    Some((name.to_owned(), parent))
}

/// Returns the entries of `directory`, by their path within `home`.
fn files(home: &Path, directory: &Path) -> BTreeSet<String> {
    // A missing directory has no entries.
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let path = |entry: fs::DirEntry| {
        let path = entry.path();
        let name = path.strip_prefix(home).unwrap_or(&path);
        name.display().to_string()
    };
    entries.map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_and_grandchildren_of_a_process_are_found() {
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "sleep 60 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
        let found = descendants(std::process::id()).unwrap();
        let grandchild: u32 = line.trim().parse().unwrap();
        assert!(found.contains(&format!("{} sh", child.id())), "{found:?}");
        let pids: Vec<&str> = found
            .iter()
            .filter_map(|name| name.split(' ').next())
            .collect();
        assert!(pids.contains(&grandchild.to_string().as_str()), "{found:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        let mut kill = std::process::Command::new("kill");
        kill.arg(grandchild.to_string()).status().unwrap();
        assert!(
            !descendants(std::process::id())
                .unwrap()
                .contains(&format!("{} sh", child.id()))
        );
    }

    #[test]
    fn earlier_objects_are_not_leftovers() {
        let of = |names: &[&str]| Leftovers {
            files: names.iter().map(ToString::to_string).collect(),
            ..Leftovers::default()
        };
        assert!(of(&["a", "b"]).without(&of(&["a", "b", "c"])).is_empty());
        let remaining = of(&["a", "b"]).without(&of(&["a"]));
        assert_eq!(remaining.to_string(), "1 files (b)");
    }
}

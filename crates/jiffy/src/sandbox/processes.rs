//! `jiffy processes` and `jiffy signal`: processes inside a sandbox.

use super::table;
use crate::cli::{ProcessOrder, ProcessesArgs, SignalArgs};
use crate::columns::{Align, Table};
use hyper::Method;
use jiffy_api_types::{GuestProcess, GuestProcesses};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};

/// Maximum depth of a tree that is shown by indentation.
const MAX_DEPTH: usize = 20;

/// Prints the processes of a sandbox.
pub async fn list(args: &ProcessesArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let order = args.sort.unwrap_or(ProcessOrder::Pid).name();
    let limit = args.limit;
    let mut path = format!("{}?sort={order}&limit={limit}", path_of(&args.id));
    if let Some(filter) = &args.filter {
        path += &format!("&filter={}", utf8_percent_encode(filter, NON_ALPHANUMERIC));
    }
    let listed: GuestProcesses = client.call(Method::GET, &path, &Value::Null).await?;
    // A filtered or sorted list has no complete tree.
    let is_tree = args.sort.is_none() && args.filter.is_none();
    table::show(args.json, &listed, |listed| text(listed, is_tree))?;
    if listed.processes.len() < listed.total && args.filter.is_none() && !args.json {
        errln!(
            "jiffy: {} of {} processes",
            listed.processes.len(),
            listed.total
        );
    }
    Ok(())
}

/// Sends a signal to a process of a sandbox.
pub async fn signal(args: &SignalArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let path = format!("{}/{}/signal", path_of(&args.id), args.pid);
    let body = json!({ "signal": args.signal });
    let _: Value = client.call(Method::POST, &path, &body).await?;
    Ok(())
}

fn path_of(sandbox: &str) -> String {
    let sandbox = utf8_percent_encode(sandbox, NON_ALPHANUMERIC);
    format!("/sandboxes/{sandbox}/processes")
}

/// Formats processes. If `is_tree` is true, children follow their parents. The table escapes texts.
fn text(listed: &GuestProcesses, is_tree: bool) -> String {
    let mut table = Table::new([
        ("PID", Align::Right),
        ("USER", Align::Left),
        ("STATE", Align::Left),
        ("CPU %", Align::Right),
        ("CPU TIME", Align::Right),
        ("MEMORY", Align::Right),
        ("COMMAND", Align::Left),
    ]);
    let ordered = if is_tree {
        tree(&listed.processes)
    } else {
        listed.processes.iter().map(|p| (0, p)).collect()
    };
    for (depth, process) in ordered {
        // Processes without a command line are shown as in `ps`.
        let command = match &*process.command {
            "" => format!("[{}]", process.name),
            command => command.to_owned(),
        };
        table.row([
            process.pid.to_string(),
            process.user.clone(),
            process.state.to_string(),
            format!("{:.1}", process.cpu_percent),
            format!("{:.2}s", process.cpu_seconds),
            format!("{:.1}MiB", process.memory_bytes as f64 / f64::from(1 << 20)),
            format!("{}{command}", "  ".repeat(depth.min(MAX_DEPTH))),
        ]);
    }
    table.text()
}

/// Returns the processes with their depths, children after their parents. The parents are from the
/// guest: a cycle ends the search.
fn tree(processes: &[GuestProcess]) -> Vec<(usize, &GuestProcess)> {
    let mut children: BTreeMap<u32, Vec<&GuestProcess>> = BTreeMap::new();
    let ids: HashSet<u32> = processes.iter().map(|p| p.pid).collect();
    for process in processes {
        // A process whose parent is not listed is a root.
        let is_child = ids.contains(&process.parent_pid) && process.parent_pid != process.pid;
        let parent = if is_child { process.parent_pid } else { 0 };
        children.entry(parent).or_default().push(process);
    }
    let mut ordered = Vec::new();
    let mut waiting: Vec<(usize, &GuestProcess)> = Vec::new();
    // The lists are removed, so that each process appears once. Members of a cycle follow.
    while let Some((_, roots)) = children.pop_first() {
        waiting.extend(roots.into_iter().rev().map(|root| (0, root)));
        while let Some((depth, process)) = waiting.pop() {
            ordered.push((depth, process));
            let below = children.remove(&process.pid).unwrap_or_default();
            waiting.extend(below.into_iter().rev().map(|child| (depth + 1, child)));
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, command: &str) -> GuestProcess {
        serde_json::from_value(json!({
            "pid": pid, "parentPid": parent, "user": "user", "name": "x", "command": command,
            "state": "S", "cpuSeconds": 1.5, "cpuPercent": 2.0, "memoryBytes": 3 << 20,
            "startedAt": "2026-11-29T10:00:00Z", "startTicks": 7,
        }))
        .unwrap()
    }

    #[test]
    fn children_follow_their_parents_and_cycles_end() {
        let all = [
            process(1, 0, "init"),
            process(5, 9, "a"),
            process(9, 5, "b"),
            process(10, 1, "c"),
            process(11, 10, "d"),
            process(12, 400, "e"),
            process(13, 13, "f"),
        ];
        let shape: Vec<(usize, u32)> = tree(&all).iter().map(|(d, p)| (*d, p.pid)).collect();
        assert_eq!(shape.len(), all.len());
        assert_eq!(shape[..5], [(0, 1), (1, 10), (2, 11), (0, 12), (0, 13)]);
    }

    #[test]
    fn hostile_command_lines_are_escaped() {
        let listed = GuestProcesses {
            processes: vec![process(7, 1, "x\u{1b}[2J\ny"), process(8, 7, "")],
            total: 2,
        };
        let text = text(&listed, true);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.lines().nth(2).unwrap().ends_with("  [x]"), "{text}");
    }
}

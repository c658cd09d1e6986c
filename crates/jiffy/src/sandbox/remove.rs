//! `jiffy rm` and `jiffy prune`: remove sandboxes, snapshots and unused data, if necessary after
//! confirmation.

use super::table;
use super::{BulkOperation, run_for_each};
use crate::cli::{PruneArgs, RmArgs};
use crate::columns::{Align, Table};
use anyhow::bail;
use jiffy_api_types::{PruneKind, PrunedHost};
use jiffy_client::progress::while_waiting;
use jiffy_client::terminal;
use jiffy_sandbox_manager::Bytes;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

/// Number of characters of an id that are shown.
const SHOWN_ID_LENGTH: usize = 12;

/// Removes sandboxes and snapshots.
pub async fn rm(args: &RmArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    if !args.all {
        return run_for_each(&client, &args.ids, BulkOperation::Remove, args.json).await;
    }
    let all = client.sandboxes(true).await?;
    let ids: Vec<String> = all.iter().map(|s| s.id.clone()).collect();
    // Prints an empty JSON list if requested. No confirmation is necessary.
    if ids.is_empty() {
        return run_for_each(&client, &ids, BulkOperation::RemoveListed, args.json).await;
    }
    let question = format!("remove {} with all data?", sandboxes(ids.len()));
    if !confirm(&question, args.yes)? {
        return Ok(ExitCode::FAILURE);
    }
    run_for_each(&client, &ids, BulkOperation::RemoveListed, args.json).await
}

/// Formats a number of sandboxes.
fn sandboxes(count: usize) -> String {
    match count {
        1 => "1 sandbox".to_owned(),
        n => format!("{n} sandboxes"),
    }
}

/// Prompts for confirmation unless `yes` is set. Returns whether the user confirmed.
///
/// # Errors
///
/// Returns an error if standard input is not a terminal.
fn confirm(question: &str, yes: bool) -> anyhow::Result<bool> {
    if yes {
        return Ok(true);
    }
    if !std::io::stdin().is_terminal() {
        bail!("{question} standard input is not a terminal: pass --yes to confirm");
    }
    // Standard output is reserved for results.
    let mut out = std::io::stderr();
    write!(out, "{} [y/N] ", terminal::text(question))?;
    out.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    let answer = answer.trim().to_ascii_lowercase();
    Ok(matches!(&answer[..], "y" | "yes"))
}

/// Removes unused data.
pub async fn prune(args: &PruneArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let unused = args.older_than;
    if args.json && !args.dry_run && !args.yes {
        bail!("cannot prompt for confirmation with --json: pass --yes or --dry-run");
    }
    if args.dry_run || !args.yes {
        let request = client.prune(unused, true);
        let unused_data = while_waiting("searching unused data", request).await?;
        table::show(args.json, &unused_data, |pruned| {
            text(pruned, "would be freed")
        })?;
        if args.dry_run || unused_data.items.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        let count = unused_data.items.len();
        let objects = if count == 1 { "object" } else { "objects" };
        if !confirm(&format!("remove {count} {objects}?"), false)? {
            return Ok(ExitCode::FAILURE);
        }
        // The daemon determines the unused data again, because data may be in use since the prompt.
        let request = client.prune(unused, false);
        let removed = while_waiting("removing unused data", request).await?;
        outln!("{} freed", Bytes(removed.bytes));
        return Ok(ExitCode::SUCCESS);
    }
    let request = client.prune(unused, false);
    let removed = while_waiting("removing unused data", request).await?;
    table::show(args.json, &removed, |pruned| text(pruned, "freed"))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the table of unused data. `freed` describes the total.
fn text(pruned: &PrunedHost, freed: &str) -> String {
    if pruned.items.is_empty() {
        return "nothing to remove\n".to_owned();
    }
    let mut table = Table::new([
        ("KIND", Align::Left),
        ("ID", Align::Left),
        ("OF", Align::Left),
        ("SIZE", Align::Right),
    ]);
    for item in &pruned.items {
        let id = match item.kind {
            // Names are not truncated.
            PruneKind::Template => &item.id,
            _ => item.id.get(..SHOWN_ID_LENGTH).unwrap_or(&item.id),
        };
        table.row([
            item.kind.name().to_owned(),
            id.to_owned(),
            item.name.clone().unwrap_or_default(),
            Bytes(item.bytes).to_string(),
        ]);
    }
    format!("{}\n{} {freed}\n", table.text(), Bytes(pruned.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn removable_data_is_listed_with_its_total() {
        let of = |items| {
            let pruned = json!({ "dryRun": true, "bytes": 3 << 20, "items": items });
            serde_json::from_value::<PrunedHost>(pruned).unwrap()
        };
        let pruned = of(json!([
            { "kind": "sandbox", "id": "abcdefghijkmnpqrstuv", "bytes": 0 },
            { "kind": "template", "id": "img-python-3.12-01234567", "bytes": 3 << 20 },
        ]));
        let shown = text(&pruned, "would be freed");
        assert!(shown.contains("sandbox   abcdefghijkm  "), "{shown}");
        assert!(shown.contains("img-python-3.12-01234567"), "{shown}");
        assert!(shown.ends_with("\n3.0 MiB would be freed\n"), "{shown}");
        assert_eq!(text(&of(json!([])), "freed"), "nothing to remove\n");
    }
}

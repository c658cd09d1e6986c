//! `jiffy diff A B`: compares the files of two sandboxes or snapshots.

use super::table::show;
use crate::cli::DiffArgs;
use jiffy_api_types::{
    ComparedState, ComparedType, Comparison, ComparisonSummary, DifferenceCount, DifferenceKind,
    FileDifference,
};
use jiffy_client::terminal::line;
use jiffy_sandbox_manager::Bytes;
use std::fmt::Write as _;

/// Prints the differences.
pub async fn run(args: &DiffArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let a = client.sandbox_or_snapshot(&args.id).await?;
    let b = args.other.as_deref().unwrap_or_default();
    let b = client.sandbox_or_snapshot(b).await?;
    let limit = usize::try_from(args.limit)?;
    let (comparison, has_more) = client.compare(a.id(), b.id(), limit).await?;
    show(args.json, &comparison, text)?;
    if has_more {
        errln!("jiffy: the list is incomplete: increase --limit, at most 100000");
    }
    if comparison.incomplete {
        errln!(
            "jiffy: differences are missing: one of both has more than 100000 changes against its \
             template"
        );
    }
    Ok(())
}

/// Returns the differences in the format of `docker diff`, with sizes, and a summary.
fn text(comparison: &Comparison) -> String {
    let mut text = String::new();
    for change in &comparison.changes {
        let kind = match change.kind {
            DifferenceKind::Added => 'A',
            DifferenceKind::Changed => 'C',
            DifferenceKind::Removed => 'D',
        };
        let path = line(&change.path);
        let _ = writeln!(text, "{kind} {path}{}", sizes(change));
    }
    if let Some(summary) = comparison.summary {
        let _ = writeln!(text, "{}", counts(&summary));
    }
    text
}

/// Describes the sizes of a file on both sides.
fn sizes(change: &FileDifference) -> String {
    let size = |state: &ComparedState| match (state.kind, state.size) {
        (ComparedType::Directory, 0) => "directory".to_owned(),
        (_, size) => Bytes(size).to_string(),
    };
    let mut text = match (&change.a, &change.b) {
        (Some(a), Some(b)) if size(a) != size(b) => format!("  {} -> {}", size(a), size(b)),
        (_, Some(one)) | (Some(one), None) => format!("  {}", size(one)),
        (None, None) => String::new(),
    };
    if !change.verified {
        text.push_str(", contents not compared");
    }
    text
}

fn counts(summary: &ComparisonSummary) -> String {
    let part = |count: DifferenceCount, what: &str| {
        format!("{} {what} ({})", count.count, Bytes(count.bytes))
    };
    format!(
        "{}, {}, {}",
        part(summary.added, "added"),
        part(summary.changed, "changed"),
        part(summary.removed, "removed")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_have_their_sizes_and_a_summary() {
        let state = |kind, size| ComparedState {
            kind,
            size,
            mode: 0o644,
            uid: 0,
            gid: 0,
        };
        let change = |path: &str, kind, a, b| FileDifference {
            path: path.to_owned(),
            path_bytes: None,
            kind,
            a,
            b,
            verified: path != "/large",
        };
        let file = |size| Some(state(ComparedType::File, size));
        let directory = Some(state(ComparedType::Directory, 0));
        let comparison = Comparison {
            summary: Some(ComparisonSummary {
                added: DifferenceCount { count: 2, bytes: 5 },
                ..ComparisonSummary::default()
            }),
            changes: vec![
                change("/a\n", DifferenceKind::Added, None, file(5)),
                change("/d", DifferenceKind::Added, None, directory),
                change("/c", DifferenceKind::Changed, file(1), file(2048)),
                change("/large", DifferenceKind::Changed, file(7), file(7)),
                change("/r", DifferenceKind::Removed, file(3), None),
            ],
            file: None,
            incomplete: false,
            start_ms: 0.0,
            compare_ms: 0.0,
        };
        let expected = "A /a\\n  5 bytes
A /d  directory
C /c  1 bytes -> 2.0 KiB
C /large  7 bytes, contents not compared
D /r  3 bytes
2 added (5 bytes), 0 changed (0 bytes), 0 removed (0 bytes)
";
        assert_eq!(text(&comparison), expected);
    }
}

//! Output of `jiffy engines`.

use jiffy_engine_api::{Capabilities, EngineDescription};
use std::fmt::Write as _;

/// A table of engines, and below it one of what each can do.
pub fn table(all: &Vec<EngineDescription>) -> String {
    let mut text = format!(
        "{:<10} {:<22} {:<7} DEFAULT\n",
        "ENGINE", "VERSION", "USABLE"
    );
    for e in all {
        let version = e.version.as_deref().unwrap_or("-");
        let (usable, default) = (yes(e.usable), yes(e.default));
        // Writing to a String does not fail.
        let _ = writeln!(text, "{:<10} {version:<22} {usable:<7} {default}", e.name);
    }
    for (name, why) in all.iter().filter_map(|e| Some((&e.name, e.why.as_ref()?))) {
        let _ = writeln!(text, "{name} cannot be used: {why}");
    }
    let columns: Vec<_> = all.iter().map(|e| capabilities(e.capabilities)).collect();
    let names = all.iter().map(|e| e.name.to_uppercase());
    text.push('\n');
    text += &row("CAPABILITY", names);
    for (at, (what, _)) in capabilities(Capabilities::default()).iter().enumerate() {
        text += &row(what, columns.iter().map(|c| yes(c[at].1).to_owned()));
    }
    text
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

fn row(what: &str, cells: impl Iterator<Item = String>) -> String {
    let cells: String = cells.map(|cell| format!(" {cell:<10}")).collect();
    format!("{what:<36}{cells}").trim_end().to_owned() + "\n"
}

/// Number of engines.
const CAPABILITIES: usize = 13;

/// Capabilities, in words.
fn capabilities(capabilities: Capabilities) -> [(&'static str, bool); CAPABILITIES] {
    let Capabilities {
        snapshot,
        live_snapshot,
        incremental,
        fork_shares_memory,
        rollback,
        pause_frees_memory,
        connections_survive_snapshot,
        connections_survive_pause,
        verify,
        network,
        disk_limits,
        nested_kvm,
        own_kernel,
    } = capabilities;
    [
        ("snapshots", snapshot),
        ("runs on while a snapshot is written", live_snapshot),
        ("snapshots store only what changed", incremental),
        ("forks share memory", fork_shares_memory),
        ("rollback", rollback),
        ("a pause frees memory", pause_frees_memory),
        (
            "connections survive a snapshot",
            connections_survive_snapshot,
        ),
        ("connections survive a pause", connections_survive_pause),
        ("snapshots can be verified", verify),
        ("network", network),
        ("disk limits", disk_limits),
        ("nested KVM", nested_kvm),
        ("a kernel of its own", own_kernel),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_compared_line_by_line() {
        let engine = |name: &str, why: Option<&str>, capabilities| EngineDescription {
            name: name.to_owned(),
            version: None,
            usable: why.is_none(),
            why: why.map(str::to_owned),
            default: why.is_none(),
            capabilities,
        };
        let some = Capabilities {
            rollback: true,
            ..Capabilities::default()
        };
        let text = table(&vec![
            engine("one", None, some),
            engine("two", Some("it is not there"), Capabilities::default()),
        ]);
        let words = |begin: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.starts_with(begin)).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(words("one"), ["one", "-", "yes", "yes"]);
        assert_eq!(words("two "), ["two", "-", "no", "no"]);
        assert!(text.contains("two cannot be used: it is not there\n"));
        assert_eq!(words("CAPABILITY"), ["CAPABILITY", "ONE", "TWO"]);
        assert_eq!(words("rollback"), ["rollback", "yes", "no"]);
    }
}

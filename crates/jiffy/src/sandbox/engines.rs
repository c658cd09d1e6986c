//! Tables of `jiffy engines`.

use jiffy_engine_api::{Capabilities, EngineDescription};
use std::fmt::Write as _;

/// Returns a table of engines, followed by a table of their capabilities.
pub fn table(all: &Vec<EngineDescription>) -> String {
    let mut text = format!(
        "{:<10} {:<22} {:<7} DEFAULT\n",
        "ENGINE", "VERSION", "USABLE"
    );
    for e in all {
        let version = e.version.as_deref().unwrap_or("-");
        let (usable, default) = (yes_or_no(e.usable), yes_or_no(e.default));
        let _ = writeln!(text, "{:<10} {version:<22} {usable:<7} {default}", e.name);
    }
    for (name, reason) in all.iter().filter_map(|e| Some((&e.name, e.why.as_ref()?))) {
        let _ = writeln!(text, "{name} is not usable: {reason}");
    }
    // Each column has all capabilities in the same order, as pairs of description and value.
    let columns: Vec<_> = all.iter().map(|e| capabilities(e.capabilities)).collect();
    let names = all.iter().map(|e| e.name.to_uppercase());
    text.push('\n');
    text += &row("CAPABILITY", names);
    for (at, (capability, _)) in capabilities(Capabilities::default()).iter().enumerate() {
        text += &row(
            capability,
            columns.iter().map(|c| yes_or_no(c[at].1).to_owned()),
        );
    }
    text
}

fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// Returns a line with a name and a cell for each engine.
fn row(name: &str, cells: impl Iterator<Item = String>) -> String {
    let cells: String = cells.map(|cell| format!(" {cell:<10}")).collect();
    format!("{name:<36}{cells}").trim_end().to_owned() + "\n"
}

/// Number of capabilities.
const CAPABILITIES: usize = 14;

/// Returns the descriptions and the values of capabilities.
fn capabilities(capabilities: Capabilities) -> [(&'static str, bool); CAPABILITIES] {
    // Without `..`, so that a new capability cannot be forgotten here.
    let Capabilities {
        snapshot,
        disk_snapshot,
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
        ("snapshots without memory", disk_snapshot),
        ("continues while a snapshot is written", live_snapshot),
        ("incremental snapshots", incremental),
        ("forks share memory", fork_shares_memory),
        ("rollback", rollback),
        ("pausing frees memory", pause_frees_memory),
        (
            "connections survive a snapshot",
            connections_survive_snapshot,
        ),
        ("connections survive a pause", connections_survive_pause),
        ("snapshots can be verified", verify),
        ("network", network),
        ("disk limits", disk_limits),
        ("nested KVM", nested_kvm),
        ("separate kernel", own_kernel),
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
            engine("two", Some("it is not installed"), Capabilities::default()),
        ]);
        let words = |begin: &str| -> Vec<String> {
            let line = text.lines().find(|line| line.starts_with(begin)).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(words("one"), ["one", "-", "yes", "yes"]);
        assert_eq!(words("two "), ["two", "-", "no", "no"]);
        assert!(text.contains("two is not usable: it is not installed\n"));
        assert_eq!(words("CAPABILITY"), ["CAPABILITY", "ONE", "TWO"]);
        assert_eq!(words("rollback"), ["rollback", "yes", "no"]);
    }
}

//! `jiffy ls`: lists the sandboxes that match all filters.

use super::table;
use crate::cli::{Filter, LsArgs};
use jiffy_api_types::{SandboxInfo, SandboxState};
use jiffy_client::Listed;
use std::mem::discriminant;

/// Prints the matching sandboxes as a table, as ids or as JSON.
pub async fn run(args: &LsArgs) -> anyhow::Result<()> {
    // The daemon lists killed sandboxes only on request. A filter for their state implies `--all`.
    let killed = Filter::State(SandboxState::Killed.name());
    let all = args.all || args.filters.contains(&killed);
    let sandboxes = jiffy_daemon::open_client(&args.host.server())
        .await?
        .on_host(args.only_host)
        .listed_sandboxes(all)
        .await?;
    let sandboxes = sandboxes
        .into_iter()
        .filter(|s| matches_all(&args.filters, s));
    let sandboxes: Vec<Listed<SandboxInfo>> = sandboxes
        .map(|s| Listed {
            record: table::without_tokens(s.record),
            ..s
        })
        .collect();
    if args.quiet {
        let ids =
            |all: &Vec<Listed<SandboxInfo>>| all.iter().map(|s| format!("{}\n", s.id)).collect();
        return table::show(false, &sandboxes, ids);
    }
    if sandboxes.is_empty() && !args.json {
        let message = if args.filters.is_empty() {
            "no sandboxes; create one with `jiffy create`"
        } else {
            "no matching sandboxes"
        };
        errln!("{message}");
        return Ok(());
    }
    table::show(args.json, &sandboxes, table::sandboxes)
}

/// Returns whether the sandbox matches all filters. Filters of one kind are alternatives, except
/// for labels, which must all match.
fn matches_all(filters: &[Filter], sandbox: &SandboxInfo) -> bool {
    filters.iter().all(|filter| match filter {
        Filter::Label(..) => matches_filter(filter, sandbox),
        _ => {
            let same = |other: &&Filter| discriminant(*other) == discriminant(filter);
            filters
                .iter()
                .filter(same)
                .any(|f| matches_filter(f, sandbox))
        }
    })
}

/// Returns whether the sandbox matches one filter.
fn matches_filter(filter: &Filter, sandbox: &SandboxInfo) -> bool {
    match filter {
        Filter::State(name) => sandbox.state.name() == *name,
        Filter::Label(key, value) => {
            let label = sandbox.settings.metadata.get(key);
            label.is_some_and(|label| value.as_ref().is_none_or(|value| value == label))
        }
        Filter::Name(pattern) => sandbox
            .name
            .as_ref()
            .is_some_and(|n| matches_pattern(pattern, n)),
        Filter::Template(pattern) => {
            // The template has the form `[KEY/]name[:tag]`.
            let full = &sandbox.template;
            let name = full.rsplit_once('/').map_or(&full[..], |(_, name)| name);
            let untagged = name.split(':').next().unwrap_or_default();
            [full, name, untagged]
                .iter()
                .any(|n| matches_pattern(pattern, n))
        }
        Filter::Engine(name) => sandbox.engine.as_ref() == Some(name),
    }
}

/// Returns whether `text` matches `pattern`, in which `*` matches any text.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(text) = text.strip_prefix(head) else {
        return false;
    };
    // Each part matches at its first occurrence, and the last part at the end.
    let mut remaining = text;
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match remaining.find(part) {
            Some(at) => remaining = &remaining[at + part.len()..],
            None => return false,
        }
    }
    remaining.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sandbox() -> SandboxInfo {
        let record = json!({
            "id": "a", "name": "web-1", "state": "running", "template": "k/app:v2",
            "vcpus": 2, "memory_mib": 512, "disk_mib": 1024, "env": {}, "engine": "gvisor",
            "terms": { "metadata": { "team": "a", "tier": "" } },
            "created_ms": 1, "changed_ms": 1,
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn filters_of_one_kind_are_alternatives_and_kinds_are_combined() {
        let label = |k: &str, v: Option<&str>| Filter::Label(k.into(), v.map(Into::into));
        let (running, paused) = (Filter::State("running"), Filter::State("paused"));
        for (filters, expected) in [
            (vec![], true),
            (vec![running.clone(), paused.clone()], true),
            (vec![paused], false),
            (vec![label("team", None), label("tier", Some(""))], true),
            (
                vec![label("team", Some("a")), label("team", Some("b"))],
                false,
            ),
            (vec![running, Filter::Engine("microvm".into())], false),
            (
                vec![Filter::Name("web".into()), Filter::Name("web-*".into())],
                true,
            ),
            (vec![Filter::Template("app".into())], true),
            (vec![Filter::Template("app:v2".into())], true),
            (vec![Filter::Template("app:v1".into())], false),
        ] {
            assert_eq!(matches_all(&filters, &sandbox()), expected, "{filters:?}");
        }
    }

    #[test]
    fn a_star_matches_any_text() {
        for (pattern, text, expected) in [
            ("web", "web", true),
            ("web", "web-1", false),
            ("web*", "web-1", true),
            ("*1", "web-1", true),
            ("w*b*1", "web-1", true),
            ("w*x*1", "web-1", false),
            ("*", "", true),
            ("a*a", "a", false),
            ("a*ab", "aab", true),
        ] {
            assert_eq!(matches_pattern(pattern, text), expected, "{pattern} {text}");
        }
    }
}

//! Hints for users of other tools, such as Docker: an unknown command leads to the equivalent
//! command of Jiffy.

use clap::error::{ContextKind, ContextValue};

/// Commands of other tools, and the equivalent commands of Jiffy.
const COMMANDS: [(&[&str], &str); 13] = [
    (
        &["stop"],
        "`jiffy pause` stores the memory of a sandbox and stops it; `jiffy kill` kills it",
    ),
    (
        &["start", "unpause"],
        "`jiffy resume` resumes a paused sandbox; `jiffy create` creates a sandbox",
    ),
    (
        &["images"],
        "`jiffy template ls` lists the templates of sandboxes",
    ),
    (
        &["rmi"],
        "`jiffy template rm` removes a template; `jiffy prune` removes unused data",
    ),
    (
        &["pull"],
        "`jiffy create --image REF` and `jiffy template build --image REF` import an image",
    ),
    (
        &["build"],
        "`jiffy template build DIR` builds a template from a Dockerfile",
    ),
    (
        &["commit", "save", "checkpoint"],
        "`jiffy snapshot` stores the memory and the disk of a sandbox",
    ),
    (
        &["restore", "load"],
        "`jiffy create --from SNAPSHOT` creates a sandbox from a snapshot; `jiffy rollback` rolls back a sandbox",
    ),
    (
        &["attach", "ssh", "enter"],
        "`jiffy shell` opens a shell in a sandbox",
    ),
    (
        &["top"],
        "`jiffy stats` shows the resource usage of sandboxes; `jiffy exec ID -- ps aux` lists processes",
    ),
    (
        &["port", "expose", "forward"],
        "`jiffy port-forward` forwards ports of this host to a sandbox",
    ),
    (
        &["info", "status", "version"],
        "`jiffy daemon status` shows the status of the daemon; `jiffy doctor` checks this host",
    ),
    (
        &["clone"],
        "`jiffy fork` creates copies of a running sandbox",
    ),
];

/// Returns the hint for an unknown command that exists in other tools.
pub fn command_hint(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let mut commands = COMMANDS.iter();
    let entry = commands.find(|(words, _)| words.contains(&typed.as_str()));
    entry.map(|(_, hint)| *hint)
}

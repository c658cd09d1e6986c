//! Words that people know from elsewhere, and what is meant here.

use clap::error::{ContextKind, ContextValue};

/// Commands of Docker and others.
const COMMANDS: [(&[&str], &str); 13] = [
    (
        &["stop"],
        "`jiffy pause` puts a sandbox to sleep, memory and all; `jiffy kill` ends it",
    ),
    (
        &["start", "unpause"],
        "`jiffy resume` wakes a sandbox that sleeps; `jiffy create` makes one",
    ),
    (
        &["images"],
        "`jiffy template ls` lists what sandboxes are made of",
    ),
    (
        &["rmi"],
        "`jiffy template rm` removes a template, `jiffy prune` what nothing needs",
    ),
    (
        &["pull"],
        "`jiffy create --image REF` imports an image; so does `jiffy template build --image REF`",
    ),
    (
        &["build"],
        "`jiffy template build DIR` builds a template of a Dockerfile",
    ),
    (
        &["commit", "save", "checkpoint"],
        "`jiffy snapshot` keeps a sandbox as it is, memory and all",
    ),
    (
        &["restore", "load"],
        "`jiffy create --from SNAPSHOT` makes a sandbox of a snapshot, `jiffy rollback` puts one back",
    ),
    (
        &["attach", "ssh", "enter", "console"],
        "`jiffy shell` opens a shell in a sandbox",
    ),
    (
        &["top"],
        "`jiffy stats` shows what sandboxes use, `jiffy exec ID -- ps aux` what runs in one",
    ),
    (
        &["port", "expose", "forward"],
        "`jiffy port-forward` leads ports of this host to ports of a sandbox",
    ),
    (
        &["info", "status", "version"],
        "`jiffy daemon status` says what the daemon does, `jiffy doctor` what this host can",
    ),
    (
        &["clone"],
        "`jiffy fork` makes sandboxes that begin as this one is now",
    ),
];

/// The meaning here of a command that is known elsewhere, in a sentence.
pub fn of_command(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    let known = COMMANDS.iter();
    let mut found = known.filter(|(words, _)| words.contains(&typed.as_str()));
    found.next().map(|(_, meant)| *meant)
}

//! `jiffy key`: who may use the control plane of this host.

use crate::cli::{KeyCommand, KeyCreateArgs};
use crate::sandbox::table::age as ago;
use jiffy_api::{Key, Keys, Limits};
use jiffy_image::Home;
use std::process::ExitCode;

/// Runs one subcommand. It works on the file of keys, which a daemon that runs reads at every call.
pub fn run(command: &KeyCommand) -> anyhow::Result<ExitCode> {
    let keys = Keys::open(Home::locate()?.path())?;
    match command {
        KeyCommand::Create(args) => create(&keys, args)?,
        KeyCommand::Ls { all, json } => {
            let mut found = keys.list()?;
            found.retain(|k| *all || k.revoked_ms.is_none());
            match json {
                true => println!("{}", serde_json::to_string_pretty(&found)?),
                false => print!("{}", table(&found)),
            }
        }
        KeyCommand::Revoke { key, json } => {
            let gone = keys.revoke(key)?;
            match json {
                true => println!("{}", serde_json::to_string_pretty(&gone)?),
                false => println!("{}", gone.id),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn create(keys: &Keys, args: &KeyCreateArgs) -> anyhow::Result<()> {
    let limits = Limits {
        max_sandboxes: args.max_sandboxes,
        max_vcpus: args.max_cpus,
        max_memory_mib: args.max_memory,
        creates_per_minute: args.creates_per_minute,
    };
    let made = keys.create(&args.name, args.scope.into(), limits)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&made)?);
    } else {
        println!("{}", made.secret);
        eprintln!(
            "jiffy: this is the only time the key is shown; `jiffy key revoke {}` ends it",
            made.key.id
        );
    }
    Ok(())
}

fn table(keys: &[Key]) -> String {
    if keys.is_empty() {
        return "no keys; `jiffy key create` makes one\n".to_owned();
    }
    let mut text = format!(
        "{:<20} {:<16} {:<7} {:<10} {:<10} LIMITS\n",
        "ID", "NAME", "SCOPE", "CREATED", "LAST USED"
    );
    for key in keys {
        let mut limits = limits(&key.limits);
        if let Some(at) = key.revoked_ms {
            limits = format!("revoked {} ago", ago(at));
        }
        let used = key.used_ms.map_or("never".to_owned(), ago);
        text += &format!(
            "{:<20} {:<16} {:<7} {:<10} {:<10} {limits}\n",
            key.id,
            key.name,
            key.scope.name(),
            ago(key.created_ms),
            used,
        );
    }
    text
}

fn limits(limits: &Limits) -> String {
    let all = [
        (limits.max_sandboxes, " sandboxes"),
        (limits.max_vcpus, " vCPUs"),
        (limits.max_memory_mib, " MiB"),
        (limits.creates_per_minute, " creates/min"),
    ];
    let set = all
        .iter()
        .filter_map(|(limit, what)| limit.map(|l| format!("{l}{what}")));
    let set: Vec<String> = set.collect();
    match set.is_empty() {
        true => "none".to_owned(),
        false => set.join(", "),
    }
}

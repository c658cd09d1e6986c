//! `jiffy fleet join`: makes this host a member of a fleet.
//!
//! A *member* is a host of the fleet.

use super::local::{OwnContent, member_address};
use crate::cli::{FleetJoinArgs, StoreTargetArgs};
use crate::template::shared;
use jiffy_client::terminal::line;
use jiffy_fleet::join::{JoinOptions, join_fleet};
use jiffy_fleet::level_name;
use jiffy_fleet::settings::{DEFAULT_PORT, Role, Settings};
use jiffy_image::Home;
use serde_json::json;
use std::time::Instant;

/// Adds this host to a fleet.
pub fn run(args: &FleetJoinArgs) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let member = member_of(&args.url)?;
    if let Some(settings) = Settings::load(home.path())? {
        anyhow::bail!(
            "this data directory is already {} of fleet {}; use another data directory \
             (JIFFY_HOME) for another host",
            settings.member,
            settings.fleet
        );
    }
    let content = OwnContent::read(&home)?;
    if content.is_importable() && !args.import {
        anyhow::bail!(
            "this host has {} API keys, {} templates, {} secrets and {} webhooks of its own: add them \
             to the fleet with --import, or remove them: {}",
            content.keys.len(),
            content.templates.len(),
            content.secrets.len(),
            content.webhooks.len(),
            examples(&content)
        );
    }
    let address = member_address(&args.member, Some(&member))?;
    let facts = jiffy_daemon::host_facts(&home);
    let options = JoinOptions {
        member,
        token: args.token.clone(),
        name: address.name,
        listen: address.listen,
        address: address.address,
        role: Role::Host,
        import: content.is_importable(),
    };
    let level = level_name(facts.cpu_level);
    let mut joined = crate::runtime()?.block_on(join_fleet(home.path(), &options, facts))?;
    if !address.labels.is_empty() {
        let labels = address.labels;
        joined.settings.set_labels(home.path(), labels)?;
    }
    let settings = &joined.settings;
    let target = StoreTargetArgs {
        store: settings.store_url()?,
        store_keys: None,
    };
    let started = Instant::now();
    let mut fetched = Vec::new();
    let mut bytes = 0;
    for name in &joined.templates {
        // The host is a member already: the template can be pulled later.
        match shared::fetch_named(&home, name, false, &target) {
            Ok(template) => {
                bytes += template.bytes;
                fetched.push(name.clone());
            }
            Err(error) => errln!("jiffy: cannot fetch template {name}: {error:#}"),
        }
    }
    if args.output.json {
        let value = json!({
            "fleet": settings.fleet, "member": settings.member.to_string(),
            "name": settings.name, "admittedBy": joined.admitted_by.to_string(),
            "store": settings.store, "templates": fetched,
        });
        outln!("{}", jiffy_client::terminal::json(&value)?);
        return Ok(());
    }
    outln!(
        "joined fleet {} as {} ({}), admitted by {} (CPU {level}; kernel and gVisor match)",
        settings.fleet,
        settings.member,
        settings.name,
        joined.admitted_by
    );
    if !fetched.is_empty() {
        outln!(
            "templates: {} fetched ({} MB, {} s)",
            fetched.join(", "),
            bytes / 1_000_000,
            started.elapsed().as_secs()
        );
    }
    outln!("Restart the daemon: `systemctl restart jiffy` or `jiffy daemon restart`");
    Ok(())
}

fn examples(content: &OwnContent) -> String {
    let names: Vec<&str> = content.names().take(5).collect();
    line(&names.join(", ")).to_string()
}

/// Returns the address (`HOST:PORT`) in the URL of a member.
pub(super) fn member_of(url: &str) -> anyhow::Result<String> {
    let authority = url.strip_prefix("https://").unwrap_or(url);
    let authority = authority.trim_end_matches('/');
    anyhow::ensure!(
        !authority.is_empty() && !authority.contains(['/', '@', '?']),
        "{url:?} is not the address of a member: use https://HOST:{DEFAULT_PORT}"
    );
    let has_port = authority
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    Ok(if has_port {
        authority.to_owned()
    } else {
        format!("{authority}:{DEFAULT_PORT}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_members_have_a_default_port() {
        for (url, member) in [
            ("https://10.0.0.11:7946", "10.0.0.11:7946"),
            ("https://host1/", "host1:7946"),
            ("host1:1", "host1:1"),
            ("[fd00::1]", "[fd00::1]:7946"),
        ] {
            assert_eq!(member_of(url).unwrap(), member);
        }
        for url in ["", "https://", "https://a/b", "http://u@h:1/"] {
            assert!(member_of(url).is_err(), "{url}");
        }
    }
}

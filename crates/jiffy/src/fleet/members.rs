//! `jiffy fleet status`, `drain` and other commands that the daemon of this host executes. A
//! *verdict* is the decision of the fleet that a host is dead.
//!
//! A *shard* is a part of the fleet's sandboxes. Its *coordinator* is the host that registers
//! hosts, declares silent hosts dead and selects the hosts of new sandboxes. A *term* is the time
//! during which one host has this role. *Tables* are the API keys and template names, which each
//! host holds in memory.

use crate::cli::{FleetCommand, FleetMemberArgs};
use crate::columns::{Align, Table};
use hyper::Method;
use jiff::Timestamp;
use jiffy_api_types::{BackendStatus, FleetInfo, FleetNode, FleetNodes, HostLoss};
use jiffy_client::terminal::line;
use jiffy_daemon::local_daemon;
use jiffy_fleet::SetupError;
use jiffy_fleet::settings::Settings;
use jiffy_image::Home;
use serde_json::{Value, from_value, json};

/// Runs a command through the daemon.
pub fn run(command: &FleetCommand) -> anyhow::Result<()> {
    let home = Home::locate()?;
    if Settings::load(home.path())?.is_none() {
        return Err(SetupError::NoMember.into());
    }
    let post = |action: &str, args: &FleetMemberArgs, body: Value| {
        let path = format!("/fleet/nodes/{}/{action}", args.member);
        (Method::POST, path, body, args.output.json)
    };
    let (method, path, body, is_json) = match command {
        FleetCommand::Status(output) => (Method::GET, "/fleet".to_owned(), json!({}), output.json),
        FleetCommand::Nodes(output) => {
            let path = "/fleet/nodes".to_owned();
            (Method::GET, path, json!({}), output.json)
        }
        FleetCommand::Why { id, output } => {
            let is_valid = id.len() <= 64
                && id
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
            anyhow::ensure!(is_valid, "{id:?} is not the id or name of a sandbox");
            (
                Method::GET,
                format!("/fleet/why/{id}"),
                json!({}),
                output.json,
            )
        }
        FleetCommand::Drain {
            member,
            wait,
            force,
            output,
        } => {
            let path = format!("/fleet/nodes/{member}/drain");
            let body = json!({"wait": wait, "force": force});
            (Method::POST, path, body, output.json)
        }
        FleetCommand::Undrain(args) => post("undrain", args, json!({})),
        FleetCommand::Remove(args) => post("remove", args, json!({})),
        FleetCommand::ConfirmDead(args) => post("confirm-dead", args, json!({})),
        FleetCommand::AcceptRestore(output) => {
            let path = "/fleet/accept-restore".to_owned();
            (Method::POST, path, json!({}), output.json)
        }
        // The caller executes these commands, which need no daemon.
        FleetCommand::Init(_)
        | FleetCommand::Join(_)
        | FleetCommand::Token(_)
        | FleetCommand::Try(_) => return Ok(()),
    };
    let answer: Value = crate::runtime()?.block_on(async {
        let client = local_daemon::local_client().await?;
        client.call(method, &path, &body).await
    })?;
    if is_json {
        outln!("{}", jiffy_client::terminal::json(&answer)?);
        return Ok(());
    }
    match command {
        FleetCommand::Status(_) => out!("{}", status(&from_value(answer)?)),
        FleetCommand::Nodes(_) => {
            let answer: FleetNodes = from_value(answer)?;
            out!("{}", nodes(&answer.nodes));
        }
        _ => match answer.get("text").and_then(Value::as_str) {
            Some(text) => text.lines().for_each(|text| outln!("{}", line(text))),
            None => outln!("done"),
        },
    }
    Ok(())
}

/// Returns the summary of the fleet and the table of its members.
fn status(info: &FleetInfo) -> String {
    let coordinator = match (&info.coordinator, info.term) {
        (Some(name), Some(term)) => format!("coordinator {}, term {term}", line(name)),
        _ => "no coordinator".to_owned(),
    };
    let mut text = format!(
        "fleet {}  {} hosts, {} shard ({coordinator})",
        line(&info.id),
        info.nodes.len(),
        info.shards
    );
    if let Some(records) = &info.records {
        text.push_str(&format!("  records {}", line(&records.kind)));
        text.push_str(&latency(records));
    }
    if let Some(store) = &info.store {
        let state = if store.error.is_none() { " ok" } else { "" };
        text.push_str(&format!("  store{state}{}", latency(store)));
    }
    if let Some(number) = info.tables {
        let members = if info.outdated_tables.is_empty() {
            "on all members".to_owned()
        } else {
            format!("not on {}", line(&info.outdated_tables.join(", ")))
        };
        text.push_str(&format!("  tables at version {number} {members}"));
    }
    text.push('\n');
    if let Some(silence) = &info.mass_silence {
        text.push_str(&format!(
            "warning: {} of {} hosts are silent: no host is declared dead. If they are lost, run \
             `jiffy fleet confirm-dead`\n",
            silence.silent, silence.members
        ));
    }
    for loss in &info.losses {
        text.push_str(&verdict(loss, Timestamp::now()));
    }
    for warning in &info.warnings {
        text.push_str(&format!("warning: {}\n", line(warning)));
    }
    text + &nodes(&info.nodes)
}

/// Returns the latency of records or store, or its failure.
fn latency(status: &BackendStatus) -> String {
    match (&status.error, status.latency_ms) {
        (Some(error), _) => format!(" not available ({})", line(error)),
        (None, Some(ms)) => format!(" {ms} ms"),
        (None, None) => String::new(),
    }
}

/// Returns the line of a lost host.
fn verdict(loss: &HostLoss, now: Timestamp) -> String {
    let since = loss.since_ms.and_then(|ms| i64::try_from(ms).ok());
    let since = since.and_then(|ms| Timestamp::from_millisecond(ms).ok());
    let since = since.map_or(String::new(), |time| {
        let seconds = (now.as_second() - time.as_second()).max(0);
        format!(
            " since {seconds} s (verdict {})",
            time.strftime("%H:%M:%S UTC")
        )
    });
    let mut text = format!(
        "{} dead{since}: {} paused can resume elsewhere, {} running are broken",
        line(&loss.host),
        loss.resumable,
        loss.broken
    );
    match &loss.unstored[..] {
        [] => {}
        [id] => text.push_str(&format!(", 1 pause was not stored: {}", line(id))),
        ids => text.push_str(&format!(
            ", {} pauses were not stored: {}",
            ids.len(),
            line(&ids.join(", "))
        )),
    }
    text + "\n"
}

/// Returns the table of the members.
fn nodes(nodes: &[FleetNode]) -> String {
    let mut table = Table::new([
        ("HOST", Align::Left),
        ("STATE", Align::Left),
        ("LAST HEARTBEAT", Align::Right),
        ("RUNNING", Align::Right),
        ("PAUSED", Align::Right),
        ("UNSTORED", Align::Right),
        ("FREE MEM", Align::Right),
        ("WARM", Align::Right),
        ("VERSION", Align::Left),
        ("LABELS", Align::Left),
    ]);
    let number = |number: Option<u64>| number.map_or(String::new(), |number| number.to_string());
    for node in nodes {
        let (age, memory) = (node.heartbeat_age_ms, node.free_memory_mib);
        let labels = node.labels.iter();
        let labels = labels.map(|(name, value)| format!("{name}={value}"));
        let labels = labels.collect::<Vec<_>>().join(",");
        table.row([
            node.id.clone(),
            node.state.clone(),
            age.map_or(String::new(), |ms| format!("{:.1} s", ms as f64 / 1000.0)),
            number(node.running),
            number(node.paused),
            number(node.unstored),
            memory.map_or(String::new(), |mib| format!("{} GiB", mib >> 10)),
            number(node.warm),
            node.version.clone(),
            labels,
        ]);
    }
    if nodes.iter().all(|node| node.labels.is_empty()) {
        table.remove_column("LABELS");
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_shows_the_state_of_the_sandboxes_of_a_lost_host() {
        let loss = HostLoss {
            host: "h2".to_owned(),
            since_ms: Some(1_700_000_000_000),
            resumable: 180,
            broken: 9,
            unstored: vec!["abc".to_owned()],
        };
        let now = Timestamp::from_second(1_700_000_014).unwrap();
        assert_eq!(
            verdict(&loss, now),
            "h2 dead since 14 s (verdict 22:13:20 UTC): 180 paused can resume elsewhere, 9 running \
             are broken, 1 pause was not stored: abc\n"
        );
    }

    #[test]
    fn the_status_shows_the_coordinator_warnings_and_all_members() {
        let answer = json!({
            "id": "7kq2", "coordinator": "h1", "term": 4, "shards": 1,
            "warnings": ["this host has no contact with the coordinator\u{7}"],
            "nodes": [
                {"id": "h1", "state": "up", "heartbeatAgeMs": 800, "running": 14,
                 "paused": 202, "unstored": 1, "freeMemoryMib": 31_800, "warm": 8,
                 "version": "0.9.0"},
                {"id": "h2", "state": "dead"},
            ],
        });
        let text = status(&from_value(answer).unwrap());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "fleet 7kq2  2 hosts, 1 shard (coordinator h1, term 4)"
        );
        assert!(
            lines[1].starts_with("warning: this host has no contact"),
            "{text}"
        );
        assert!(
            lines[3].contains("0.8 s") && lines[3].contains("31 GiB"),
            "{text}"
        );
        assert!(lines[4].starts_with("h2    dead"), "{text}");
        assert!(!text.contains('\u{7}'));
        let answer = json!({
            "id": "7kq2", "coordinator": "h1", "term": 4, "shards": 1, "tables": 118,
            "records": {"kind": "s3", "latencyMs": 22},
            "store": {"kind": "s3", "latencyMs": 21},
            "massSilence": {"silent": 2, "members": 3},
        });
        let text = status(&from_value(answer).unwrap());
        let first = "(coordinator h1, term 4)  records s3 22 ms  store ok 21 ms  \
                     tables at version 118 on all members\n";
        assert!(text.contains(first), "{text}");
        assert!(text.contains("warning: 2 of 3 hosts are silent"), "{text}");
        // An older daemon without some fields.
        let text = status(&from_value(json!({"id": "x", "shards": 1})).unwrap());
        assert!(text.starts_with("fleet x  0 hosts, 1 shard (no coordinator)"));
    }
}

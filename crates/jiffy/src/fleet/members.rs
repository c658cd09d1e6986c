//! Commands that the daemon of a member answers.

use crate::cli::{FleetCommand, FleetMemberArgs};
use crate::columns::{Align, Table};
use hyper::Method;
use jiffy_api_types::{FleetInfo, FleetNode, FleetNodes};
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
            let is_valid =
                id.len() <= 64 && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
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
        // These commands need no daemon.
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
            Some(text) => outln!("{}", line(text)),
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
        "fleet {}  {} hosts, {} shard ({coordinator})\n",
        line(&info.id),
        info.nodes.len(),
        info.shards
    );
    for warning in &info.warnings {
        text.push_str(&format!("warning: {}\n", line(warning)));
    }
    text + &nodes(&info.nodes)
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
    ]);
    let number = |number: Option<u64>| number.map_or(String::new(), |number| number.to_string());
    for node in nodes {
        let (age, memory) = (node.heartbeat_age_ms, node.free_memory_mib);
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
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        // An older daemon without some fields.
        let text = status(&from_value(json!({"id": "x", "shards": 1})).unwrap());
        assert!(text.starts_with("fleet x  0 hosts, 1 shard (no coordinator)"));
    }
}

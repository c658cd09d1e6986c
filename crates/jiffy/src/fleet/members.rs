//! Commands that the daemon of a member answers.

use crate::cli::{FleetCommand, FleetMemberArgs};
use crate::columns::{Align, Table};
use hyper::Method;
use jiffy_client::terminal::line;
use jiffy_daemon::local_daemon;
use jiffy_fleet::SetupError;
use jiffy_fleet::settings::Settings;
use jiffy_image::Home;
use serde_json::{Value, json};

/// Runs a command through the daemon.
pub fn run(command: &FleetCommand) -> anyhow::Result<()> {
    let home = Home::locate()?;
    if Settings::load(home.path())?.is_none() {
        return Err(SetupError::NoMember.into());
    }
    let post = |action: &str, args: &FleetMemberArgs, body: Value| {
        let path = format!("/fleet/nodes/{}/{action}", member(&args.member)?);
        anyhow::Ok((Method::POST, path, body, args.output.json))
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
            member: id,
            wait,
            force,
            output,
        } => {
            let path = format!("/fleet/nodes/{}/drain", member(id)?);
            let body = json!({"wait": wait, "force": force});
            (Method::POST, path, body, output.json)
        }
        FleetCommand::Undrain(args) => post("undrain", args, json!({}))?,
        FleetCommand::Remove(args) => post("remove", args, json!({}))?,
        FleetCommand::ConfirmDead(args) => post("confirm-dead", args, json!({}))?,
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
        FleetCommand::Status(_) => out!("{}", status(&answer)),
        FleetCommand::Nodes(_) => out!("{}", nodes(&answer)),
        _ => match answer.get("text").and_then(Value::as_str) {
            Some(text) => outln!("{}", line(text)),
            None => outln!("done"),
        },
    }
    Ok(())
}

/// Checks the number of a member.
fn member(text: &str) -> anyhow::Result<&str> {
    let number = text.strip_prefix('h').unwrap_or_default();
    anyhow::ensure!(
        number.parse::<u32>().is_ok(),
        "{text:?} is not a member: use a name of the column HOST of `jiffy fleet nodes`"
    );
    Ok(text)
}

/// Returns a field as text. Empty if the answer does not contain it.
fn field(value: &Value, name: &str) -> String {
    match value.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => String::new(),
    }
}

/// Returns the summary of the fleet and the table of its members.
fn status(answer: &Value) -> String {
    let hosts = answer
        .get("nodes")
        .and_then(Value::as_array)
        .map_or(0, Vec::len);
    let mut text = format!(
        "fleet {}  {hosts} hosts, 1 shard ({})",
        line(&field(answer, "id")),
        match field(answer, "coordinator").as_str() {
            "" => "no coordinator".to_owned(),
            name => format!("coordinator {}, term {}", line(name), field(answer, "term")),
        }
    );
    if let Some(records) = answer.get("records").filter(|value| value.is_object()) {
        let (kind, ms) = (field(records, "kind"), field(records, "ms"));
        text.push_str(&format!("  records {} {ms} ms", line(&kind)));
    }
    if let Some(store) = answer.get("store").filter(|value| value.is_object()) {
        let is_ok = store.get("ok").and_then(Value::as_bool) == Some(true);
        let state = if is_ok { "ok" } else { "unreachable" };
        text.push_str(&format!("  store {state} {} ms", field(store, "ms")));
    }
    if let Some(tables) = answer.get("tables").filter(|value| value.is_object()) {
        let behind = tables.get("behind").and_then(Value::as_array);
        let members = match behind.map_or(0, Vec::len) {
            0 => "on all members".to_owned(),
            count => format!("({count} members are behind)"),
        };
        text.push_str(&format!(
            "  tables at version {} {members}",
            field(tables, "version")
        ));
    }
    text.push('\n');
    let warnings = answer.get("warnings").and_then(Value::as_array);
    for warning in warnings.into_iter().flatten().filter_map(Value::as_str) {
        text.push_str(&format!("warning: {}\n", line(warning)));
    }
    text.push_str(&nodes(answer));
    let rows = answer.get("nodes").and_then(Value::as_array);
    for node in rows.into_iter().flatten() {
        if let Some(note) = node.get("note").and_then(Value::as_str) {
            text.push_str(&format!("{} {}\n", line(&field(node, "id")), line(note)));
        }
    }
    text
}

/// Returns the table of the members.
fn nodes(answer: &Value) -> String {
    let mut table = Table::new([
        ("HOST", Align::Left),
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("LAST HEARTBEAT", Align::Right),
        ("RUNNING", Align::Right),
        ("PAUSED", Align::Right),
        ("UNSTORED", Align::Right),
        ("FREE MEM", Align::Right),
        ("WARM", Align::Right),
        ("VERSION", Align::Left),
    ]);
    let rows = answer.get("nodes").and_then(Value::as_array);
    for node in rows.into_iter().flatten() {
        let age = node.get("heartbeatAgeMs").and_then(Value::as_u64);
        let memory = node.get("freeMemoryMib").and_then(Value::as_u64);
        table.row([
            field(node, "id"),
            field(node, "name"),
            field(node, "state"),
            age.map_or(String::new(), |ms| format!("{:.1} s", ms as f64 / 1000.0)),
            field(node, "running"),
            field(node, "paused"),
            field(node, "unstored"),
            memory.map_or(String::new(), |mib| format!("{} GiB", mib >> 10)),
            field(node, "warm"),
            field(node, "version"),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_shows_the_coordinator_all_members_and_notes() {
        let answer = json!({
            "id": "7kq2", "coordinator": "h1", "term": 4,
            "records": {"kind": "s3", "ms": 22}, "store": {"ok": true, "ms": 22},
            "tables": {"version": 118, "behind": []},
            "warnings": ["etcd retains its whole history"],
            "nodes": [
                {"id": "h1", "state": "up", "heartbeatAgeMs": 800, "running": 14,
                 "paused": 202, "unstored": 1, "freeMemoryMib": 31_800, "warm": 8,
                 "version": "0.9.0"},
                {"id": "h2", "state": "dead", "note": "dead since 14 s\u{7}"},
            ],
        });
        let text = status(&answer);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "fleet 7kq2  2 hosts, 1 shard (coordinator h1, term 4)  records s3 22 ms  store ok \
             22 ms  tables at version 118 on all members"
        );
        assert_eq!(lines[1], "warning: etcd retains its whole history");
        assert!(
            lines[3].contains("0.8 s") && lines[3].contains("31 GiB"),
            "{text}"
        );
        assert!(lines[4].starts_with("h2    -     dead"), "{text}");
        assert!(!text.contains('\u{7}'));
        // An older daemon without some fields.
        assert!(
            status(&json!({"id": "x"})).starts_with("fleet x  0 hosts, 1 shard (no coordinator)")
        );
    }

    #[test]
    fn members_are_named_by_their_numbers() {
        assert_eq!(member("h12").unwrap(), "h12");
        for text in ["", "h", "12", "h1/../2", "H1"] {
            assert!(member(text).is_err(), "{text}");
        }
    }
}

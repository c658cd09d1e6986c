//! `jiffy events`: prints events of sandboxes, builds and keys.

use crate::cli::{EventsArgs, HostArgs};
use crate::log_pages::{Output, print, with_fields};
use crate::runtime;
use hyper::Method;
use jiff::Timestamp;
use jiffy_api_types::{Event, EventPage, EventType};
use jiffy_client::{has_error_code, terminal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use std::process::ExitCode;
use std::time::Duration;

/// Prints events. With `--follow`, also prints new events, until standard output is closed.
pub fn run(args: &EventsArgs) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let mut parameters = Vec::new();
    if let Some(sandbox) = &args.sandbox {
        parameters.push(("sandboxID", runtime.block_on(id(&args.host, sandbox))?));
    }
    let types = args.types.iter().map(|kind| ("types", kind.clone()));
    parameters.extend(types);
    parameters.extend(since(args.since)?);
    let output = Output {
        follow: args.follow,
        json: args.json,
    };
    let printed = runtime.block_on(print::<EventPage>(&args.host, &parameters, output, line));
    printed.map_err(|error| match unknown_types(&args.types) {
        Some(message) if has_error_code(&error, "invalid_request") => anyhow::Error::msg(message),
        _ => error,
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the message for types that this program does not know. `None` if it knows all of them.
/// Unknown types are sent nevertheless: a newer daemon may know them.
fn unknown_types(types: &[String]) -> Option<String> {
    let known = EventType::ALL.map(EventType::name);
    let unknown = types.iter().map(String::as_str);
    let unknown: Vec<&str> = unknown.filter(|name| !known.contains(name)).collect();
    let first = unknown.first()?;
    Some(format!(
        "--type: `{first}` is not a type of event: use one or more of {}",
        known.join(", ")
    ))
}

/// Returns the id of a sandbox. A name has no meaning after the end of its sandbox.
async fn id(host: &HostArgs, sandbox: &str) -> anyhow::Result<String> {
    let client = jiffy_daemon::open_client(&host.server()).await?;
    let path = format!(
        "/sandboxes/{}",
        utf8_percent_encode(sandbox, NON_ALPHANUMERIC)
    );
    let found: anyhow::Result<Value> = client.call(Method::GET, &path, &Value::Null).await;
    match found {
        Ok(found) => Ok(found["sandboxID"].as_str().unwrap_or(sandbox).to_owned()),
        // The events of a removed sandbox remain.
        Err(e) if has_error_code(&e, "sandbox_not_found") => Ok(sandbox.to_owned()),
        Err(e) => Err(e),
    }
}

/// Returns the parameter that selects entries of a period.
pub fn since(period: Option<Duration>) -> anyhow::Result<Option<(&'static str, String)>> {
    let start = period.map(|period| Timestamp::now().checked_sub(period));
    Ok(start.transpose()?.map(|start| ("since", start.to_string())))
}

/// Formats an event: time, type, object and details. Names come from clients and are escaped.
fn line(event: &Event) -> String {
    let object = [&event.sandbox_id, &event.build_id, &event.key_id];
    let object = object.into_iter().flatten().next();
    let object = object.map_or("-", String::as_str);
    let kind = event.kind.name();
    let line = format!("{} {kind:<23} {}", event.time, terminal::line(object));
    let count = event.count.map(|count| count.to_string());
    let end = event.end_at.as_ref().map(ToString::to_string);
    let fields = [
        ("name", &event.name),
        ("template", &event.template_id),
        ("snapshot", &event.snapshot_id),
        ("from", &event.forked_from),
        ("count", &count),
        ("end", &end),
        ("owner", &event.owner),
        ("by", &event.caller),
        ("cause", &event.cause),
    ];
    with_fields(line, &fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_api_types::Moment;

    #[test]
    fn the_message_for_an_unknown_type_names_the_option_and_all_types() {
        let types = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            unknown_types(&types(&["sandbox.killed", "key.created"])),
            None
        );
        assert_eq!(unknown_types(&[]), None);
        let message = unknown_types(&types(&["sandbox.killed", "bogus"])).unwrap();
        assert!(message.starts_with("--type: `bogus` is not"), "{message}");
        for kind in EventType::ALL {
            assert!(message.contains(kind.name()), "{message}");
        }
    }

    #[test]
    fn names_cannot_forge_lines_or_control_the_terminal() {
        let event: Event = serde_json::from_value(serde_json::json!({
            "id": "i", "type": "sandbox.renamed", "time": "T", "host": "h", "owner": null,
            "sandboxID": "k3x9", "name": "a\nT sandbox.killed b\u{1b}[2J",
        }))
        .unwrap();
        assert_eq!(event.kind, EventType::SandboxRenamed);
        assert_eq!(event.time, Moment("T".to_owned()));
        let line = line(&event);
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert!(!line.contains('\u{1b}'), "{line}");
        assert!(
            line.starts_with("T sandbox.renamed         k3x9 name=a"),
            "{line}"
        );
    }
}

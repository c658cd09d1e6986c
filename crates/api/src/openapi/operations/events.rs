//! Operations that read events.

use crate::audit_pages::MAX_FILTER;
use crate::events::{DEFAULT_EVENTS, MAX_EVENT_WAIT_S, MAX_EVENTS};
use crate::openapi::operation::{Operation, query};
use crate::routes::bounds::{MAX_LIFECYCLE_EVENTS, MAX_LIFECYCLE_OFFSET};
use jiffy_api_types::{AuditPage, EventPage, EventType, LifecycleEvent, LifecycleEventType};
use serde_json::{Value, json};

/// Returns a parameter with names that are separated by commas.
fn names(name: &str, description: &str, names: &[&str]) -> Value {
    let items = json!({ "type": "string", "enum": names });
    let mut parameter = query(
        name,
        description,
        json!({ "type": "array", "items": items }),
    );
    parameter["style"] = json!("form");
    parameter["explode"] = json!(false);
    parameter
}

fn id(name: &str, description: &str) -> Value {
    query(
        name,
        description,
        json!({ "type": "string", "pattern": "^[0-9a-f]{14}-[a-z0-9]{1,32}$" }),
    )
}

/// Operation on the audit log.
pub(super) fn audit() -> Operation {
    let text = |name, description| {
        query(
            name,
            description,
            json!({ "type": "string", "maxLength": MAX_FILTER }),
        )
    };
    Operation::get(
        "/audit",
        "listAudit",
        "List calls of the API with their callers and results. Requires scope `admin`",
    )
    .with(vec![
        id("after", "Only entries after the entry with this id"),
        id("before", "Only entries before the entry with this id"),
        query(
            "since",
            "Only entries from this time on",
            json!({ "type": "string", "format": "date-time" }),
        ),
        text("keyID", "Only calls with this API key"),
        text(
            "sandboxID",
            "Only calls on this sandbox, as the caller wrote it",
        ),
        text("address", "Only calls from this address"),
        text("call", "Only calls whose method and path contain this text"),
        query(
            "rejected",
            "Only calls with the status 401, 403, 404 or 429",
            json!({ "type": "boolean", "default": false }),
        ),
        limit(),
        order(),
        wait(),
    ])
    .merged()
    .answers::<AuditPage>(200, "Page of the audit log")
    .fails_with(&[501])
}

fn limit() -> Value {
    query(
        "limit",
        "Maximum number of entries",
        json!({
            "type": "integer", "minimum": 1, "maximum": MAX_EVENTS, "default": DEFAULT_EVENTS,
        }),
    )
}

fn order() -> Value {
    query(
        "order",
        "Order by time",
        json!({ "type": "string", "enum": ["asc", "desc"], "default": "asc" }),
    )
}

fn wait() -> Value {
    query(
        "wait",
        "Time in seconds for which the request waits for the first entry",
        json!({
            "type": "integer", "minimum": 0, "maximum": MAX_EVENT_WAIT_S, "default": 0,
        }),
    )
}

/// Operations on events.
pub(super) fn events() -> Vec<Operation> {
    let types = EventType::ALL.map(EventType::name);
    let lifecycle_types = LifecycleEventType::NAMES.map(|(name, _)| name);
    let lifecycle = || {
        vec![
            query(
                "offset",
                "Number of events to skip",
                json!({
                    "type": "integer", "minimum": 0, "maximum": MAX_LIFECYCLE_OFFSET, "default": 0,
                }),
            ),
            query(
                "limit",
                "Maximum number of events",
                json!({
                    "type": "integer", "minimum": 1, "maximum": MAX_LIFECYCLE_EVENTS, "default": 10,
                }),
            ),
            query(
                "orderAsc",
                "Oldest events first",
                json!({ "type": "boolean", "default": false }),
            ),
            names(
                "types",
                "Only events of these types, separated by commas",
                &lifecycle_types,
            ),
        ]
    };
    let mut last_event = id(
        "Last-Event-ID",
        "Id of the last event that the client has received from the stream",
    );
    last_event["in"] = json!("header");
    vec![
        Operation::get(
            "/events",
            "listEvents",
            "List events of sandboxes, builds and keys. With `Accept: text/event-stream`, the \
             response is a stream of events that does not end",
        )
        .with(vec![
            id("after", "Only events after the event with this id"),
            id("before", "Only events before the event with this id"),
            query(
                "since",
                "Only events from this time on",
                json!({ "type": "string", "format": "date-time" }),
            ),
            names(
                "types",
                "Only events of these types, separated by commas",
                &types,
            ),
            query(
                "sandboxID",
                "Only events of this sandbox: id or name",
                json!({ "type": "string", "maxLength": 256 }),
            ),
            limit(),
            order(),
            wait(),
            last_event,
        ])
        .merged()
        .answers::<EventPage>(200, "Page of events")
        .fails_with(&[404]),
        Operation::get(
            "/events/sandboxes",
            "listLifecycleEvents",
            "List events of sandboxes in E2B's form",
        )
        .with(lifecycle())
        .merged()
        .answers::<Vec<LifecycleEvent>>(200, "Events"),
        Operation::get(
            "/events/sandboxes/{sandboxID}",
            "listLifecycleEventsOfSandbox",
            "List events of a sandbox in E2B's form, also after its removal",
        )
        .with(lifecycle())
        .merged()
        .answers::<Vec<LifecycleEvent>>(200, "Events"),
    ]
}

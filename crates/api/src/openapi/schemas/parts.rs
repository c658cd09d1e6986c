//! Parts of schemas.

use crate::network;
use crate::routes::bounds::{MAX_NAME, MAX_PAIRS, MAX_VALUE};
use jiffy_engine_api::SandboxSize;
use jiffy_sandbox_manager::MAX_SANDBOX_NAME;
use serde_json::{Value, json};

/// Longest time limit that any configuration allows.
const MAX_TIMEOUT: u64 = 30 * 24 * 3600;

/// An object with these properties, of which `required` must be there.
pub(super) fn object(required: &[&str], properties: Value) -> Value {
    json!({ "type": "object", "required": required, "properties": properties })
}

/// An object with only these properties: others are rejected.
pub(super) fn closed_object(required: &[&str], properties: Value) -> Value {
    let mut schema = object(required, properties);
    if let Some(map) = schema.as_object_mut() {
        map.insert("additionalProperties".to_owned(), json!(false));
    }
    schema
}

/// Two lists of properties as one.
pub(super) fn joined(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}

/// `schema` of one type, or null.
pub(super) fn maybe(mut schema: Value) -> Value {
    if let Some(map) = schema.as_object_mut() {
        let kind = map.get("type").cloned().unwrap_or_default();
        map.insert("type".to_owned(), json!([kind, "null"]));
    }
    schema
}

/// A string.
pub(super) fn text() -> Value {
    json!({ "type": "string" })
}

/// A boolean.
pub(super) fn flag() -> Value {
    json!({ "type": "boolean" })
}

/// An integer in a range.
pub(super) fn integer(least: i64, most: u64) -> Value {
    json!({ "type": "integer", "minimum": least, "maximum": most })
}

/// Memory of a template in MiB.
pub(super) fn memory_of_template() -> Value {
    integer(
        i64::from(SandboxSize::MIN_MEMORY_MIB),
        u64::from(SandboxSize::MAX_MEMORY_MIB),
    )
}

/// An integer from 0.
pub(super) fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

/// A date and time.
pub(super) fn moment() -> Value {
    json!({ "type": "string", "format": "date-time" })
}

/// A timeout in seconds.
pub(super) fn timeout() -> Value {
    let mut schema = integer(-1, MAX_TIMEOUT);
    if let Some(map) = schema.as_object_mut() {
        map.insert("description".to_owned(), json!("Seconds; -1: no limit"));
    }
    schema
}

/// Names that match `names`, with values.
pub(super) fn pairs(names: &str) -> Value {
    json!({
        "type": ["object", "null"],
        "maxProperties": MAX_PAIRS,
        "propertyNames": { "type": "string", "pattern": names, "maxLength": MAX_NAME },
        "additionalProperties": { "type": "string", "maxLength": MAX_VALUE, "pattern": "^[^\\u0000]*$" },
    })
}

/// The name of a sandbox, or null for none.
pub(super) fn sandbox_name() -> Value {
    let pattern = format!("^[A-Za-z0-9][A-Za-z0-9._-]{{0,{}}}$", MAX_SANDBOX_NAME - 1);
    json!({
        "type": ["string", "null"], "pattern": pattern,
        "description": "Unique among the caller's sandboxes; stands wherever a sandbox's id does",
    })
}

/// A list of strings that match `pattern`, or null.
pub(super) fn addresses(pattern: &str) -> Value {
    json!({
        "type": ["array", "null"], "maxItems": network::MAX_NETWORK_ENTRIES,
        "items": { "type": "string", "pattern": pattern },
    })
}

/// Nothing but emptiness: an option this host does not have.
pub(super) fn nothing() -> Value {
    json!({
        "description": "Not supported: refused unless empty",
        "anyOf": [
            { "type": "null" },
            { "type": "array", "maxItems": 0 },
            { "type": "object", "maxProperties": 0 },
        ],
    })
}

/// Entries of a log.
pub(super) fn log_entries() -> Value {
    let entry = object(
        &["timestamp", "message", "level"],
        json!({
            "timestamp": moment(),
            "message": text(),
            "level": { "type": "string", "enum": ["debug", "info", "warn", "error"] },
            "fields": { "type": "object", "additionalProperties": text() },
        }),
    );
    json!({ "type": "array", "items": entry })
}

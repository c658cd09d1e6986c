//! Operation that reads the usage of keys.

use crate::openapi::operation::{Operation, query};
use crate::usage::{DEFAULT_ROWS, MAX_CURSOR, MAX_KEY, MAX_ROWS};
use jiffy_api_types::UsagePage;
use serde_json::json;

/// Operation that reads a page of the usage.
pub(super) fn usage() -> Operation {
    let day = |name, description| {
        query(
            name,
            description,
            json!({ "type": "string", "format": "date" }),
        )
    };
    Operation::get(
        "/usage",
        "listUsage",
        "List the usage of API keys by day. Keys of other scopes than `admin` read their own usage",
    )
    .with(vec![
        query(
            "key",
            "Only this key: id or name, or `owner` for the host's owner",
            json!({ "type": "string", "maxLength": MAX_KEY }),
        ),
        day("from", "First day in UTC. Defaults to 29 days before `to`"),
        day("to", "Last day in UTC. Defaults to the present day"),
        query(
            "after",
            "Position after the previous page, from its `next`",
            json!({ "type": "string", "maxLength": MAX_CURSOR }),
        ),
        query(
            "limit",
            "Maximum number of entries",
            json!({
                "type": "integer", "minimum": 1, "maximum": MAX_ROWS, "default": DEFAULT_ROWS,
            }),
        ),
    ])
    .merged()
    .answers::<UsagePage>(200, "Page of usage")
    .fails_with(&[403, 404])
}

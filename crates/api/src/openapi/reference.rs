//! References to schemas, and parameters.

use serde_json::{Value, json};

/// A reference to a schema.
pub(super) fn schema(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// A parameter that may be given.
pub(super) fn query(name: &str, schema: Value) -> Value {
    json!({ "name": name, "in": "query", "required": false, "schema": schema })
}

/// Array of a schema.
pub(super) fn list(name: &str) -> Value {
    json!({ "type": "array", "items": schema(name) })
}

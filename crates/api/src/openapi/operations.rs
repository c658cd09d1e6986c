//! Operations of the control plane.

mod functions;
mod host;
mod observe;
mod sandboxes;
mod templates;

use super::operation::Operation;
use super::reference::schema;
use serde_json::json;

/// All operations.
pub(super) fn all() -> Vec<Operation> {
    let mut all = vec![
        Operation::get("/health", "health", "Whether the control plane answers")
            .answers(200, "It does", schema("Health"))
            .open(),
        Operation::get("/openapi.json", "openapi", "This document")
            .answers(200, "The document", json!({ "type": "object" }))
            .open(),
    ];
    all.extend(sandboxes::sandboxes());
    all.extend(observe::observe());
    all.extend(templates::templates());
    all.extend(functions::functions());
    all.extend(host::host());
    all
}

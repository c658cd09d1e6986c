//! Operations of the control plane.

mod functions;
mod host;
mod observe;
mod sandboxes;
mod templates;

use super::operation::Operation;
use jiffy_api_types::Health;
use serde_json::{Map, Value};

/// All operations.
pub(super) fn all() -> Vec<Operation> {
    let mut all = vec![
        Operation::get("/health", "health", "Whether the control plane answers")
            .answers::<Health>(200, "It does")
            .open(),
        Operation::get("/openapi.json", "openapi", "This document")
            .answers::<Map<String, Value>>(200, "The document")
            .open(),
    ];
    all.extend(sandboxes::sandboxes());
    all.extend(observe::observe());
    all.extend(templates::templates());
    all.extend(functions::functions());
    all.extend(host::host());
    all
}

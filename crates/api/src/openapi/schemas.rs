//! Schemas of bodies.

mod functions;
mod guest;
mod host;
mod parts;
mod requests;
mod sandboxes;
mod templates;

use parts::joined;
use serde_json::{Value, json};

/// All schemas by name.
pub(super) fn all() -> Value {
    let schemas = [
        requests::requests(),
        sandboxes::sandboxes(),
        guest::guest(),
        templates::templates(),
        functions::functions(),
        host::host(),
        host::pruning(),
    ];
    schemas.into_iter().fold(json!({}), joined)
}

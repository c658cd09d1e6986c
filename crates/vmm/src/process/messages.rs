//! Messages on standard error, which a controller that is gone still finds in its log.

use crate::error::VmmError;
use std::io::{self, Write};
use std::sync::OnceLock;

/// Id of the request that created the guest.
static REQUEST_ID: OnceLock<String> = OnceLock::new();

/// Sets the id that messages end with.
pub(super) fn set_request_id(id: Option<String>) {
    if let Some(id) = id {
        // A guest is created once.
        let _ = REQUEST_ID.set(id);
    }
}

/// Writes `error`.
pub(super) fn report(error: &VmmError) {
    let id = REQUEST_ID.get();
    let request = id.map_or_else(String::new, |id| format!(" request_id={id}"));
    // Standard error may be gone.
    let _ = writeln!(io::stderr(), "jiffy-vmm: {error}{request}");
}

//! Messages on standard error. They are logged even if the controller has exited.

use crate::error::VmmError;
use std::io::{self, Write};
use std::sync::OnceLock;

/// Id of the request that created the guest.
static REQUEST_ID: OnceLock<String> = OnceLock::new();

/// Sets the id that is appended to messages.
pub(super) fn set_request_id(id: Option<String>) {
    if let Some(id) = id {
        // Ignore the error: a guest is created only once.
        let _ = REQUEST_ID.set(id);
    }
}

/// Writes `error` to standard error.
pub(super) fn report(error: &VmmError) {
    let id = REQUEST_ID.get();
    let request = id.map_or_else(String::new, |id| format!(" request_id={id}"));
    // Ignore the error: standard error may be closed.
    let _ = writeln!(io::stderr(), "jiffy-vmm: {error}{request}");
}

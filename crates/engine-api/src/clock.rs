//! Wall-clock time.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the current time in milliseconds since 1970, or 0 if the host's clock is earlier.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

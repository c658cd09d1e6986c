//! Wall-clock time.

use std::time::{SystemTime, UNIX_EPOCH};

/// Present time in milliseconds since 1970; 0 on a host whose clock is before that.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

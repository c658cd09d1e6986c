#![no_main]
//! Ids of events, which clients send in `Last-Event-ID` and in queries: an accepted text has one
//! spelling, and the order of the texts is the order of the ids.

use jiffy_event_log::EntryId;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (one, other) = text.split_once('\n').unwrap_or((text, ""));
    let Ok(id) = one.parse::<EntryId>() else {
        return;
    };
    assert_eq!(id.to_string(), one);
    if let Ok(second) = other.parse::<EntryId>() {
        assert_eq!(id.cmp(&second), one.cmp(other));
    }
});

#![no_main]
//! Descriptions of processes, which a guest determines: texts and numbers of accepted processes are
//! bounded and harmless.

use jiffy_agent_client::process_list::parse_list;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for process in parse_list(data).unwrap_or_default() {
        for text in [&process.user, &process.name, &process.command] {
            assert!(text.chars().count() <= 512);
            assert!(!text.chars().any(char::is_control));
            // These characters change the direction of the text that follows.
            assert!(!text.contains(['\u{202e}', '\u{2066}', '\u{200f}']));
        }
        assert!(process.state == '?' || process.state.is_ascii_alphabetic());
        assert!(process.cpu_seconds.is_finite() && process.cpu_seconds >= 0.0);
        assert!(process.age_seconds.is_finite() && process.age_seconds >= 0.0);
    }
});

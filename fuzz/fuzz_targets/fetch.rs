#![no_main]
//! Messages between a VMM and the process that fetches its memory: a message is rejected, or
//! decoded within its limits and encoded to the same bytes.

use jiffy_proto::fetch::{FetchAnswer, FetchOutcome, FetchRequest, MAX_ANSWER_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = FetchRequest::decode(data) {
        assert_eq!(request.encode(), data);
    }
    let Ok(answer) = FetchAnswer::decode(data) else {
        return;
    };
    if let FetchOutcome::Failed(reason) = &answer.outcome {
        assert!(!reason.contains(char::is_control));
    }
    // A reason that is not UTF-8 grows when it is converted to text, and is truncated.
    let encoded = answer.encode();
    assert!(encoded.len() <= MAX_ANSWER_BYTES);
    let again = FetchAnswer::decode(&encoded).unwrap();
    assert_eq!(again.request, answer.request);
    assert_eq!(again.encode(), encoded);
});

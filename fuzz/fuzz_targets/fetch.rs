#![no_main]
//! Whatever a VMM and the fetcher of its memory send each other, a message is refused or is what
//! its encoding says, within its bounds.

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
    // A reason that was not text is longer as text, and is cut.
    let encoded = answer.encode();
    assert!(encoded.len() <= MAX_ANSWER_BYTES);
    let again = FetchAnswer::decode(&encoded).unwrap();
    assert_eq!(again.request, answer.request);
    assert_eq!(again.encode(), encoded);
});

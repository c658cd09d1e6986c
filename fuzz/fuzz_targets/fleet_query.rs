#![no_main]
//! Hostile queries and answers of a member (a host of a fleet): they are read back as they were
//! written, or rejected.

use jiffy_fleet::node::{Answer, Query, decode_replies, encode_replies};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(query) = Query::decode(data) {
        assert_eq!(Query::decode(&query.encode().unwrap()).unwrap(), query);
    }
    if let Ok(answer) = Answer::decode(data) {
        assert_eq!(Answer::decode(&answer.encode().unwrap()).unwrap(), answer);
    }
    if let Ok(replies) = decode_replies(data) {
        assert_eq!(
            decode_replies(&encode_replies(&replies).unwrap()).unwrap(),
            replies
        );
    }
});

//! Tests of the parser of the kernel's answers, with answers that are correct, truncated or
//! wrong.

#![allow(clippy::unwrap_used)]
use super::*;
use netlink_packet_core::NLM_F_CREATE;

/// Returns an answer with a message. It repeats the whole request, or only its header if `capped`.
fn answer(capped: bool) -> (u16, Vec<u8>) {
    let code = (-libc::EINVAL).to_ne_bytes();
    let request = request(1, NLM_F_ACK, 7, &[1, 2, 3, 4, 5, 6]);
    let repeated = if capped {
        &request[..HEADER_BYTES]
    } else {
        &request[..]
    };
    // An attribute of 11 bytes and type `MESSAGE`, followed by one byte of padding.
    let attribute = [&[11, 0, 1, 0][..], b"unwell\0", &[0]].concat();
    let flags = EXTENDED | if capped { CAPPED } else { 0 };
    (flags, [&code[..], repeated, &attribute].concat())
}

#[test]
fn an_answer_contains_the_kernels_message() {
    for capped in [false, true] {
        let (flags, payload) = answer(capped);
        let read = Answer::parse(flags, &payload).unwrap();
        assert_eq!(
            (read.code, read.message.as_deref()),
            (libc::EINVAL, Some("unwell"))
        );
        assert!(read.error().to_string().ends_with("(unwell)"));
    }
}

#[test]
fn truncated_and_invalid_answers_cause_no_panic() {
    for capped in [false, true] {
        let (flags, payload) = answer(capped);
        for length in 0..payload.len() {
            let read = Answer::parse(flags, &payload[..length]);
            assert_eq!(read.is_some(), length >= CODE_BYTES);
        }
        for at in 0..payload.len() {
            for value in [0, 1, 3, 0x7f, 0xff] {
                let mut payload = payload.clone();
                payload[at] = value;
                assert!(Answer::parse(flags, &payload).is_some());
            }
        }
    }
}

#[test]
fn an_error_names_the_request_that_failed() {
    let mut batch = NetlinkBatch::default();
    // The address is too short (RTM_NEWADDR).
    let (kind, flags) = (20, NLM_F_ACK | NLM_F_CREATE);
    batch.push("adding an address", kind, flags, &[0]);
    batch.push("adding another", kind, flags, &[0]);
    let error = batch.send(SockProtocol::NetlinkRoute).unwrap_err();
    assert!(
        error.to_string().starts_with("adding an address: "),
        "{error}"
    );
}

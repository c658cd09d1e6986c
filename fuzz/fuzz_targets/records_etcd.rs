#![no_main]
//! Responses of an etcd server, which may be hostile or broken.

use jiffy_fleet::records::decode_answer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| decode_answer(data));

//! Tests for outgoing requests of components and their bodies.

mod origin;

use super::Guest;
use super::component::{ComponentText, dispatch_by_letter};
use crate::support::TestTenant;
use jiffy_function_manager::egress::{EgressSettings, NameOverrides};
use jiffy_proto::function::{FunctionLimits, LoadSettings};
use origin::Origin;
use std::fs::File;
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Maximum time for which a lookup is delayed.
const MAX_LOOKUP: Duration = Duration::from_secs(20);

/// Functions of all handlers.
const FUNCTIONS: &str = "
    ;; Request to the server.
    (func $to (param $headers i32) (param $method i32) (param $at i32) (param $length i32)
      (result i32) (local $made i32)
      (local.set $made (call $request (local.get $headers)))
      (call $check (i32.eqz (call $set-method (local.get $made) (local.get $method)
        (i32.const 0) (i32.const 0))))
      (call $check (i32.eqz (call $set-scheme (local.get $made) (i32.const 1) (i32.const 0)
        (i32.const 0) (i32.const 0))))
      (call $check (i32.eqz (call $set-authority (local.get $made) (i32.const 1) {host})))
      (call $check (i32.eqz (call $set-path (local.get $made) (i32.const 1) (local.get $at)
        (local.get $length))))
      (local.get $made))
    (func $get (param $at i32) (param $length i32) (result i32)
      (call $to (call $fields) (i32.const 0) (local.get $at) (local.get $length)))
    ;; Sends a request. Returns the handle of its future response.
    (func $begin (param $request i32) (param $options i32) (result i32)
      (call $send (local.get $request) (i32.ne (local.get $options) (i32.const 0))
        (local.get $options) (global.get $R))
      (call $ok)
      (i32.load offset=8 (global.get $R)))
    ;; Checks that a request fails at once, with the case of a code.
    (func $refused (param $request i32) (param $code i32)
      (call $send (local.get $request) (i32.const 0) (i32.const 0) (global.get $R))
      (call $check (i32.load8_u (global.get $R)))
      (call $check (i32.eq (i32.load8_u offset=8 (global.get $R)) (local.get $code))))
    (func $wait (param $future i32)
      (call $block (call $future-ready (local.get $future)))
      (call $future-get (local.get $future) (global.get $R))
      (call $check (i32.load8_u (global.get $R)))
      (call $check (i32.eqz (i32.load8_u offset=8 (global.get $R)))))
    ;; Waits for a response.
    (func $response-of (param $future i32) (result i32)
      (call $wait (local.get $future))
      (call $check (i32.eqz (i32.load8_u offset=16 (global.get $R))))
      (i32.load offset=24 (global.get $R)))
    ;; Waits for a failure with the case of a code.
    (func $fails (param $future i32) (param $code i32)
      (call $wait (local.get $future))
      (call $check (i32.load8_u offset=16 (global.get $R)))
      (call $check (i32.eq (i32.load8_u offset=24 (global.get $R)) (local.get $code))))
    ;; Stream of a response's body.
    (func $input (param $response i32) (result i32)
      (call $incoming-consume (local.get $response) (global.get $R)) (call $ok)
      (call $stream (i32.load offset=4 (global.get $R)) (global.get $R)) (call $ok)
      (i32.load offset=4 (global.get $R)))
    ;; Answers with the rest of a stream.
    (func $pass (param $input i32) (local $made i32) (local $content i32) (local $output i32)
      (local.set $made (call $response (call $fields)))
      (call $body (local.get $made) (global.get $R)) (call $ok)
      (local.set $content (i32.load offset=4 (global.get $R)))
      (call $body-write (local.get $content) (global.get $R)) (call $ok)
      (local.set $output (i32.load offset=4 (global.get $R)))
      (call $set (global.get $outparam) (i32.const 0) (local.get $made) (i32.const 0)
        (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))
      (call $copy (local.get $input) (local.get $output))
      (call $drop-output (local.get $output))
      (call $finish (local.get $content) (i32.const 0) (i32.const 0) (global.get $R)))
    ;; Answers with the body of a response to a request.
    (func $fetch (param $request i32)
      (call $pass
        (call $input (call $response-of (call $begin (local.get $request) (i32.const 0))))))
    ;; Reads three bytes, and then a failure.
    (func $breaks (param $input i32)
      (call $read (local.get $input) (i64.const 10) (global.get $R)) (call $ok)
      (call $check (i32.eq (i32.load offset=8 (global.get $R)) (i32.const 3)))
      (call $read (local.get $input) (i64.const 10) (global.get $R))
      (call $check (i32.load8_u (global.get $R)))
      (call $check (i32.eqz (i32.load8_u offset=4 (global.get $R)))))
    ;; Headers that announce three bytes.
    (func $three-bytes (result i32) (local $made i32)
      (local.set $made (call $fields))
      (call $fields-append (local.get $made) {length} {three} (global.get $R)) (call $ok)
      (local.get $made))
    ;; Writes a body that is shorter or longer than the announced three bytes. A longer write
    ;; fails. The end of the body fails in both cases, with the written length.
    (func $misfit (param $at i32) (param $length i32)
      (local $made i32) (local $content i32) (local $output i32)
      (local.set $made (call $request (call $three-bytes)))
      (call $request-body (local.get $made) (global.get $R)) (call $ok)
      (local.set $content (i32.load offset=4 (global.get $R)))
      (call $body-write (local.get $content) (global.get $R)) (call $ok)
      (local.set $output (i32.load offset=4 (global.get $R)))
      (call $write (local.get $output) (local.get $at) (local.get $length) (global.get $R))
      (call $check (i32.eq (i32.load8_u (global.get $R))
        (i32.gt_u (local.get $length) (i32.const 3))))
      (call $drop-output (local.get $output))
      (call $finish (local.get $content) (i32.const 0) (i32.const 0) (global.get $R))
      (call $check (i32.load8_u (global.get $R)))
      (call $check (i32.eq (i32.load8_u offset=8 (global.get $R)) (i32.const 17)))
      (call $check (i32.eq (i32.load offset=24 (global.get $R)) (local.get $length))))";

/// Handlers by their letter. Error codes are compared by the number of their case in wasi:http: 2
/// destination-not-found, 8 connection-timeout, 9 connection-read-timeout, 17
/// HTTP-request-body-size, 19 HTTP-request-URI-invalid, 35 HTTP-protocol-error, and 38
/// internal-error.
const HANDLERS: [(char, &str); 17] = [
    ('g', "(call $fetch (call $get {query}))"),
    ('l', "(call $fetch (call $get {long}))"),
    (
        // The server returns the body of the request.
        'e',
        "(local.set $a (call $to (call $fields) (i32.const 2) {echo}))
         (call $request-body (local.get $a) (global.get $R)) (call $ok)
         (local.set $b (i32.load offset=4 (global.get $R)))
         (local.set $c (call $begin (local.get $a) (i32.const 0)))
         (call $body-write (local.get $b) (global.get $R)) (call $ok)
         (local.set $d (i32.load offset=4 (global.get $R)))
         (call $consume (local.get $in) (global.get $R)) (call $ok)
         (call $stream (i32.load offset=4 (global.get $R)) (global.get $R)) (call $ok)
         (call $copy (i32.load offset=4 (global.get $R)) (local.get $d))
         (call $drop-output (local.get $d))
         (call $finish (local.get $b) (i32.const 0) (i32.const 0) (global.get $R)) (call $ok)
         (call $pass (call $input (call $response-of (local.get $c))))",
    ),
    (
        // Two requests at once.
        'b',
        "(local.set $a (call $begin (call $get {query}) (i32.const 0)))
         (local.set $b (call $begin (call $get {long}) (i32.const 0)))
         (i32.store (i32.const 1280) (call $future-ready (local.get $a)))
         (i32.store (i32.const 1284) (call $future-ready (local.get $b)))
         (call $poll (i32.const 1280) (i32.const 2) (global.get $R))
         (call $check (i32.load offset=4 (global.get $R)))
         (local.set $a (call $response-of (local.get $a)))
         (local.set $b (call $response-of (local.get $b)))
         (call $check (i32.eq (call $incoming-status (local.get $a)) (i32.const 200)))
         (call $check (i32.eq (call $incoming-status (local.get $b)) (i32.const 200)))
         (call $done)",
    ),
    (
        // A port above the maximum.
        'i',
        "(local.set $a (call $get {query}))
         (call $check (i32.eqz (call $set-authority (local.get $a) (i32.const 1) {bad port})))
         (call $fails (call $begin (local.get $a) (i32.const 0)) (i32.const 19)) (call $done)",
    ),
    (
        // A name with a label that is too long.
        'x',
        "(local.set $a (call $get {query}))
         (call $check (i32.eqz (call $set-authority (local.get $a) (i32.const 1) {bad name})))
         (call $fails (call $begin (local.get $a) (i32.const 0)) (i32.const 2)) (call $done)",
    ),
    (
        // A scheme other than HTTP and HTTPS.
        'u',
        "(local.set $a (call $get {query}))
         (call $check (i32.eqz (call $set-scheme (local.get $a) (i32.const 1) (i32.const 2)
           {scheme})))
         (call $refused (local.get $a) (i32.const 35)) (call $done)",
    ),
    (
        // No path.
        'q',
        "(local.set $a (call $get {query}))
         (call $check (i32.eqz (call $set-path (local.get $a) (i32.const 0) (i32.const 0)
           (i32.const 0))))
         (call $refused (local.get $a) (i32.const 35)) (call $done)",
    ),
    (
        // A length without a body.
        'n',
        "(call $refused (call $to (call $three-bytes) (i32.const 2) {query}) (i32.const 17))
         (call $done)",
    ),
    ('k', "(call $misfit {three}) (call $done)"),
    ('m', "(call $misfit {query}) (call $done)"),
    (
        // Another request with the headers of a response that has two lengths.
        'd',
        "(local.set $a
           (call $response-of (call $begin (call $get {twice}) (i32.const 0))))
         (local.set $a (call $fields-clone (call $incoming-headers (local.get $a))))
         (call $refused (call $to (local.get $a) (i32.const 2) {query}) (i32.const 38))
         (call $done)",
    ),
    (
        // A server that uses another protocol.
        'h',
        "(call $fails (call $begin (call $get {other}) (i32.const 0)) (i32.const 35))
         (call $done)",
    ),
    (
        // Timeouts of the first byte, and between bytes, in nanoseconds.
        's',
        "(local.set $a (call $options))
         (call $check (i32.eqz (call $set-first-byte (local.get $a) (i32.const 1)
           (i64.const 100000000))))
         (call $fails (call $begin (call $get {silent}) (local.get $a)) (i32.const 9))
         (local.set $a (call $options))
         (call $check (i32.eqz (call $set-between-bytes (local.get $a) (i32.const 1)
           (i64.const 100000000))))
         (call $breaks (call $input (call $response-of
           (call $begin (call $get {partial}) (local.get $a)))))
         (call $done)",
    ),
    (
        // Timeout of connecting, during the lookup of a name.
        't',
        "(local.set $a (call $options))
         (call $check (i32.eqz (call $set-connect (local.get $a) (i32.const 1)
           (i64.const 100000000))))
         (local.set $b (call $get {query}))
         (call $check (i32.eqz (call $set-authority (local.get $b) (i32.const 1) {slow})))
         (call $fails (call $begin (local.get $b) (local.get $a)) (i32.const 8)) (call $done)",
    ),
    (
        // A truncated body.
        'c',
        "(call $breaks (call $input (call $response-of
           (call $begin (call $get {cut}) (i32.const 0)))))
         (call $done)",
    ),
    (
        // Messages with half a body that are dropped, and a request in flight.
        'r',
        "(local.set $a (call $get {query}))
         (call $request-body (local.get $a) (global.get $R)) (call $ok)
         (local.set $b (i32.load offset=4 (global.get $R)))
         (call $body-write (local.get $b) (global.get $R)) (call $ok)
         (local.set $c (i32.load offset=4 (global.get $R)))
         (call $write (local.get $c) {query} (global.get $R)) (call $ok)
         (call $drop-output (local.get $c))
         (call $drop-body (local.get $b))
         (call $drop-request (local.get $a))
         (local.set $a (call $response (call $fields)))
         (call $body (local.get $a) (global.get $R)) (call $ok)
         (local.set $b (i32.load offset=4 (global.get $R)))
         (call $drop-body (local.get $b))
         (call $drop-response (local.get $a))
         (call $drop-future (call $begin (call $get {silent}) (i32.const 0)))
         (call $done)",
    ),
];

/// Resolver whose lookups wait until the test continues.
#[derive(Debug)]
struct SlowNames(Mutex<Receiver<()>>);

impl NameOverrides for SlowNames {
    fn addresses(&self, _: &str) -> Option<Vec<IpAddr>> {
        // The test may have failed in the meantime.
        let _ = self.0.lock().unwrap().recv_timeout(MAX_LOOKUP);
        Some(Vec::new())
    }
}

/// Guest that may reach one server.
struct OutgoingGuest {
    guest: Guest,
    origin: Origin,
    /// Lets a lookup continue.
    go_on: Sender<()>,
}

impl OutgoingGuest {
    fn new() -> Self {
        let origin = Origin::start();
        let host = origin.address.to_string();
        let (go_on, waiting) = channel();
        let mut tenant = TestTenant::start();
        tenant.process.set_egress(EgressSettings {
            granted: vec!["127.0.0.0/8".parse().unwrap()],
            names: Some(Arc::new(SlowNames(Mutex::new(waiting)))),
            ..EgressSettings::default()
        });
        let (long, bad_name) = ("/".repeat(2000), "a".repeat(64) + ".long.test");
        let texts = [
            ("host", host.as_str()),
            ("query", "/a/b?c=d%20e"),
            ("long", long.as_str()),
            ("echo", "/echo"),
            ("twice", "/twice"),
            ("other", "/other"),
            ("silent", "/silent"),
            ("partial", "/partial"),
            ("cut", "/cut"),
            ("length", "content-length"),
            ("three", "3"),
            ("scheme", "ftp"),
            ("slow", "slow.test"),
            ("bad port", "127.0.0.1:99999"),
            ("bad name", bad_name.as_str()),
        ];
        let text = ComponentText {
            texts: &texts,
            functions: FUNCTIONS,
            handler: &dispatch_by_letter(&HANDLERS),
            more: "",
        };
        let settings = LoadSettings {
            limits: FunctionLimits {
                cpu_ms: 5000,
                ..FunctionLimits::default()
            },
            allow: vec![
                host.clone(),
                "slow.test".to_owned(),
                "*.long.test".to_owned(),
            ],
            ..LoadSettings::default()
        };
        let compiled = tenant.compile(&text.build()).unwrap();
        let file = File::open(&compiled.0).unwrap();
        let loaded = tenant.process.load("f", &file, &compiled.1, settings);
        loaded.unwrap();
        Self {
            guest: Guest(tenant),
            origin,
            go_on,
        }
    }

    fn pass(&self, letters: &str) {
        for letter in letters.chars() {
            let answer = self.guest.get(&format!("/{letter}"));
            let log = || self.guest.log();
            assert_eq!(answer.body, b"ok", "{letter}: {answer:?} {}", log());
        }
    }
}

#[test]
fn a_body_is_sent_to_another_host_and_returned() {
    let outgoing = OutgoingGuest::new();
    let body: Vec<_> = (0..1u32 << 20).map(|n| (n * 251 % 256) as u8).collect();
    let answer = outgoing.guest.0.connect().request("POST", "f", "/e", &body);
    assert_eq!(answer.status, 200);
    assert!(answer.body == body, "{} bytes", answer.body.len());
    let heads = outgoing.origin.heads();
    assert_eq!(heads.len(), 1, "{heads:?}");
    assert!(heads[0].starts_with("POST /echo HTTP/1.1\r\n"), "{heads:?}");
}

#[test]
fn outgoing_requests_have_the_specified_targets() {
    let outgoing = OutgoingGuest::new();
    let host = outgoing.origin.address.to_string();
    let answer = outgoing.guest.get("/g");
    assert_eq!(answer.text(), "GET /a/b?c=d%20e");
    let answer = outgoing.guest.get("/l");
    assert_eq!(answer.text(), format!("GET {}", "/".repeat(2000)));
    outgoing.pass("b");
    let heads = outgoing.origin.heads();
    // One request of `g`, one of `l`, and two of `b`.
    assert_eq!(heads.len(), 4);
    for head in heads {
        let mut lines = head.lines();
        assert!(lines.any(|line| line == format!("host: {host}")), "{head}");
    }
}

#[test]
fn invalid_outgoing_requests_are_rejected_with_their_code() {
    let outgoing = OutgoingGuest::new();
    outgoing.pass("ixuqnkmdh");
    let heads = outgoing.origin.heads();
    // Only the handlers `d` and `h` send requests to the server.
    let paths: Vec<_> = heads.iter().map(|head| head.split(' ').nth(1)).collect();
    assert_eq!(paths, [Some("/twice"), Some("/other")]);
}

#[test]
fn slow_and_truncated_responses_fail() {
    let outgoing = OutgoingGuest::new();
    outgoing.pass("sct");
    // The lookup of the last request, which has failed by its timeout, may end.
    outgoing.go_on.send(()).unwrap();
}

#[test]
fn dropped_incomplete_messages_have_no_effect() {
    let outgoing = OutgoingGuest::new();
    // The second request shows that the first one has left nothing behind.
    outgoing.pass("rr");
    outgoing
        .guest
        .0
        .wait_for("f", |metrics| metrics.running == 0);
    assert_eq!(outgoing.guest.0.metrics("f").faults.len(), 0);
}

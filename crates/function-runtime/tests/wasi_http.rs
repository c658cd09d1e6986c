//! Tests for the behaviour of `wasi:http/types`, function by function, as specified by its
//! interface.
//!
//! Handlers are WebAssembly text. `$R` is the address of results:
//! - A result, option or variant has the number of its case in byte 0, and its payload from byte 4
//!   or 8 on (an error of headers: in byte 1). Case 0 of a result is success, case 1 an error.
//!   Case 0 of an option is `none`.
//! - A list or string has its address in the first word and its length in the second.
//! - Errors of headers are 0 (invalid syntax), 1 (forbidden) and 2 (immutable).
//!
//! `$check` requires a value other than 0. Lists that a handler creates are at address 1280.
#![allow(clippy::unwrap_used)]

mod component;
mod limits;
mod outgoing;

use crate::support::{TestClient, TestResponse, TestTenant};
use component::component;
use jiffy_proto::function::FunctionLimits;

/// Tenant with one component as the function `f`.
struct Guest(TestTenant);

impl Guest {
    fn new(texts: &[(&str, &str)], handler: &str) -> Self {
        let tenant = TestTenant::start();
        tenant.deploy("f", &component(texts, handler), FunctionLimits::default());
        Self(tenant)
    }

    fn get(&self, path: &str) -> TestResponse {
        self.0.connect().get("f", path)
    }

    /// Returns the texts of the function's log.
    fn log(&self) -> String {
        let entries = self.0.logs("f", 0).into_iter();
        entries.map(|entry| entry.text).collect()
    }

    /// Sends a request to a handler that ends in `$done`.
    fn assert_answers_ok(&self) {
        let answer = self.get("/");
        assert_eq!((answer.status, answer.text()), (200, "ok"), "{answer:?}");
    }
}

/// Sends a request with additional headers.
fn send(client: &mut TestClient, method: &str, headers: &str, body: &[u8]) -> TestResponse {
    let length = body.len();
    let head = format!(
        "{method} / HTTP/1.1\r\nhost: f\r\njiffy-function: f\r\n{headers}\
         content-length: {length}\r\n\r\n"
    );
    client.send(&[head.as_bytes(), body].concat());
    client.response().unwrap()
}

#[test]
fn each_method_of_a_request_is_its_case() {
    // The status is 220 plus the number of the case. Case 9 is another method, with its name.
    let guest = Guest::new(
        &[],
        "(call $method (local.get $in) (global.get $R))
         (local.set $a (call $response (call $fields)))
         (call $check (i32.eqz (call $set-status (local.get $a)
           (i32.add (i32.const 220) (i32.load8_u (global.get $R))))))
         (call $answer (local.get $a) (i32.load offset=4 (global.get $R))
           (select (i32.load offset=8 (global.get $R)) (i32.const 0)
             (i32.eq (i32.load8_u (global.get $R)) (i32.const 9))))",
    );
    let methods = [
        ("GET", 0),
        ("POST", 2),
        ("PUT", 3),
        ("DELETE", 4),
        ("OPTIONS", 6),
        ("TRACE", 7),
        ("PATCH", 8),
        ("PURGE", 9),
        ("get", 9),
    ];
    let mut client = guest.0.connect();
    for (method, case) in methods {
        let answer = send(&mut client, method, "", b"");
        assert_eq!(answer.status, 220 + case, "{method}: {answer:?}");
        let other = if case == 9 { method } else { "" };
        assert_eq!(answer.text(), other);
    }
    // HEAD is case 1. No body follows, so only the head of the response is read.
    client.send(b"HEAD / HTTP/1.1\r\nhost: f\r\njiffy-function: f\r\nconnection: close\r\n\r\n");
    assert_eq!(client.status(), 221);
}

#[test]
fn scheme_authority_and_path_are_those_of_the_request() {
    // The handler checks that the scheme is case 0 (HTTP) and that the authority is `f`, which has
    // one byte (102 in ASCII). It answers with the path.
    let guest = Guest::new(
        &[("own", "jiffy-function")],
        "(call $scheme (local.get $in) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $check (i32.eqz (i32.load8_u offset=4 (global.get $R))))
         (call $authority (local.get $in) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $check (i32.eq (i32.load offset=8 (global.get $R)) (i32.const 1)))
         (call $check
           (i32.eq (i32.load8_u (i32.load offset=4 (global.get $R))) (i32.const 102)))
         (call $check (i32.eqz (call $fields-has (call $headers (local.get $in)) {own})))
         (call $path (local.get $in) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $answer (call $response (call $fields))
           (i32.load offset=4 (global.get $R)) (i32.load offset=8 (global.get $R)))",
    );
    for path in ["/", "/a/b?c=d%20e&f", "/%2e%2e/x?", "//x"] {
        assert_eq!(guest.get(path).text(), path);
    }
}

#[test]
fn headers_of_a_request_are_read_by_any_case_and_cannot_be_changed() {
    // The two values are `1` and `2` (49 and 50 in ASCII). A clone of the headers can be changed
    // and then has three values.
    let guest = Guest::new(
        &[("many", "X-MANY"), ("absent", "x-absent"), ("value", "v")],
        "(local.set $a (call $headers (local.get $in)))
         (call $fields-get (local.get $a) {many} (global.get $R))
         (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 2)))
         (local.set $b (i32.load (global.get $R)))
         (call $check (i32.eq (i32.load8_u (i32.load (local.get $b))) (i32.const 49)))
         (call $check (i32.eq (i32.load8_u (i32.load offset=8 (local.get $b))) (i32.const 50)))
         (call $check (call $fields-has (local.get $a) {many}))
         (call $check (i32.eqz (call $fields-has (local.get $a) {absent})))
         (call $fields-get (local.get $a) {absent} (global.get $R))
         (call $check (i32.eqz (i32.load offset=4 (global.get $R))))
         (call $fields-append (local.get $a) {many} {value} (global.get $R))
         (call $error (i32.const 2))
         (call $fields-set (local.get $a) {many} (i32.const 0) (i32.const 0) (global.get $R))
         (call $error (i32.const 2))
         (call $fields-delete (local.get $a) {many} (global.get $R))
         (call $error (i32.const 2))
         (local.set $c (call $fields-clone (local.get $a)))
         (call $fields-append (local.get $c) {many} {value} (global.get $R))
         (call $ok)
         (call $fields-get (local.get $c) {many} (global.get $R))
         (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 3)))
         (call $fields-get (local.get $a) {many} (global.get $R))
         (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 2)))
         (call $done)",
    );
    let many = "x-many: 1\r\nX-Many: 2\r\n";
    let answer = send(&mut guest.0.connect(), "GET", many, b"");
    assert_eq!(answer.text(), "ok");
}

#[test]
fn fields_are_appended_set_deleted_and_listed() {
    // After `$fields-set`, the only entry has a name of three bytes and the value `3` (51 in
    // ASCII).
    Guest::new(
        &[("name", "x-a"), ("one", "1"), ("two", "2"), ("three", "3")],
        "(local.set $a (call $fields))
         (call $fields-append (local.get $a) {name} {one} (global.get $R)) (call $ok)
         (call $fields-append (local.get $a) {name} {two} (global.get $R)) (call $ok)
         (call $fields-get (local.get $a) {name} (global.get $R))
         (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 2)))
         (i32.store (i32.const 1280) {@three})
         (i32.store (i32.const 1284) (i32.const 1))
         (call $fields-set (local.get $a) {name} (i32.const 1280) (i32.const 1)
           (global.get $R)) (call $ok)
         (call $fields-entries (local.get $a) (global.get $R))
         (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 1)))
         (local.set $b (i32.load (global.get $R)))
         (call $check (i32.eq (i32.load offset=4 (local.get $b)) (i32.const 3)))
         (call $check (i32.eq (i32.load8_u (i32.load offset=8 (local.get $b))) (i32.const 51)))
         (call $fields-delete (local.get $a) {name} (global.get $R)) (call $ok)
         (call $check (i32.eqz (call $fields-has (local.get $a) {name})))
         ;; Two entries with the same name.
         (i32.store (i32.const 1280) {@name}) (i32.store (i32.const 1284) (i32.const 3))
         (i32.store (i32.const 1288) {@one}) (i32.store (i32.const 1292) (i32.const 1))
         (i32.store (i32.const 1296) {@name}) (i32.store (i32.const 1300) (i32.const 3))
         (i32.store (i32.const 1304) {@two}) (i32.store (i32.const 1308) (i32.const 1))
         (call $fields-from-list (i32.const 1280) (i32.const 2) (global.get $R)) (call $ok)
         (local.set $a (i32.load offset=4 (global.get $R)))
         (call $fields-get (local.get $a) {name} (global.get $R))
         (call $check (i32.eq (i32.load offset=4 (global.get $R)) (i32.const 2)))
         (call $done)",
    )
    .assert_answers_ok();
}

#[test]
fn fields_with_invalid_syntax_or_a_forbidden_name_are_rejected() {
    let forbidden = [
        "connection",
        "Keep-Alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "transfer-encoding",
        "upgrade",
        "Host",
        "http2-settings",
    ];
    let names: Vec<_> = (0..forbidden.len()).map(|n| format!("f{n}")).collect();
    let mut texts = vec![
        ("good", "x-a"),
        ("value", "v"),
        ("space", "x a"),
        ("empty", ""),
        ("colon", "x:"),
        ("lines", "a\nb"),
        ("zero", "a\0b"),
    ];
    texts.extend(names.iter().map(String::as_str).zip(forbidden));
    let append = |name: &str, value: &str, error: u32| {
        format!(
            "(call $fields-append (local.get $a) {{{name}}} {{{value}}} (global.get $R))
             (call $error (i32.const {error}))\n"
        )
    };
    let mut handler = "(local.set $a (call $fields))\n".to_owned();
    for (name, value) in [
        ("space", "value"),
        ("empty", "value"),
        ("colon", "value"),
        ("good", "lines"),
        ("good", "zero"),
    ] {
        handler += &append(name, value, 0);
    }
    for name in &names {
        handler += &append(name, "value", 1);
    }
    // A list with a forbidden name (`connection` has ten bytes) is rejected as well.
    handler += "(i32.store (i32.const 1280) {@f0}) (i32.store (i32.const 1284) (i32.const 10))
         (i32.store (i32.const 1288) {@value}) (i32.store (i32.const 1292) (i32.const 1))
         (call $fields-from-list (i32.const 1280) (i32.const 1) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $check (i32.eq (i32.load8_u offset=4 (global.get $R)) (i32.const 1)))
         (call $fields-entries (local.get $a) (global.get $R))
         (call $check (i32.eqz (i32.load offset=4 (global.get $R))))
         (call $done)";
    Guest::new(&texts, &handler).assert_answers_ok();
}

/// Consumes the request's body to `$a`, and opens its stream as `$b`.
const CONSUME: &str = "(call $consume (local.get $in) (global.get $R)) (call $ok)
     (local.set $a (i32.load offset=4 (global.get $R)))
     (call $stream (local.get $a) (global.get $R)) (call $ok)
     (local.set $b (i32.load offset=4 (global.get $R)))\n";

#[test]
fn a_body_is_read_to_its_end_and_can_be_taken_once() {
    // A second `$consume` and a second `$stream` fail. The trailers are available (byte 0), without
    // an error (bytes 8 and 16), and are `none` (byte 24). The handler answers with the body.
    let guest = Guest::new(
        &[],
        &format!(
            "{CONSUME}
         (call $consume (local.get $in) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $stream (local.get $a) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (block $end (loop $next
           (call $read (local.get $b) (i64.const 65536) (global.get $R))
           (if (i32.load8_u (global.get $R)) (then
             (call $check (i32.eq (i32.load8_u offset=4 (global.get $R)) (i32.const 1)))
             (br $end)))
           ;; The blocks read are stored consecutively.
           (if (i32.eqz (local.get $c)) (then (local.set $c (i32.load offset=4 (global.get $R)))))
           (i32.store (i32.const 1280)
             (i32.add (i32.load (i32.const 1280)) (i32.load offset=8 (global.get $R))))
           (br $next)))
         (call $drop-input (local.get $b))
         (local.set $b (call $finish-incoming (local.get $a)))
         (call $block (call $trailers-ready (local.get $b)))
         (call $trailers (local.get $b) (global.get $R))
         (call $check (i32.load8_u (global.get $R)))
         (call $check (i32.eqz (i32.load8_u offset=8 (global.get $R))))
         (call $check (i32.eqz (i32.load8_u offset=16 (global.get $R))))
         (call $check (i32.eqz (i32.load8_u offset=24 (global.get $R))))
         (call $answer (call $response (call $fields)) (local.get $c)
           (select (i32.load (i32.const 1280)) (i32.const 0) (local.get $c)))"
        ),
    );
    let mut client = guest.0.connect();
    for body in ["", "a", "some bytes"] {
        let answer = send(&mut client, "POST", "", body.as_bytes());
        assert_eq!(answer.text(), body, "{}", guest.log());
    }
    // In chunks, with a trailer, which the handler does not receive.
    client.send(
        b"POST / HTTP/1.1\r\nhost: f\r\njiffy-function: f\r\ntransfer-encoding: chunked\r\n\
          trailer: x-t\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nx-t: 1\r\n\r\n",
    );
    assert_eq!(client.response().unwrap().text(), "abcde");
}

#[test]
fn a_response_has_its_status_and_headers_and_one_body() {
    // `$set-status` returns 0 for success. 99 and 1000 are not valid as a status.
    let guest = Guest::new(
        &[
            ("name", "x-answer"),
            ("one", "1"),
            ("two", "2"),
            ("text", "made"),
        ],
        "(local.set $b (call $fields))
         (call $fields-append (local.get $b) {name} {one} (global.get $R)) (call $ok)
         (call $fields-append (local.get $b) {name} {two} (global.get $R)) (call $ok)
         (local.set $a (call $response (local.get $b)))
         (call $check (i32.eq (call $status (local.get $a)) (i32.const 200)))
         (call $check (call $set-status (local.get $a) (i32.const 99)))
         (call $check (call $set-status (local.get $a) (i32.const 1000)))
         (call $check (i32.eqz (call $set-status (local.get $a) (i32.const 201))))
         (call $check (i32.eq (call $status (local.get $a)) (i32.const 201)))
         (local.set $b (call $response-headers (local.get $a)))
         (call $fields-append (local.get $b) {name} {one} (global.get $R))
         (call $error (i32.const 2))
         (call $answer (local.get $a) {text})",
    );
    let answer = guest.get("/");
    assert_eq!((answer.status, answer.text()), (201, "made"));
    let sent = answer.head.lines().filter(|l| l.starts_with("x-answer: "));
    assert_eq!(sent.collect::<Vec<_>>(), ["x-answer: 1", "x-answer: 2"]);

    let twice = "(local.set $a (call $response (call $fields)))
         (call $body (local.get $a) (global.get $R)) (call $ok)
         (local.set $b (i32.load offset=4 (global.get $R)))
         (call $body (local.get $a) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $body-write (local.get $b) (global.get $R)) (call $ok)
         (call $body-write (local.get $b) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $done)";
    Guest::new(&[], twice).assert_answers_ok();
}

/// Handler that announces a body of three bytes and writes `{text}`.
const PROMISE: &str = "(local.set $b (call $fields))
     (call $fields-append (local.get $b) {length} {three} (global.get $R)) (call $ok)
     (local.set $a (call $response (local.get $b)))
     (call $body (local.get $a) (global.get $R)) (call $ok)
     (local.set $b (i32.load offset=4 (global.get $R)))
     (call $body-write (local.get $b) (global.get $R)) (call $ok)
     (local.set $c (i32.load offset=4 (global.get $R)))
     (call $set (local.get $out) (i32.const 0) (local.get $a) (i32.const 0)
       (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))
     (call $write (local.get $c) {text} (global.get $R))
     (call $drop-output (local.get $c))
     (call $finish (local.get $b) (i32.const 0) (i32.const 0) (global.get $R))\n";

#[test]
fn a_body_shorter_than_its_length_is_incomplete_and_a_longer_one_is_cut() {
    for (text, expected) in [("abc", Some("abc")), ("ab", None), ("abcd", Some("abc"))] {
        let texts = [("length", "content-length"), ("three", "3"), ("text", text)];
        let guest = Guest::new(&texts, PROMISE);
        let mut client = guest.0.connect();
        client.send(b"GET / HTTP/1.1\r\nhost: f\r\njiffy-function: f\r\n\r\n");
        let answer = client.response();
        let body = answer.as_ref().map(TestResponse::text);
        assert_eq!(body, expected, "{text}: {answer:?}");
    }
}

#[test]
fn a_response_without_a_body_is_complete_whatever_its_header_says() {
    let guest = Guest::new(
        &[("length", "content-length"), ("three", "3")],
        "(local.set $b (call $fields))
         (call $fields-append (local.get $b) {length} {three} (global.get $R)) (call $ok)
         (call $set (local.get $out) (i32.const 0) (call $response (local.get $b)) (i32.const 0)
           (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))",
    );
    let mut client = guest.0.connect();
    for _ in 0..2 {
        let answer = client.get("f", "/");
        assert_eq!((answer.status, answer.text()), (200, ""));
    }
}

#[test]
fn a_body_ends_with_trailers() {
    // `$finish` has the option 1 (`some`) with the trailers. Byte 0 of its result is 0 for success.
    Guest::new(
        &[("name", "x-t"), ("one", "1"), ("text", "ok")],
        "(local.set $a (call $response (call $fields)))
         (call $body (local.get $a) (global.get $R)) (call $ok)
         (local.set $b (i32.load offset=4 (global.get $R)))
         (call $body-write (local.get $b) (global.get $R)) (call $ok)
         (local.set $c (i32.load offset=4 (global.get $R)))
         (call $set (local.get $out) (i32.const 0) (local.get $a) (i32.const 0)
           (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))
         (call $write (local.get $c) {text} (global.get $R))
         (call $drop-output (local.get $c))
         (local.set $c (call $fields))
         (call $fields-append (local.get $c) {name} {one} (global.get $R))
         (call $finish (local.get $b) (i32.const 1) (local.get $c) (global.get $R))
         (if (i32.load8_u (global.get $R)) (then (unreachable)))",
    )
    .assert_answers_ok();
}

#[test]
fn a_guest_that_returns_an_error_code_is_a_failure() {
    // Case 36 of the error codes of wasi:http is `loop-detected`.
    let handler = "(call $set (local.get $out) (i32.const 1) (i32.const 36) (i32.const 0)
       (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))";
    let answer = Guest::new(&[], handler).get("/");
    assert_eq!(answer.fault(), (502, "function_trap".to_owned()));
}

#[test]
fn parts_of_an_outgoing_request_are_checked_and_its_headers_are_fixed() {
    // Methods are 0 (`GET`), 3 (`PUT`) and 9 (another, with its name). Schemes are 1 (HTTPS) and 2
    // (another, with its name). Functions that set a part return 0 for success.
    Guest::new(
        &[
            ("name", "x-a"),
            ("bad method", "A B"),
            ("own method", "PURGE"),
            ("host", "example.com:80"),
            ("bad host", "exa mple"),
            ("path", "/a?b"),
            ("bad path", "/a b"),
            ("scheme", "ftp"),
        ],
        "(local.set $a (call $request (call $fields)))
         (call $get-method (local.get $a) (global.get $R))
         (call $check (i32.eqz (i32.load8_u (global.get $R))))
         (call $check (call $set-method (local.get $a) (i32.const 9) {bad method}))
         (call $check (i32.eqz (call $set-method (local.get $a) (i32.const 3)
           (i32.const 0) (i32.const 0))))
         (call $get-method (local.get $a) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 3)))
         (call $check (i32.eqz (call $set-method (local.get $a) (i32.const 9) {own method})))
         (call $get-method (local.get $a) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 9)))
         (call $check (i32.eq (i32.load offset=8 (global.get $R)) (i32.const 5)))
         (call $check (i32.eqz (call $set-authority (local.get $a) (i32.const 1) {host})))
         (call $check (call $set-authority (local.get $a) (i32.const 1) {bad host}))
         (call $check (i32.eqz (call $set-path (local.get $a) (i32.const 1) {path})))
         (call $check (call $set-path (local.get $a) (i32.const 1) {bad path}))
         (call $check (i32.eqz (call $set-path (local.get $a) (i32.const 0)
           (i32.const 0) (i32.const 0))))
         (call $check (i32.eqz (call $set-scheme (local.get $a) (i32.const 1) (i32.const 1)
           (i32.const 0) (i32.const 0))))
         (call $check (i32.eqz (call $set-scheme (local.get $a) (i32.const 1) (i32.const 2)
           {scheme})))
         (local.set $b (call $request-headers (local.get $a)))
         (call $fields-append (local.get $b) {name} {name} (global.get $R))
         (call $error (i32.const 2))
         (call $request-body (local.get $a) (global.get $R)) (call $ok)
         (call $request-body (local.get $a) (global.get $R))
         (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
         (call $done)",
    )
    .assert_answers_ok();
}

#[test]
fn timeouts_of_an_outgoing_request_are_absent_until_they_are_set() {
    // Each timeout is absent, then set, and then removed by the option 0 (`none`).
    let mut handler = "(local.set $a (call $options))\n".to_owned();
    for (name, value) in [
        ("connect", 1u64),
        ("first-byte", 1u64 << 40),
        ("between-bytes", 7u64),
    ] {
        handler += &format!(
            "(call ${name} (local.get $a) (global.get $R))
             (call $check (i32.eqz (i32.load8_u (global.get $R))))
             (call $check (i32.eqz
               (call $set-{name} (local.get $a) (i32.const 1) (i64.const {value}))))
             (call ${name} (local.get $a) (global.get $R))
             (call $check (i32.load8_u (global.get $R)))
             (call $check (i64.eq (i64.load offset=8 (global.get $R)) (i64.const {value})))
             (call $check (i32.eqz
               (call $set-{name} (local.get $a) (i32.const 0) (i64.const 0))))
             (call ${name} (local.get $a) (global.get $R))
             (call $check (i32.eqz (i32.load8_u (global.get $R))))\n"
        );
    }
    Guest::new(&[], &format!("{handler}(call $done)")).assert_answers_ok();
}

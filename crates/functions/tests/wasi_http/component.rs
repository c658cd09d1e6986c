//! Components of wasi:http whose handler is a piece of WebAssembly text with all functions of
//! `wasi:http/types` at hand.
//!
//! Handlers keep strings in a first region of memory (`$text`), get results at `$R` and further
//! areas of 64 bytes, and what the host allocates above. Handles are plain numbers.

use std::fmt::Write;

/// Function of the interface: name for handlers, name, component's type, core type.
type Function = (&'static str, &'static str, &'static str, &'static str);

/// Functions of `wasi:http/types`.
fn functions() -> Vec<Function> {
    vec![
        (
            "fields",
            "[constructor]fields",
            "(result (own $fields))",
            "(result i32)",
        ),
        (
            "fields-from-list",
            "[static]fields.from-list",
            "(param \"entries\" (list (tuple string (list u8)))) \
             (result (result (own $fields) (error $header-error)))",
            "(param i32 i32 i32)",
        ),
        (
            "fields-get",
            "[method]fields.get",
            "(param \"self\" (borrow $fields)) (param \"name\" string) \
             (result (list (list u8)))",
            "(param i32 i32 i32 i32)",
        ),
        (
            "fields-has",
            "[method]fields.has",
            "(param \"self\" (borrow $fields)) (param \"name\" string) (result bool)",
            "(param i32 i32 i32) (result i32)",
        ),
        (
            "fields-set",
            "[method]fields.set",
            "(param \"self\" (borrow $fields)) (param \"name\" string) \
             (param \"value\" (list (list u8))) (result (result (error $header-error)))",
            "(param i32 i32 i32 i32 i32 i32)",
        ),
        (
            "fields-delete",
            "[method]fields.delete",
            "(param \"self\" (borrow $fields)) (param \"name\" string) \
             (result (result (error $header-error)))",
            "(param i32 i32 i32 i32)",
        ),
        (
            "fields-append",
            "[method]fields.append",
            "(param \"self\" (borrow $fields)) (param \"name\" string) \
             (param \"value\" (list u8)) (result (result (error $header-error)))",
            "(param i32 i32 i32 i32 i32 i32)",
        ),
        (
            "fields-entries",
            "[method]fields.entries",
            "(param \"self\" (borrow $fields)) (result (list (tuple string (list u8))))",
            "(param i32 i32)",
        ),
        (
            "fields-clone",
            "[method]fields.clone",
            "(param \"self\" (borrow $fields)) (result (own $fields))",
            "(param i32) (result i32)",
        ),
        (
            "method",
            "[method]incoming-request.method",
            "(param \"self\" (borrow $request)) (result $method)",
            "(param i32 i32)",
        ),
        (
            "path",
            "[method]incoming-request.path-with-query",
            "(param \"self\" (borrow $request)) (result (option string))",
            "(param i32 i32)",
        ),
        (
            "scheme",
            "[method]incoming-request.scheme",
            "(param \"self\" (borrow $request)) (result (option $scheme))",
            "(param i32 i32)",
        ),
        (
            "authority",
            "[method]incoming-request.authority",
            "(param \"self\" (borrow $request)) (result (option string))",
            "(param i32 i32)",
        ),
        (
            "headers",
            "[method]incoming-request.headers",
            "(param \"self\" (borrow $request)) (result (own $fields))",
            "(param i32) (result i32)",
        ),
        (
            "consume",
            "[method]incoming-request.consume",
            "(param \"self\" (borrow $request)) (result (result (own $incoming-body)))",
            "(param i32 i32)",
        ),
        (
            "stream",
            "[method]incoming-body.stream",
            "(param \"self\" (borrow $incoming-body)) (result (result (own $input)))",
            "(param i32 i32)",
        ),
        (
            "finish-incoming",
            "[static]incoming-body.finish",
            "(param \"this\" (own $incoming-body)) (result (own $future-trailers))",
            "(param i32) (result i32)",
        ),
        (
            "trailers-ready",
            "[method]future-trailers.subscribe",
            "(param \"self\" (borrow $future-trailers)) (result (own $pollable))",
            "(param i32) (result i32)",
        ),
        (
            "trailers",
            "[method]future-trailers.get",
            "(param \"self\" (borrow $future-trailers)) \
             (result (option (result (result (option (own $fields)) (error $code)))))",
            "(param i32 i32)",
        ),
        (
            "request",
            "[constructor]outgoing-request",
            "(param \"headers\" (own $fields)) (result (own $elsewhere))",
            "(param i32) (result i32)",
        ),
        (
            "request-body",
            "[method]outgoing-request.body",
            "(param \"self\" (borrow $elsewhere)) (result (result (own $body)))",
            "(param i32 i32)",
        ),
        (
            "set-method",
            "[method]outgoing-request.set-method",
            "(param \"self\" (borrow $elsewhere)) (param \"method\" $method) (result (result))",
            "(param i32 i32 i32 i32) (result i32)",
        ),
        (
            "get-method",
            "[method]outgoing-request.method",
            "(param \"self\" (borrow $elsewhere)) (result $method)",
            "(param i32 i32)",
        ),
        (
            "set-path",
            "[method]outgoing-request.set-path-with-query",
            "(param \"self\" (borrow $elsewhere)) (param \"path-with-query\" (option string)) \
             (result (result))",
            "(param i32 i32 i32 i32) (result i32)",
        ),
        (
            "set-scheme",
            "[method]outgoing-request.set-scheme",
            "(param \"self\" (borrow $elsewhere)) (param \"scheme\" (option $scheme)) \
             (result (result))",
            "(param i32 i32 i32 i32 i32) (result i32)",
        ),
        (
            "set-authority",
            "[method]outgoing-request.set-authority",
            "(param \"self\" (borrow $elsewhere)) (param \"authority\" (option string)) \
             (result (result))",
            "(param i32 i32 i32 i32) (result i32)",
        ),
        (
            "request-headers",
            "[method]outgoing-request.headers",
            "(param \"self\" (borrow $elsewhere)) (result (own $fields))",
            "(param i32) (result i32)",
        ),
        (
            "options",
            "[constructor]request-options",
            "(result (own $options))",
            "(result i32)",
        ),
        (
            "set-connect",
            "[method]request-options.set-connect-timeout",
            "(param \"self\" (borrow $options)) (param \"duration\" (option u64)) \
             (result (result))",
            "(param i32 i32 i64) (result i32)",
        ),
        (
            "connect",
            "[method]request-options.connect-timeout",
            "(param \"self\" (borrow $options)) (result (option u64))",
            "(param i32 i32)",
        ),
        (
            "set-first-byte",
            "[method]request-options.set-first-byte-timeout",
            "(param \"self\" (borrow $options)) (param \"duration\" (option u64)) \
             (result (result))",
            "(param i32 i32 i64) (result i32)",
        ),
        (
            "first-byte",
            "[method]request-options.first-byte-timeout",
            "(param \"self\" (borrow $options)) (result (option u64))",
            "(param i32 i32)",
        ),
        (
            "set-between-bytes",
            "[method]request-options.set-between-bytes-timeout",
            "(param \"self\" (borrow $options)) (param \"duration\" (option u64)) \
             (result (result))",
            "(param i32 i32 i64) (result i32)",
        ),
        (
            "between-bytes",
            "[method]request-options.between-bytes-timeout",
            "(param \"self\" (borrow $options)) (result (option u64))",
            "(param i32 i32)",
        ),
        (
            "response",
            "[constructor]outgoing-response",
            "(param \"headers\" (own $fields)) (result (own $response))",
            "(param i32) (result i32)",
        ),
        (
            "status",
            "[method]outgoing-response.status-code",
            "(param \"self\" (borrow $response)) (result u16)",
            "(param i32) (result i32)",
        ),
        (
            "set-status",
            "[method]outgoing-response.set-status-code",
            "(param \"self\" (borrow $response)) (param \"status-code\" u16) (result (result))",
            "(param i32 i32) (result i32)",
        ),
        (
            "response-headers",
            "[method]outgoing-response.headers",
            "(param \"self\" (borrow $response)) (result (own $fields))",
            "(param i32) (result i32)",
        ),
        (
            "body",
            "[method]outgoing-response.body",
            "(param \"self\" (borrow $response)) (result (result (own $body)))",
            "(param i32 i32)",
        ),
        (
            "body-write",
            "[method]outgoing-body.write",
            "(param \"self\" (borrow $body)) (result (result (own $output)))",
            "(param i32 i32)",
        ),
        (
            "finish",
            "[static]outgoing-body.finish",
            "(param \"this\" (own $body)) (param \"trailers\" (option (own $fields))) \
             (result (result (error $code)))",
            "(param i32 i32 i32 i32)",
        ),
        (
            "set",
            "[static]response-outparam.set",
            "(param \"param\" (own $outparam)) \
             (param \"response\" (result (own $response) (error $code)))",
            "(param i32 i32 i32 i32 i64 i32 i32 i32 i32)",
        ),
    ]
}

/// Types of `wasi:http/types`.
const TYPES: &str = r#"
    (alias outer $C $input-type (type $input-outer))
    (export "input-stream" (type $input (eq $input-outer)))
    (alias outer $C $output-type (type $output-outer))
    (export "output-stream" (type $output (eq $output-outer)))
    (alias outer $C $pollable-type (type $pollable-outer))
    (export "pollable" (type $pollable (eq $pollable-outer)))
    (export "fields" (type $fields (sub resource)))
    (export "incoming-request" (type $request (sub resource)))
    (export "outgoing-request" (type $elsewhere (sub resource)))
    (export "request-options" (type $options (sub resource)))
    (export "incoming-response" (type $incoming (sub resource)))
    (export "incoming-body" (type $incoming-body (sub resource)))
    (export "future-trailers" (type $future-trailers (sub resource)))
    (export "future-incoming-response" (type $future (sub resource)))
    (export "outgoing-response" (type $response (sub resource)))
    (export "outgoing-body" (type $body (sub resource)))
    (export "response-outparam" (type $outparam (sub resource)))
    (type $method-type (variant (case "get") (case "head") (case "post") (case "put")
      (case "delete") (case "connect") (case "options") (case "trace") (case "patch")
      (case "other" string)))
    (export "method" (type $method (eq $method-type)))
    (type $scheme-type (variant (case "HTTP") (case "HTTPS") (case "other" string)))
    (export "scheme" (type $scheme (eq $scheme-type)))
    (type $header-error-type
      (variant (case "invalid-syntax") (case "forbidden") (case "immutable")))
    (export "header-error" (type $header-error (eq $header-error-type)))
    (type $dns-type (record (field "rcode" (option string)) (field "info-code" (option u16))))
    (export "DNS-error-payload" (type $dns (eq $dns-type)))
    (type $tls-type
      (record (field "alert-id" (option u8)) (field "alert-message" (option string))))
    (export "TLS-alert-received-payload" (type $tls (eq $tls-type)))
    (type $size-type
      (record (field "field-name" (option string)) (field "field-size" (option u32))))
    (export "field-size-payload" (type $size (eq $size-type)))
    (type $code-type (variant
      (case "DNS-timeout") (case "DNS-error" $dns) (case "destination-not-found")
      (case "destination-unavailable") (case "destination-IP-prohibited")
      (case "destination-IP-unroutable") (case "connection-refused")
      (case "connection-terminated") (case "connection-timeout")
      (case "connection-read-timeout") (case "connection-write-timeout")
      (case "connection-limit-reached") (case "TLS-protocol-error")
      (case "TLS-certificate-error") (case "TLS-alert-received" $tls)
      (case "HTTP-request-denied") (case "HTTP-request-length-required")
      (case "HTTP-request-body-size" (option u64)) (case "HTTP-request-method-invalid")
      (case "HTTP-request-URI-invalid") (case "HTTP-request-URI-too-long")
      (case "HTTP-request-header-section-size" (option u32))
      (case "HTTP-request-header-size" (option $size))
      (case "HTTP-request-trailer-section-size" (option u32))
      (case "HTTP-request-trailer-size" $size) (case "HTTP-response-incomplete")
      (case "HTTP-response-header-section-size" (option u32))
      (case "HTTP-response-header-size" $size) (case "HTTP-response-body-size" (option u64))
      (case "HTTP-response-trailer-section-size" (option u32))
      (case "HTTP-response-trailer-size" $size)
      (case "HTTP-response-transfer-coding" (option string))
      (case "HTTP-response-content-coding" (option string)) (case "HTTP-response-timeout")
      (case "HTTP-upgrade-failed") (case "HTTP-protocol-error") (case "loop-detected")
      (case "configuration-error") (case "internal-error" (option string))))
    (export "error-code" (type $code (eq $code-type)))
"#;

/// Streams and what they need, which are of other interfaces.
const STREAMS: &str = r#"
  (import "wasi:io/error@0.2.0" (instance $error (export "error" (type (sub resource)))))
  (alias export $error "error" (type $error-type))
  (import "wasi:io/poll@0.2.0" (instance $poll
    (export "pollable" (type $pollable (sub resource)))
    (export "[method]pollable.block" (func (param "self" (borrow $pollable))))))
  (alias export $poll "pollable" (type $pollable-type))
  (import "wasi:io/streams@0.2.0" (instance $streams
    (alias outer $C $error-type (type $error-outer))
    (export "error" (type $error (eq $error-outer)))
    (export "input-stream" (type $input (sub resource)))
    (export "output-stream" (type $output (sub resource)))
    (type $stream-error-type
      (variant (case "last-operation-failed" (own $error)) (case "closed")))
    (export "stream-error" (type $stream-error (eq $stream-error-type)))
    (export "[method]input-stream.blocking-read" (func
      (param "self" (borrow $input)) (param "len" u64)
      (result (result (list u8) (error $stream-error)))))
    (export "[method]output-stream.blocking-write-and-flush" (func
      (param "self" (borrow $output)) (param "contents" (list u8))
      (result (result (error $stream-error)))))))
  (alias export $streams "input-stream" (type $input-type))
  (alias export $streams "output-stream" (type $output-type))
"#;

/// Helpers of handlers. A check that fails ends the handler with the answer `failed: N`, of which N
/// is the number of the check.
const HELPERS: &str = r#"
    (global $R i32 (i32.const 1024))
    (global $checks (mut i32) (i32.const 0))
    (global $outparam (mut i32) (i32.const 0))
    (data (i32.const 960) "failed: ..")
    (func $check (param $holds i32)
      (global.set $checks (i32.add (global.get $checks) (i32.const 1)))
      (if (i32.eqz (local.get $holds)) (then
        (i32.store8 (i32.const 968)
          (i32.add (i32.const 48) (i32.div_u (global.get $checks) (i32.const 10))))
        (i32.store8 (i32.const 969)
          (i32.add (i32.const 48) (i32.rem_u (global.get $checks) (i32.const 10))))
        (call $answer (call $response (call $fields)) (i32.const 960) (i32.const 10))
        ;; A trap would be the answer.
        (loop $stay (br $stay)))))
    ;; Checks a result without a payload at $R.
    (func $ok (call $check (i32.eqz (i32.load8_u (global.get $R)))))
    (func $error (param $case i32)
      (call $check (i32.eq (i32.load8_u (global.get $R)) (i32.const 1)))
      (call $check (i32.eq (i32.load8_u offset=1 (global.get $R)) (local.get $case))))
    ;; Sends a response with a body.
    (func $answer (param $response i32) (param $at i32) (param $length i32)
      (local $body i32) (local $stream i32)
      (call $body (local.get $response) (i32.const 1088))
      (local.set $body (i32.load (i32.const 1092)))
      (call $body-write (local.get $body) (i32.const 1152))
      (local.set $stream (i32.load (i32.const 1156)))
      (call $set (global.get $outparam) (i32.const 0) (local.get $response) (i32.const 0)
        (i64.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))
      (call $write (local.get $stream) (local.get $at) (local.get $length) (i32.const 1216))
      (call $drop-output (local.get $stream))
      (call $finish (local.get $body) (i32.const 0) (i32.const 0) (i32.const 1216)))
    ;; Sends `ok`.
    (data (i32.const 976) "ok")
    (func $done (call $answer (call $response (call $fields)) (i32.const 976) (i32.const 2)))
"#;

/// Text that a handler refers to by `{name}`: replaced by address and length.
pub fn component(texts: &[(&str, &str)], handler: &str) -> Vec<u8> {
    let mut data = String::new();
    let mut handler = handler.to_owned();
    let mut at = 2048;
    for (name, text) in texts {
        let escaped: String = text.bytes().map(|b| format!("\\{b:02x}")).collect();
        writeln!(data, "(data (i32.const {at}) \"{escaped}\")").unwrap();
        let reference = format!("(i32.const {at}) (i32.const {})", text.len());
        handler = handler.replace(&format!("{{{name}}}"), &reference);
        handler = handler.replace(&format!("{{@{name}}}"), &format!("(i32.const {at})"));
        at += text.len().next_multiple_of(8);
    }
    let mut exports = String::new();
    let mut lowered = String::new();
    let mut imports = String::new();
    let mut given = String::new();
    for (short, name, component, core) in functions() {
        writeln!(exports, "(export \"{name}\" (func {component}))").unwrap();
        writeln!(lowered, "(alias export $types \"{name}\" (func ${short}))").unwrap();
        writeln!(
            lowered,
            "(core func ${short}' (canon lower (func ${short}) (memory $mem) (realloc $realloc)))"
        )
        .unwrap();
        writeln!(imports, "(import \"h\" \"{short}\" (func ${short} {core}))").unwrap();
        writeln!(given, "(export \"{short}\" (func ${short}'))").unwrap();
    }
    let text = format!(
        r#"(component $C
  {STREAMS}
  (import "wasi:http/types@0.2.0" (instance $types {TYPES} {exports}))
  (alias export $types "incoming-request" (type $request))
  (alias export $types "response-outparam" (type $outparam))
  (core module $Memory
    (memory (export "memory") 4)
    (global $next (mut i32) (i32.const 65536))
    (func (export "realloc") (param i32 i32 i32) (param $bytes i32) (result i32)
      (local $at i32)
      (local.set $at (i32.and (i32.add (global.get $next) (i32.const 7)) (i32.const -8)))
      (global.set $next (i32.add (local.get $at) (local.get $bytes)))
      (local.get $at)))
  (core instance $memory (instantiate $Memory))
  (alias core export $memory "memory" (core memory $mem))
  (alias core export $memory "realloc" (core func $realloc))
  {lowered}
  (alias export $streams "[method]input-stream.blocking-read" (func $read))
  (core func $read' (canon lower (func $read) (memory $mem) (realloc $realloc)))
  (alias export $streams "[method]output-stream.blocking-write-and-flush" (func $write))
  (core func $write' (canon lower (func $write) (memory $mem)))
  (alias export $poll "[method]pollable.block" (func $block))
  (core func $block' (canon lower (func $block)))
  (core func $drop-input (canon resource.drop $input-type))
  (core func $drop-output (canon resource.drop $output-type))
  (core module $Main
    (import "m" "memory" (memory 1))
    {imports}
    (import "h" "read" (func $read (param i32 i64 i32)))
    (import "h" "block" (func $block (param i32)))
    (import "h" "write" (func $write (param i32 i32 i32 i32)))
    (import "h" "drop-input" (func $drop-input (param i32)))
    (import "h" "drop-output" (func $drop-output (param i32)))
    {HELPERS}
    {data}
    (func (export "handle") (param $in i32) (param $out i32)
      (local $a i32) (local $b i32) (local $c i32)
      (global.set $outparam (local.get $out))
      {handler}))
  (core instance $main (instantiate $Main
    (with "m" (instance $memory))
    (with "h" (instance
      {given}
      (export "block" (func $block'))
      (export "read" (func $read'))
      (export "write" (func $write'))
      (export "drop-input" (func $drop-input))
      (export "drop-output" (func $drop-output))))))
  (func $handle (param "request" (own $request)) (param "response-out" (own $outparam))
    (canon lift (core func $main "handle")))
  (instance $handler (export "handle" (func $handle)))
  (export "wasi:http/incoming-handler@0.2.0" (instance $handler)))"#
    );
    wat::parse_str(text).unwrap()
}

//! Types and functions of `wasi:http/types` in WebAssembly's text format. Tests assemble components
//! from this text. Three identifiers of types differ from their names: `$request` is an
//! incoming request, and `$incoming` is an incoming response. `$elsewhere` is an outgoing request.

use super::interfaces::Function;

/// Functions of `wasi:http/types`. Each entry has the name in the test component, the name in the
/// interface, the component type, and the type of the lowered core function.
pub const FUNCTIONS: &[Function] = &[
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
    (
        "future-ready",
        "[method]future-incoming-response.subscribe",
        "(param \"self\" (borrow $future)) (result (own $pollable))",
        "(param i32) (result i32)",
    ),
    (
        "future-get",
        "[method]future-incoming-response.get",
        "(param \"self\" (borrow $future)) \
         (result (option (result (result (own $incoming) (error $code)))))",
        "(param i32 i32)",
    ),
    (
        "incoming-status",
        "[method]incoming-response.status",
        "(param \"self\" (borrow $incoming)) (result u16)",
        "(param i32) (result i32)",
    ),
    (
        "incoming-headers",
        "[method]incoming-response.headers",
        "(param \"self\" (borrow $incoming)) (result (own $fields))",
        "(param i32) (result i32)",
    ),
    (
        "incoming-consume",
        "[method]incoming-response.consume",
        "(param \"self\" (borrow $incoming)) (result (result (own $incoming-body)))",
        "(param i32 i32)",
    ),
];

/// Types of `wasi:http/types`. `$C` is the enclosing component, which defines the types that this
/// interface shares with other interfaces.
pub const TYPES: &str = r#"
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

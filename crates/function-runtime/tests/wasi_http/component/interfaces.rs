//! Interfaces that components import, in WebAssembly's text format. `$C` is the enclosing
//! component, which defines the types that several interfaces share.

use super::http_types;

/// Function of an interface: its name in the handlers of tests, its name in the interface, its
/// component type, and the type of the lowered core function.
pub type Function = (&'static str, &'static str, &'static str, &'static str);

/// Imported interface.
pub struct Interface {
    /// Identifier of the instance.
    pub id: &'static str,
    /// Name without its version, which is 0.2.0.
    pub name: &'static str,
    /// Types that the functions require.
    pub types: &'static str,
    /// Names of types that other interfaces use, and their identifiers there.
    pub shared: &'static [(&'static str, &'static str)],
    pub functions: &'static [Function],
}

/// Interfaces. Each interface may use types of earlier interfaces.
pub const INTERFACES: [Interface; 8] = [
    Interface {
        id: "error",
        name: "wasi:io/error",
        types: r#"(export "error" (type (sub resource)))"#,
        shared: &[("error", "error-type")],
        functions: &[],
    },
    Interface {
        id: "poll",
        name: "wasi:io/poll",
        types: r#"(export "pollable" (type $pollable (sub resource)))"#,
        shared: &[("pollable", "pollable-type")],
        functions: POLL,
    },
    Interface {
        id: "streams",
        name: "wasi:io/streams",
        types: r#"
            (alias outer $C $error-type (type $error-outer))
            (export "error" (type $error (eq $error-outer)))
            (alias outer $C $pollable-type (type $pollable-outer))
            (export "pollable" (type $pollable (eq $pollable-outer)))
            (export "input-stream" (type $input (sub resource)))
            (export "output-stream" (type $output (sub resource)))
            (type $stream-error-type
              (variant (case "last-operation-failed" (own $error)) (case "closed")))
            (export "stream-error" (type $stream-error (eq $stream-error-type)))"#,
        shared: &[
            ("input-stream", "input-type"),
            ("output-stream", "output-type"),
        ],
        functions: STREAMS,
    },
    Interface {
        id: "clock",
        name: "wasi:clocks/monotonic-clock",
        types: r#"
            (alias outer $C $pollable-type (type $pollable-outer))
            (export "pollable" (type $pollable (eq $pollable-outer)))"#,
        shared: &[],
        functions: CLOCK,
    },
    Interface {
        id: "random",
        name: "wasi:random/random",
        types: "",
        shared: &[],
        functions: RANDOM,
    },
    Interface {
        id: "stdout",
        name: "wasi:cli/stdout",
        types: r#"
            (alias outer $C $output-type (type $output-outer))
            (export "output-stream" (type $output (eq $output-outer)))"#,
        shared: &[],
        functions: STDOUT,
    },
    Interface {
        id: "types",
        name: "wasi:http/types",
        types: http_types::TYPES,
        shared: &[
            ("incoming-request", "request"),
            ("response-outparam", "outparam"),
            ("outgoing-request", "elsewhere-type"),
            ("request-options", "options-type"),
            ("future-incoming-response", "future-type"),
            ("error-code", "code-type"),
            ("fields", "fields-type"),
            ("outgoing-response", "response-type"),
            ("outgoing-body", "body-type"),
        ],
        functions: http_types::FUNCTIONS,
    },
    Interface {
        id: "outgoing",
        name: "wasi:http/outgoing-handler",
        types: r#"
            (alias outer $C $elsewhere-type (type $elsewhere-outer))
            (export "outgoing-request" (type $elsewhere (eq $elsewhere-outer)))
            (alias outer $C $options-type (type $options-outer))
            (export "request-options" (type $options (eq $options-outer)))
            (alias outer $C $future-type (type $future-outer))
            (export "future-incoming-response" (type $future (eq $future-outer)))
            (alias outer $C $code-type (type $code-outer))
            (export "error-code" (type $code (eq $code-outer)))"#,
        shared: &[],
        functions: OUTGOING,
    },
];

/// Functions that drop a handle: name in handlers, and type of the handle.
pub const DROPS: [(&str, &str); 8] = [
    ("drop-input", "input-type"),
    ("drop-output", "output-type"),
    ("drop-pollable", "pollable-type"),
    ("drop-fields", "fields-type"),
    ("drop-request", "elsewhere-type"),
    ("drop-response", "response-type"),
    ("drop-body", "body-type"),
    ("drop-future", "future-type"),
];

const POLL: &[Function] = &[
    (
        "block",
        "[method]pollable.block",
        "(param \"self\" (borrow $pollable))",
        "(param i32)",
    ),
    (
        "poll",
        "poll",
        "(param \"in\" (list (borrow $pollable))) (result (list u32))",
        "(param i32 i32 i32)",
    ),
];

const STREAMS: &[Function] = &[
    (
        "read",
        "[method]input-stream.blocking-read",
        "(param \"self\" (borrow $input)) (param \"len\" u64) \
         (result (result (list u8) (error $stream-error)))",
        "(param i32 i64 i32)",
    ),
    (
        "write",
        "[method]output-stream.blocking-write-and-flush",
        "(param \"self\" (borrow $output)) (param \"contents\" (list u8)) \
         (result (result (error $stream-error)))",
        "(param i32 i32 i32 i32)",
    ),
    (
        "check-write",
        "[method]output-stream.check-write",
        "(param \"self\" (borrow $output)) (result (result u64 (error $stream-error)))",
        "(param i32 i32)",
    ),
    (
        "write-permitted",
        "[method]output-stream.write",
        "(param \"self\" (borrow $output)) (param \"contents\" (list u8)) \
         (result (result (error $stream-error)))",
        "(param i32 i32 i32 i32)",
    ),
    (
        "output-ready",
        "[method]output-stream.subscribe",
        "(param \"self\" (borrow $output)) (result (own $pollable))",
        "(param i32) (result i32)",
    ),
    (
        "splice",
        "[method]output-stream.blocking-splice",
        "(param \"self\" (borrow $output)) (param \"src\" (borrow $input)) (param \"len\" u64) \
         (result (result u64 (error $stream-error)))",
        "(param i32 i32 i64 i32)",
    ),
];

const CLOCK: &[Function] = &[
    ("now", "now", "(result u64)", "(result i64)"),
    (
        "timer",
        "subscribe-duration",
        "(param \"when\" u64) (result (own $pollable))",
        "(param i64) (result i32)",
    ),
];

const RANDOM: &[Function] = &[
    (
        "random-bytes",
        "get-random-bytes",
        "(param \"len\" u64) (result (list u8))",
        "(param i64 i32)",
    ),
    (
        "random-number",
        "get-random-u64",
        "(result u64)",
        "(result i64)",
    ),
];

const STDOUT: &[Function] = &[(
    "stdout",
    "get-stdout",
    "(result (own $output))",
    "(result i32)",
)];

const OUTGOING: &[Function] = &[(
    "send",
    "handle",
    "(param \"request\" (own $elsewhere)) (param \"options\" (option (own $options))) \
     (result (result (own $future) (error $code)))",
    "(param i32 i32 i32 i32)",
)];

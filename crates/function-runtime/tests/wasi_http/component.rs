//! Components of wasi:http in WebAssembly text. The handler can use all functions of
//! `wasi:http/types`, and functions of other interfaces on request.
//!
//! Memory layout, by address: texts of helpers are below 1024. Results are at `$R` (1024) and in
//! further areas of 64 bytes. Strings of the test are from 2048 on, and allocations by the host
//! from 65536 on. Handles are plain numbers.

mod http_types;
mod interfaces;

use interfaces::{DROPS, INTERFACES};
use std::fmt::Write;

/// Helper functions of handlers. A failed check ends the handler with the answer `failed: N`, where
/// N is the number of the check.
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
        ;; Otherwise the trap would replace the answer.
        (loop $stay (br $stay)))))
    ;; Checks that the result at $R is a success.
    (func $ok (call $check (i32.eqz (i32.load8_u (global.get $R)))))
    ;; Checks that the result at $R is the error $case of headers.
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
    ;; Copies the rest of a stream to another.
    (func $copy (param $from i32) (param $to i32)
      (loop $next
        (call $splice (local.get $to) (local.get $from) (i64.const 65536) (global.get $R))
        (br_if $next (i32.eqz (i32.load8_u (global.get $R)))))
      ;; The stream is closed, which is the second case of its error.
      (call $check (i32.eq (i32.load8_u offset=8 (global.get $R)) (i32.const 1))))
    ;; Sends `ok`.
    (data (i32.const 976) "ok")
    (func $done (call $answer (call $response (call $fields)) (i32.const 976) (i32.const 2)))
"#;

/// Parts of a component.
#[derive(Debug, Clone, Copy, Default)]
pub struct ComponentText<'a> {
    /// Strings that handlers and functions refer to: `{name}` is replaced by address and length,
    /// `{@name}` by the address.
    pub texts: &'a [(&'a str, &'a str)],
    /// Handler of a request.
    pub handler: &'a str,
    /// Functions that the handler calls.
    pub functions: &'a str,
    /// Additional parts of the component.
    pub more: &'a str,
}

/// Returns a handler that dispatches to one of several handlers by the first letter of the path.
pub fn dispatch_by_letter(handlers: &[(char, &str)]) -> String {
    let mut text = "(call $path (local.get $in) (global.get $R))
        (local.set $a (i32.load8_u offset=1 (i32.load offset=4 (global.get $R))))\n"
        .to_owned();
    for (letter, handler) in handlers {
        let number = u32::from(*letter);
        let is_it = format!("(i32.eq (local.get $a) (i32.const {number}))");
        writeln!(text, "(if {is_it} (then {handler} (return)))").unwrap();
    }
    text + "(call $done)"
}

/// Returns a component with one handler.
pub fn component(texts: &[(&str, &str)], handler: &str) -> Vec<u8> {
    let text = ComponentText {
        texts,
        handler,
        ..ComponentText::default()
    };
    text.build()
}

impl ComponentText<'_> {
    /// Returns the component in binary form.
    pub fn build(&self) -> Vec<u8> {
        let mut data = String::new();
        let (mut handler, mut functions) = (self.handler.to_owned(), self.functions.to_owned());
        let mut at = 2048;
        for (name, text) in self.texts {
            let escaped: String = text.bytes().map(|b| format!("\\{b:02x}")).collect();
            writeln!(data, "(data (i32.const {at}) \"{escaped}\")").unwrap();
            let reference = format!("(i32.const {at}) (i32.const {})", text.len());
            for code in [&mut handler, &mut functions] {
                *code = code
                    .replace(&format!("{{{name}}}"), &reference)
                    .replace(&format!("{{@{name}}}"), &format!("(i32.const {at})"));
            }
            at += text.len().next_multiple_of(8);
        }
        let mut imported = String::new();
        let mut lowered = String::new();
        let mut imports = String::new();
        let mut given = String::new();
        for interface in &INTERFACES {
            let (id, name, types) = (interface.id, interface.name, interface.types);
            write!(imported, "(import \"{name}@0.2.0\" (instance ${id} {types}").unwrap();
            for (short, name, component, core) in interface.functions {
                writeln!(imported, "(export \"{name}\" (func {component}))").unwrap();
                writeln!(lowered, "(alias export ${id} \"{name}\" (func ${short}))").unwrap();
                let options = "(memory $mem) (realloc $realloc)";
                writeln!(
                    lowered,
                    "(core func ${short}' (canon lower (func ${short}) {options}))"
                )
                .unwrap();
                writeln!(imports, "(import \"h\" \"{short}\" (func ${short} {core}))").unwrap();
                writeln!(given, "(export \"{short}\" (func ${short}'))").unwrap();
            }
            writeln!(imported, "))").unwrap();
            for (name, here) in interface.shared {
                writeln!(imported, "(alias export ${id} \"{name}\" (type ${here}))").unwrap();
            }
        }
        for (short, resource) in DROPS {
            writeln!(
                lowered,
                "(core func ${short} (canon resource.drop ${resource}))"
            )
            .unwrap();
            writeln!(
                imports,
                "(import \"h\" \"{short}\" (func ${short} (param i32)))"
            )
            .unwrap();
            writeln!(given, "(export \"{short}\" (func ${short}))").unwrap();
        }
        let more = self.more;
        let text = format!(
            r#"(component $C
  {imported}
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
  (core module $Main
    (import "m" "memory" (memory 1))
    {imports}
    {HELPERS}
    {data}
    {functions}
    (func (export "handle") (param $in i32) (param $out i32)
      (local $a i32) (local $b i32) (local $c i32) (local $d i32)
      (global.set $outparam (local.get $out))
      {handler}))
  (core instance $main (instantiate $Main
    (with "m" (instance $memory))
    (with "h" (instance {given}))))
  {more}
  (func $handle (param "request" (own $request)) (param "response-out" (own $outparam))
    (canon lift (core func $main "handle")))
  (instance $handler (export "handle" (func $handle)))
  (export "wasi:http/incoming-handler@0.2.0" (instance $handler)))"#
        );
        wat::parse_str(text).unwrap()
    }
}

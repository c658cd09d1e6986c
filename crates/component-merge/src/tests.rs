//! Tests that merged components behave as before. Wasmtime executes both forms.

use crate::binary_sections::{COMPONENT_HEAD, MODULE_HEAD, sections};
use crate::{Limits, merge_core_modules};
use wasmtime::component::{Component, Linker};
use wasmtime::{Engine, Store};

const LIMITS: Limits = Limits {
    memories: 1,
    tables: 4,
    instance_bytes: 1 << 20,
};

/// Interval, in bytes, between the positions at which a changed component is also compiled. A
/// compilation takes some milliseconds.
const COMPILED_INTERVAL: usize = 31;

/// Component in the form that linkers emit for languages with libraries. `env` has memory, table,
/// and globals with the location of each library. `lib` adds its functions to the table. `app` uses
/// them through the table and by name. The host's function writes to memory, and is therefore
/// called through a table that is filled last.
const LIBRARIES: &str = r#"(component
  (type $named (func (param "name" string) (result u32)))
  (import "named" (func $named (type $named)))
  (import "twice" (func $twice (param "n" u32) (result u32)))
  (core module $shim
    (type $two (func (param i32 i32) (result i32)))
    (table (export "$imports") 1 1 funcref)
    (func (export "0") (type $two)
      (call_indirect (type $two) (local.get 0) (local.get 1) (i32.const 0))))
  (core module $env
    (memory (export "memory") 1)
    (table (export "__indirect_function_table") 8 funcref)
    (global (export "base") i32 (i32.const 2))
    (global (export "data") i32 (i32.const 1024))
    (global (export "got") (mut i32) (i32.const 0))
    (global $free (mut i32) (i32.const 4096))
    (func (export "realloc") (param i32 i32 i32 i32) (result i32)
      (global.set $free (i32.add (global.get $free) (local.get 3)))
      (i32.sub (global.get $free) (local.get 3))))
  (core module $lib
    (type $one (func (param i32) (result i32)))
    (type $none (func))
    (import "env" "memory" (memory 1))
    (import "env" "__indirect_function_table" (table 0 funcref))
    (import "env" "base" (global $base i32))
    (import "env" "data" (global $data i32))
    (import "env" "got" (global $got (mut i32)))
    (import "host" "twice" (func $twice (type $one)))
    (elem (global.get $base) func $none $doubled)
    (data (offset (i32.add (global.get $data) (i32.const 4))) "\05")
    (func $none (type $none))
    (func $doubled (type $one)
      (global.set $got (i32.add (global.get $got) (i32.const 1)))
      (call $twice (i32.add (local.get 0) (i32.load (i32.const 1028)))))
    (func (export "doubled") (type $one) (call $doubled (local.get 0))))
  (core module $app
    (type $pair (func (param i32 i32) (result i32)))
    (type $one (func (param i32) (result i32)))
    (import "env" "memory" (memory 1))
    (import "env" "__indirect_function_table" (table 0 funcref))
    (import "env" "base" (global $base i32))
    (import "got" "got" (global $got (mut i32)))
    (import "lib" "doubled" (func $doubled (type $one)))
    (import "named" "named" (func $named (type $pair)))
    (data (i32.const 64) "four")
    (func (export "run") (type $one)
      (i32.add
        (i32.add
          (call $doubled (local.get 0))
          (call_indirect (type $one) (local.get 0) (i32.add (global.get $base) (i32.const 1))))
        (i32.add
          (i32.mul (global.get $got) (i32.const 1000))
          (i32.mul (call $named (i32.const 64) (i32.const 4)) (i32.const 100000))))))
  (core module $fixups
    (import "" "$imports" (table 1 1 funcref))
    (import "" "0" (func $named (param i32 i32) (result i32)))
    (elem (i32.const 0) func $named))
  (core instance $shim (instantiate $shim))
  (core instance $env (instantiate $env))
  (alias core export $env "memory" (core memory $memory))
  (core func $twice (canon lower (func $twice)))
  (core instance $host (export "twice" (func $twice)))
  (core instance $lib (instantiate $lib
    (with "env" (instance $env)) (with "host" (instance $host))))
  (alias core export $env "got" (core global $got))
  (core instance $got (export "got" (global $got)))
  (alias core export $shim "0" (core func $indirect))
  (core instance $named (export "named" (func $indirect)))
  (core instance $app (instantiate $app
    (with "env" (instance $env)) (with "got" (instance $got)) (with "lib" (instance $lib))
    (with "named" (instance $named))))
  (alias core export $env "realloc" (core func $realloc))
  (alias core export $shim "$imports" (core table $imports))
  (core func $lowered (canon lower (func $named)
    (memory $memory) (realloc (func $realloc)) string-encoding=utf8))
  (core instance $fixed (export "$imports" (table $imports)) (export "0" (func $lowered)))
  (core instance (instantiate $fixups (with "" (instance $fixed))))
  (func (export "run") (param "n" u32) (result u32) (canon lift (core func $app "run"))))"#;

fn merge(component: &[u8]) -> Option<Vec<u8>> {
    merge_core_modules(component, &LIMITS)
}

/// Calls the export `run` of a component with 7, and returns the result.
fn run(component: &[u8]) -> wasmtime::Result<u32> {
    let engine = Engine::default();
    let component = Component::from_binary(&engine, component)?;
    let mut linker = Linker::<()>::new(&engine);
    let mut root = linker.root();
    root.func_wrap("named", |_, (name,): (String,)| Ok((name.len() as u32,)))?;
    root.func_wrap("twice", |_, (n,): (u32,)| Ok((n * 2,)))?;
    let mut store = Store::new(&engine, ());
    let instance = linker.instantiate(&mut store, &component)?;
    let run = instance.get_typed_func::<(u32,), (u32,)>(&mut store, "run")?;
    Ok(run.call(&mut store, (7,))?.0)
}

/// Returns the number of core modules that are not empty.
fn modules(component: &[u8]) -> usize {
    let body = component.strip_prefix(COMPONENT_HEAD).unwrap();
    // The modules of merged members remain as empty modules.
    let sections = sections(body).unwrap().into_iter();
    sections
        .filter(|(id, content)| *id == 1 && content.as_ref() != MODULE_HEAD)
        .count()
}

fn parsed(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

#[test]
fn merged_libraries_give_the_same_result() {
    let component = parsed(LIBRARIES);
    let merged = merge(&component).unwrap();
    // Once by name and once through the table: (7 + 5) * 2 = 24. Two calls count 1,000 each, and a
    // name of four bytes counts 100,000 for each byte.
    assert_eq!(run(&component).unwrap(), 402_048);
    assert_eq!(run(&merged).unwrap(), 402_048);
    // `fixups` remains a module of its own, because it imports a function that uses the memory of
    // the merged module.
    assert_eq!((modules(&component), modules(&merged)), (5, 2));
    let again = merge(&merged);
    assert!(again.is_none(), "a single module is merged again");
}

#[test]
fn a_table_of_merged_modules_is_filled_from_constants() {
    let merged = merge(&parsed(LIBRARIES)).unwrap();
    let body = merged.strip_prefix(COMPONENT_HEAD).unwrap();
    let sections = sections(body).unwrap();
    let largest = sections
        .iter()
        .filter(|(id, _)| *id == 1)
        .max_by_key(|(_, content)| content.len());
    let mut starts = Vec::new();
    for payload in wasmparser::Parser::new(0).parse_all(&largest.unwrap().1) {
        if let wasmparser::Payload::ElementSection(elements) = payload.unwrap() {
            for element in elements {
                let wasmparser::ElementKind::Active { offset_expr, .. } = element.unwrap().kind
                else {
                    panic!("an element segment is not active");
                };
                starts.push(offset_expr.get_operators_reader().read().unwrap());
            }
        }
    }
    // The value of the global `base`.
    assert!(
        matches!(starts[..], [wasmparser::Operator::I32Const { value: 2 }]),
        "{starts:?}"
    );
}

/// Returns a component with two modules and the definitions `more`. The second module imports items
/// of the first module from `a`.
fn two(first: &str, second: &str, more: &str) -> Vec<u8> {
    parsed(&format!(
        r#"(component
            (core module $a {first})
            (core module $b {second})
            (core instance $a (instantiate $a))
            (core instance $b (instantiate $b (with "a" (instance $a))))
            {more}
            (func (export "run") (param "n" u32) (result u32) (canon lift (core func $b "run"))))"#
    ))
}

/// Items of two core modules. The second module calls a function of the first one.
const FIRST: &str = r#"(func (export "f") (param i32) (result i32)
    (i32.mul (local.get 0) (i32.const 3)))"#;
const SECOND: &str = r#"(import "a" "f" (func $f (param i32) (result i32)))
    (func (export "run") (param i32) (result i32) (call $f (local.get 0)))"#;

#[test]
fn unsupported_components_are_not_merged() {
    assert_eq!(run(&merge(&two(FIRST, SECOND, "")).unwrap()).unwrap(), 21);
    // A start function, types that are not supported, further uses of the first module, and a
    // resource.
    let start = format!("{FIRST} (func $s) (start $s)");
    for (first, more) in [
        (start.as_str(), ""),
        (&format!("{FIRST} (rec (type (func)) (type (func)))"), ""),
        (&format!("{FIRST} (type (struct))"), ""),
        (FIRST, "(core instance (instantiate $a))"),
        (FIRST, r#"(export "a" (core module $a))"#),
        (
            FIRST,
            r#"(component (alias outer 1 $a (core module $outer))
                (core instance (instantiate $outer)))"#,
        ),
        (
            FIRST,
            r#"(component $inner (import "m" (core module $m)) (core instance (instantiate $m)))
               (instance (instantiate $inner (with "m" (core module $a))))"#,
        ),
        (
            FIRST,
            r#"(core module $d (func (export "drop") (param i32)))
               (core instance $d (instantiate $d))
               (type (resource (rep i32) (dtor (func $d "drop"))))"#,
        ),
    ] {
        let component = two(first, SECOND, more);
        assert!(merge(&component).is_none(), "{more} {first}");
    }
    // Each module is within the limits, but the merged module is not. The limits are one memory,
    // four tables, and 1 MiB for the record of an instance. In this record, the 17,000 elements
    // take 32 bytes each, which is more than half of the limit.
    let tables = "(table 1 funcref)".repeat(3);
    let listed = "$n ".repeat(17_000);
    let functions = format!("(func $n) (table 20000 funcref) (elem (i32.const 0) func {listed})");
    for fields in ["(memory 1)", &tables, &functions] {
        let (first, second) = (format!("{FIRST} {fields}"), format!("{SECOND} {fields}"));
        assert!(merge(&two(&first, SECOND, "")).is_some());
        let both = merge(&two(&first, &second, ""));
        assert!(both.is_none(), "{:.40}", fields);
    }
    // A core module instead of a component.
    assert!(merge(&parsed("(module (memory 1))")).is_none());
}

#[test]
fn a_module_after_a_component_function_is_not_merged() {
    let third = format!("(core module $c {SECOND})");
    let component = two(
        FIRST,
        SECOND,
        &format!(
            r#"{third}
            (func $lifted (param "n" u32) (result u32) (canon lift (core func $a "f")))
            (core func $lowered (canon lower (func $lifted)))
            (core instance $f (export "f" (func $lowered)))
            (core instance $c (instantiate $c (with "a" (instance $f))))"#
        ),
    );
    let merged = merge(&component).unwrap();
    assert_eq!((modules(&component), modules(&merged)), (3, 2));
    assert_eq!(run(&merged).unwrap(), 21);
}

#[test]
fn corrupted_components_are_rejected_or_merged_correctly() {
    let component = parsed(LIBRARIES);
    for length in 0..component.len() {
        merge(&component[..length]);
    }
    let mut changed = component.clone();
    for at in 0..changed.len() {
        let flipped = component[at] ^ 1;
        for value in [0, 1, 0x7f, 0xff, component[at].wrapping_add(1), flipped] {
            changed[at] = value;
            let merged = merge(&changed);
            // Wasmtime runs some of the changed components in both forms. If both forms are valid,
            // their results must be equal.
            if at % COMPILED_INTERVAL == 0
                && value == flipped
                && let Some(merged) = merged
                && let (Ok(before), Ok(after)) = (run(&changed), run(&merged))
            {
                assert_eq!(before, after, "byte {at} is {value}");
            }
        }
        changed[at] = component[at];
    }
}

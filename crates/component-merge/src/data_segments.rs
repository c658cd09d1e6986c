//! Reduces the number of data segments of a module.
//!
//! Wasmtime writes a record for each data segment when it creates an instance. A program that
//! was initialized at build time has tens of thousands of segments, separated by short runs of
//! zeros. The memory of an instance initially contains zeros, so segments with zeros between them
//! can be merged. Passive segments that no instruction uses are removed.

use crate::binary_sections::{
    COMPONENT_HEAD, MODULE_HEAD, Section, assemble, sections, write_bytes, write_number,
    write_signed,
};
use std::borrow::Cow;
use wasmparser::{
    BinaryReader, CodeSectionReader, Data, DataKind, DataSectionReader, ImportSectionReader,
    Operator, Result, TypeRef,
};

/// Maximum number of zeros between two segments that are merged.
const MAX_GAP_BYTES: u64 = 1024;
/// Maximum number of zeros that are added to a module in total. Bounds the growth of hostile
/// modules.
const MAX_ZEROS: u64 = 4 << 20;
/// Maximum depth of nested components.
const MAX_DEPTH: usize = 8;

/// Sections of a module.
const IMPORTS: u8 = 2;
const CODE: u8 = 10;
const DATA: u8 = 11;
const DATA_COUNT: u8 = 12;
/// Sections of a component.
const CORE_MODULE: u8 = 1;
const COMPONENT: u8 = 4;

/// Returns an equivalent module or component with fewer data segments. A binary that cannot be
/// parsed is returned unchanged.
#[must_use]
pub fn merge(binary: &[u8]) -> Cow<'_, [u8]> {
    let merged = merge_within(binary, MAX_DEPTH).ok().flatten();
    merged.map_or(Cow::Borrowed(binary), Cow::Owned)
}

/// Merges segments of a module or component. Returns `None` if nothing changes.
fn merge_within(binary: &[u8], depth: usize) -> Result<Option<Vec<u8>>> {
    if let Some(body) = binary.strip_prefix(MODULE_HEAD) {
        // A merge changes no index that other sections use, so those sections are copied.
        let mut sections = sections(body)?;
        let is_merged = merge_module(&mut sections)?;
        return Ok(is_merged.then(|| assemble(MODULE_HEAD, &sections)));
    }
    let (Some(body), Some(depth)) = (binary.strip_prefix(COMPONENT_HEAD), depth.checked_sub(1))
    else {
        return Ok(None);
    };
    let mut sections = sections(body)?;
    let mut is_merged = false;
    for (id, content) in &mut sections {
        if matches!(*id, CORE_MODULE | COMPONENT)
            && let Some(merged) = merge_within(content, depth)?
        {
            *content = Cow::Owned(merged);
            is_merged = true;
        }
    }
    Ok(is_merged.then(|| assemble(COMPONENT_HEAD, &sections)))
}

/// Merges the segments of a module. Returns false if the sections are unchanged.
fn merge_module(sections: &mut Vec<Section<'_>>) -> Result<bool> {
    let find = |id| sections.iter().position(|(other, _)| *other == id);
    let content = |at: usize| sections.get(at).map_or(&[][..], |(_, content)| content);
    let Some(data) = find(DATA) else {
        return Ok(false);
    };
    // An imported memory may contain other values than zeros.
    if let Some(imports) = find(IMPORTS) {
        let reader = ImportSectionReader::new(BinaryReader::new(content(imports), 0))?;
        for import in reader.into_imports() {
            if matches!(import?.ty, TypeRef::Memory(_)) {
                return Ok(false);
            }
        }
    }
    // Without a data count section, no instruction may refer to a segment.
    if find(DATA_COUNT).is_some()
        && let Some(code) = find(CODE)
        && refers_to_segments(content(code))?
    {
        return Ok(false);
    }
    let reader = DataSectionReader::new(BinaryReader::new(content(data), 0))?;
    let before = usize::try_from(reader.count()).unwrap_or(usize::MAX);
    let Some(merged) = merge_data(reader)? else {
        return Ok(false);
    };
    // The order and content of the segments are the same if none was merged or removed.
    if merged.len() == before {
        return Ok(false);
    }
    let mut bytes = Vec::new();
    write_number(&mut bytes, merged.len() as u64);
    for segment in &merged {
        // An active segment of memory 0 at a constant offset: flags 0, `i32.const` (0x41), `end`
        // (0x0b).
        bytes.extend_from_slice(&[0, 0x41]);
        // Fits, since the offset was parsed from 32 bits.
        let at = u32::try_from(segment.start).unwrap_or(u32::MAX);
        write_signed(&mut bytes, i64::from(at.cast_signed()));
        bytes.push(0x0b);
        write_bytes(&mut bytes, &segment.bytes);
    }
    if let Some((_, content)) = sections.get_mut(data) {
        *content = Cow::Owned(bytes);
    }
    // The count would be wrong. The section is optional, since no instruction needs it.
    sections.retain(|(id, _)| *id != DATA_COUNT);
    Ok(true)
}

/// Returns whether an instruction refers to a data segment by its index.
fn refers_to_segments(code: &[u8]) -> Result<bool> {
    for body in CodeSectionReader::new(BinaryReader::new(code, 0))? {
        for operator in body?.get_operators_reader()? {
            if matches!(
                operator?,
                Operator::MemoryInit { .. }
                    | Operator::DataDrop { .. }
                    | Operator::ArrayNewData { .. }
                    | Operator::ArrayInitData { .. }
            ) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Active data segment of memory 0.
struct Segment {
    start: u64,
    bytes: Vec<u8>,
}

/// Returns the merged segments in the same order. Returns `None` if a segment belongs to a memory
/// other than 0, or if its offset is not constant.
fn merge_data(reader: DataSectionReader<'_>) -> Result<Option<Vec<Segment>>> {
    // Segments are applied in order and may overlap, so their order is retained.
    let mut merged: Vec<Segment> = Vec::new();
    let mut zeros_left = MAX_ZEROS;
    let mut highest_end = 0;
    for data in reader {
        let data = data?;
        // A passive segment without an instruction that uses it has no effect.
        if matches!(data.kind, DataKind::Passive) {
            continue;
        }
        let Some(start) = constant_start(&data)? else {
            return Ok(None);
        };
        let gap = merged.last().and_then(|last| {
            // Cannot overflow: an offset has 32 bits, and a segment is part of the binary.
            let end = last.start + last.bytes.len() as u64;
            let gap = start.checked_sub(end)?;
            // The zeros must not overwrite data of an earlier segment.
            (end >= highest_end && gap <= MAX_GAP_BYTES.min(zeros_left)).then_some(gap)
        });
        highest_end = highest_end.max(start + data.data.len() as u64);
        match (gap, merged.last_mut()) {
            (Some(gap), Some(last)) => {
                zeros_left -= gap;
                let length = last.bytes.len() + usize::try_from(gap).unwrap_or(0);
                last.bytes.resize(length, 0);
                last.bytes.extend_from_slice(data.data);
            }
            _ => merged.push(Segment {
                start,
                bytes: data.data.to_vec(),
            }),
        }
    }
    Ok(Some(merged))
}

/// Returns the offset of an active segment of memory 0, if it is a constant.
fn constant_start(data: &Data<'_>) -> Result<Option<u64>> {
    let DataKind::Active {
        memory_index: 0,
        offset_expr,
    } = &data.kind
    else {
        return Ok(None);
    };
    let mut operators = offset_expr.get_operators_reader();
    let first = operators.read()?;
    let second = operators.read()?;
    Ok(match (first, second) {
        (Operator::I32Const { value }, Operator::End) => Some(u64::from(value.cast_unsigned())),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use wasmtime::{Engine, Instance, Module, Store};

    /// Returns the number of segments and the initial memory of a module.
    fn effect(binary: &[u8]) -> (usize, Vec<u8>) {
        let body = binary.strip_prefix(MODULE_HEAD).unwrap();
        let sections = sections(body).unwrap();
        let data = sections.iter().find(|(id, _)| *id == DATA).unwrap();
        let reader = DataSectionReader::new(BinaryReader::new(&data.1, 0)).unwrap();
        let engine = Engine::default();
        let module = Module::new(&engine, binary).unwrap();
        let mut store = Store::new(&engine, ());
        let instance = Instance::new(&mut store, &module, &[]).unwrap();
        let memory = instance.get_memory(&mut store, "memory").unwrap();
        (reader.count() as usize, memory.data(&store).to_vec())
    }

    fn module(fields: &str) -> Vec<u8> {
        let text = format!(r#"(module (memory (export "memory") 2) {fields})"#);
        wat::parse_str(text).unwrap()
    }

    #[test]
    fn a_merged_module_has_fewer_segments_and_the_same_memory() {
        // Fields of a module, and the number of its segments before and after the merge. In this
        // order:
        // - neighbouring segments, and a passive segment that no instruction uses;
        // - overlapping segments;
        // - segments below the first one: a merge could overwrite the first one with zeros;
        // - the same, but the last two segments are above all others;
        // - segments that are far apart, and an empty passive segment;
        // - a function that uses a segment by its number;
        // - a function that uses no segment;
        // - a segment whose offset is not a constant.
        for (fields, before, after) in [
            (
                r#"(data (i32.const 8) "a") (data (i32.const 12) "b") (data "p")"#,
                3,
                1,
            ),
            (
                r#"(data (i32.const 8) "abc") (data (i32.const 9) "d")"#,
                2,
                2,
            ),
            (
                r#"(data (i32.const 99) "a") (data (i32.const 7) "b") (data (i32.const 9) "")"#,
                3,
                3,
            ),
            (
                r#"(data (i32.const 12) "a") (data (i32.const 1) "b") (data (i32.const 20) "c")
                   (data (i32.const 25) "d")"#,
                4,
                3,
            ),
            (
                r#"(data (i32.const 9) "a") (data (i32.const 70000) "b") (data "")"#,
                3,
                2,
            ),
            (
                r#"(data (i32.const 9) "a") (data (i32.const 12) "b") (data "p")
                   (func (data.drop 2))"#,
                3,
                3,
            ),
            (
                r#"(data (i32.const 9) "a") (data (i32.const 12) "b") (data "p")
                   (func (memory.copy (i32.const 1) (i32.const 2) (i32.const 3)))"#,
                3,
                1,
            ),
            (
                r#"(global i32 (i32.const 9)) (data (i32.const 1) "a") (data (global.get 0) "b")"#,
                2,
                2,
            ),
        ] {
            let binary = module(fields);
            let merged = merge(&binary);
            let (count, memory) = effect(&binary);
            let (fewer, same) = effect(&merged);
            assert_eq!((count, fewer), (before, after), "{fields}");
            assert!(memory == same, "{fields}");
        }
    }

    #[test]
    fn modules_with_an_imported_memory_and_invalid_modules_are_unchanged() {
        let imported = wat::parse_str(
            r#"(module (import "a" "b" (memory 1))
                (data (i32.const 8) "a") (data (i32.const 12) "b"))"#,
        );
        let imported = imported.unwrap();
        assert_eq!(merge(&imported), imported);
        let binary = module(r#"(data (i32.const 8) "a") (data (i32.const 12) "b")"#);
        for length in 0..binary.len() {
            let cut = &binary[..length];
            assert!(merge(cut).len() <= length);
        }
    }

    #[test]
    fn modules_within_components_are_merged() {
        let component = wat::parse_str(
            r#"(component (component (core module (memory 1)
                (data (i32.const 8) "a") (data (i32.const 12) "b"))))"#,
        );
        let component = component.unwrap();
        let merged = merge(&component);
        assert_ne!(merged, component);
        wasmtime::component::Component::new(&Engine::default(), &merged).unwrap();
    }
}

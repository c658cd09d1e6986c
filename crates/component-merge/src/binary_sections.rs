//! Binary format of modules and components: reading and writing of sections and LEB128 numbers.

use std::borrow::Cow;
use wasmparser::{BinaryReader, Result};

/// Magic number and version of a core module.
pub(crate) const MODULE_HEAD: &[u8] = b"\0asm\x01\0\0\0";
/// Magic number and version of a component.
pub(crate) const COMPONENT_HEAD: &[u8] = b"\0asm\x0d\0\x01\0";

/// Id and content of a section.
pub(crate) type Section<'a> = (u8, Cow<'a, [u8]>);

/// Parses the sections after the head of a module or component.
pub(crate) fn sections(body: &[u8]) -> Result<Vec<Section<'_>>> {
    let found = borrowed_sections(body)?.into_iter();
    Ok(found
        .map(|(id, content)| (id, Cow::Borrowed(content)))
        .collect())
}

/// Parses the sections after the head of a module or component. Returns slices of `body`.
pub(crate) fn borrowed_sections(body: &[u8]) -> Result<Vec<(u8, &[u8])>> {
    let mut reader = BinaryReader::new(body, 0);
    let mut sections = Vec::new();
    while !reader.eof() {
        let id = reader.read_u8()?;
        let length = usize::try_from(reader.read_var_u32()?).unwrap_or(usize::MAX);
        sections.push((id, reader.read_bytes(length)?));
    }
    Ok(sections)
}

/// Returns a binary that consists of a head and sections.
pub(crate) fn assemble(head: &[u8], sections: &[Section<'_>]) -> Vec<u8> {
    let mut binary = head.to_vec();
    for (id, content) in sections {
        write_section(&mut binary, *id, content);
    }
    binary
}

/// Writes a section.
pub(crate) fn write_section(into: &mut Vec<u8>, id: u8, content: &[u8]) {
    into.push(id);
    write_bytes(into, content);
}

/// Writes an unsigned LEB128 number.
pub(crate) fn write_number(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.extend(number.to_le_bytes().first().map(|low| low | 0x80));
        number >>= 7;
    }
    into.extend(number.to_le_bytes().first());
}

/// Writes a signed LEB128 number.
pub(crate) fn write_signed(into: &mut Vec<u8>, mut number: i64) {
    while !(-0x40..0x40).contains(&number) {
        into.extend(number.to_le_bytes().first().map(|low| low | 0x80));
        number >>= 7;
    }
    into.extend(number.to_le_bytes().first().map(|low| low & 0x7f));
}

/// Writes the length of `bytes`, then `bytes`.
pub(crate) fn write_bytes(into: &mut Vec<u8>, bytes: &[u8]) {
    write_number(into, bytes.len() as u64);
    into.extend_from_slice(bytes);
}

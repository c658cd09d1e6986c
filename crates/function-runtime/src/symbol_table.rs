//! Removes the symbol table from compiled machine code, an ELF file in the format of Wasmtime. Only
//! profilers read the table. Each loaded function has a copy, which is a tenth of the function's
//! memory.

/// Offsets in the header of a 64-bit ELF file: `e_shoff`, `e_phnum`, `e_shentsize`, `e_shnum` and
/// `e_shstrndx`.
const SECTIONS_AT: usize = 0x28;
const SEGMENTS_NUMBER: usize = 0x38;
const SECTION_BYTES_AT: usize = 0x3a;
const SECTIONS_NUMBER: usize = 0x3c;
const NAMES_INDEX: usize = 0x3e;
/// Offsets in a section header: `sh_type`, `sh_offset`, `sh_size` and `sh_link`.
const KIND: usize = 4;
const OFFSET: usize = 24;
const LENGTH: usize = 32;
const LINK: usize = 40;
const SECTION_HEAD_BYTES: usize = 64;
/// Type of a section with symbols (`SHT_SYMTAB`). The link field of this section refers to the
/// section with the names of the symbols.
const SYMBOLS: u64 = 2;

/// Returns the code without its symbols. Code in an unknown format is returned unchanged.
pub(crate) fn strip(code: Vec<u8>) -> Vec<u8> {
    stripped(&code).unwrap_or(code)
}

/// Reads a little-endian number of `length` bytes.
fn number(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |n, b| (n << 8) | u64::from(*b)))
}

/// Writes a little-endian number of `length` bytes.
fn set(bytes: &mut [u8], at: usize, length: usize, number: usize) -> Option<()> {
    let number = u64::try_from(number).ok()?.to_le_bytes();
    bytes
        .get_mut(at..at.checked_add(length)?)?
        .copy_from_slice(number.get(..length)?);
    Some(())
}

fn size(bytes: &[u8], at: usize, length: usize) -> Option<usize> {
    usize::try_from(number(bytes, at, length)?).ok()
}

/// Returns the file without the sections of symbols and of their names. `None` if the file has an
/// unknown structure.
fn stripped(code: &[u8]) -> Option<Vec<u8>> {
    // 64-bit little-endian ELF without segments, whose offsets would also have to change.
    let is_known = code.starts_with(b"\x7fELF\x02\x01")
        && size(code, SECTION_BYTES_AT, 2)? == SECTION_HEAD_BYTES
        && size(code, SEGMENTS_NUMBER, 2)? == 0;
    if !is_known {
        return None;
    }
    let names = size(code, NAMES_INDEX, 2)?;
    let sections_at = size(code, SECTIONS_AT, 8)?;
    let sections_end = SECTION_HEAD_BYTES * size(code, SECTIONS_NUMBER, 2)? + sections_at;
    let heads = code.get(sections_at..sections_end)?;
    let heads: Vec<_> = heads.chunks_exact(SECTION_HEAD_BYTES).collect();
    let symbols = heads
        .iter()
        .position(|head| number(head, KIND, 4) == Some(SYMBOLS))?;
    let symbol_names = size(heads.get(symbols)?, LINK, 4)?;
    let removed = [symbols, symbol_names];
    // In the expected layout, only the names of sections follow the symbols and their names. The
    // loop below returns `None` for another layout.
    let end = size(heads.get(symbols)?, OFFSET, 8)?.min(size(heads.get(symbol_names)?, OFFSET, 8)?);
    // The names of sections are needed, and section headers must follow the removed parts.
    if removed.contains(&names) || end > sections_at {
        return None;
    }
    let mut written = code.get(..end)?.to_vec();
    let mut kept = Vec::new();
    for (index, head) in heads.iter().enumerate() {
        if removed.contains(&index) {
            continue;
        }
        let mut head = head.to_vec();
        let (from, length) = (size(&head, OFFSET, 8)?, size(&head, LENGTH, 8)?);
        // The names of sections follow the symbols and move to their place.
        if index == names {
            set(&mut head, OFFSET, 8, written.len())?;
            written.extend_from_slice(code.get(from..from.checked_add(length)?)?);
        } else if from.checked_add(length)? > end || number(&head, LINK, 4)? != 0 {
            // A section behind the removed parts, or with a reference to another section.
            return None;
        }
        kept.extend_from_slice(&head);
    }
    // Section headers are aligned to 8 bytes.
    written.resize(written.len().next_multiple_of(8), 0);
    let sections_at = written.len();
    let number_kept = kept.len() / SECTION_HEAD_BYTES;
    // Sections are referred to by index: count the removed sections before the names.
    let before = removed.iter().filter(|index| **index < names).count();
    written.extend_from_slice(&kept);
    set(&mut written, SECTIONS_AT, 8, sections_at)?;
    set(&mut written, SECTIONS_NUMBER, 2, number_kept)?;
    set(&mut written, NAMES_INDEX, 2, names - before)?;
    Some(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine;
    use wasmtime::{Instance, Module, Store};

    #[test]
    fn code_without_symbols_is_smaller_and_runs() {
        let engine = engine::compiling().unwrap();
        let functions: String = (0..100)
            .map(|n| format!("(func (export \"f{n}\") (result i32) (i32.const {n}))"))
            .collect();
        let binary = wat::parse_str(format!("(module {functions})")).unwrap();
        let code = Module::new(&engine, binary).unwrap().serialize().unwrap();
        let stripped = strip(code.clone());
        assert!(stripped.len() + 4000 < code.len(), "{}", stripped.len());
        assert!(!stripped.windows(7).any(|name| name == b"wasm[0]"));
        // SAFETY: the code above compiled it.
        let module = unsafe { Module::deserialize(&engine, &stripped) }.unwrap();
        let mut store = Store::new(&engine, ());
        store.set_epoch_deadline(1);
        let instance = Instance::new(&mut store, &module, &[]).unwrap();
        let last = instance.get_typed_func::<(), u32>(&mut store, "f99");
        assert_eq!(last.unwrap().call(&mut store, ()).unwrap(), 99);
    }

    #[test]
    fn code_in_an_unknown_format_is_unchanged() {
        let engine = engine::compiling().unwrap();
        let binary = wat::parse_str("(module (func))").unwrap();
        let code = Module::new(&engine, binary).unwrap().serialize().unwrap();
        let once = strip(code.clone());
        assert_eq!(strip(once.clone()), once);
        for length in 0..SECTION_HEAD_BYTES {
            assert_eq!(strip(code[..length].to_vec()), code[..length]);
        }
    }
}

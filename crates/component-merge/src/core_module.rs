//! Parsed core modules, and the error of all steps of a merge.
//!
//! A component contains several core modules, which this crate merges into one.

use std::collections::HashMap;
use wasm_encoder::reencode;
use wasmparser::{
    CompositeInnerType, DataSectionReader, ElementSectionReader, Export, ExternalKind, FuncType,
    FunctionBody, Global, Import, KnownCustom, MemoryType, NameSectionReader, Parser, Payload,
    RefType, Table, TypeRef, ValType,
};

/// Error: the module or component cannot be merged. The caller uses it unchanged.
#[derive(Debug)]
pub(crate) struct Unmergeable;

impl From<wasmparser::Error> for Unmergeable {
    fn from(_: wasmparser::Error) -> Self {
        Self
    }
}

impl From<reencode::Error> for Unmergeable {
    fn from(_: reencode::Error) -> Self {
        Self
    }
}

pub(crate) type Result<T, E = Unmergeable> = std::result::Result<T, E>;

/// Number of kinds of imports and exports. A kind ([`FUNCTION`], [`TABLE`], [`MEMORY`], [`GLOBAL`])
/// is an index into arrays of this length.
pub(crate) const KINDS: usize = 4;
pub(crate) const FUNCTION: usize = 0;
pub(crate) const TABLE: usize = 1;
pub(crate) const MEMORY: usize = 2;
pub(crate) const GLOBAL: usize = 3;

/// Returns the number of an export's kind. Fails for tags: exceptions are not supported.
pub(crate) fn kind_number(kind: ExternalKind) -> Result<usize> {
    match kind {
        ExternalKind::Func | ExternalKind::FuncExact => Ok(FUNCTION),
        ExternalKind::Table => Ok(TABLE),
        ExternalKind::Memory => Ok(MEMORY),
        ExternalKind::Global => Ok(GLOBAL),
        ExternalKind::Tag => Err(Unmergeable),
    }
}

/// Returns the number of an import's kind. Fails for tags and for functions of an exact type, which
/// are not supported.
pub(crate) fn kind_of(import: &TypeRef) -> Result<usize> {
    match import {
        TypeRef::Func(_) => Ok(FUNCTION),
        TypeRef::Table(_) => Ok(TABLE),
        TypeRef::Memory(_) => Ok(MEMORY),
        TypeRef::Global(_) => Ok(GLOBAL),
        TypeRef::Tag(_) | TypeRef::FuncExact(_) => Err(Unmergeable),
    }
}

/// Converts an index to the type of the binary format.
pub(crate) fn narrow(number: usize) -> Result<u32> {
    u32::try_from(number).map_err(|_| Unmergeable)
}

/// Parsed core module. The lists are in the order of the binary. The position of a definition in
/// its list is its index minus the number of imports of its kind.
#[derive(Default)]
pub(crate) struct CoreModule<'a> {
    /// Types of functions.
    pub(crate) types: Vec<FuncType>,
    pub(crate) imports: Vec<Import<'a>>,
    /// Index of the type of each function.
    pub(crate) functions: Vec<u32>,
    pub(crate) tables: Vec<Table<'a>>,
    pub(crate) memories: Vec<MemoryType>,
    pub(crate) globals: Vec<Global<'a>>,
    /// Exports by name.
    pub(crate) exports: HashMap<&'a str, Export<'a>>,
    pub(crate) elements: Option<ElementSectionReader<'a>>,
    /// Code of each function.
    pub(crate) bodies: Vec<FunctionBody<'a>>,
    pub(crate) data: Option<DataSectionReader<'a>>,
    pub(crate) has_data_count: bool,
    /// Names for debugging.
    pub(crate) names: Option<NameSectionReader<'a>>,
}

/// Returns whether a type is a number, a vector, or one of the reference types of WebAssembly 2.0.
fn is_plain(value: ValType) -> bool {
    match value {
        ValType::Ref(reference) => reference == RefType::FUNCREF || reference == RefType::EXTERNREF,
        _ => true,
    }
}

impl<'a> CoreModule<'a> {
    /// Parses a module. Fails if the module has a start function, or types beyond WebAssembly 2.0.
    pub(crate) fn parse(binary: &'a [u8]) -> Result<Self> {
        let mut module = Self::default();
        for payload in Parser::new(0).parse_all(binary) {
            match payload? {
                Payload::TypeSection(types) => {
                    for ty in types.into_iter() {
                        module.add_types(ty?)?;
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        module.imports.push(import?);
                    }
                }
                Payload::FunctionSection(section) => {
                    module.functions = section.into_iter().collect::<Result<_, _>>()?;
                }
                Payload::TableSection(section) => {
                    module.tables = section.into_iter().collect::<Result<_, _>>()?;
                }
                Payload::MemorySection(section) => {
                    module.memories = section.into_iter().collect::<Result<_, _>>()?;
                }
                Payload::GlobalSection(section) => {
                    module.globals = section.into_iter().collect::<Result<_, _>>()?;
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export?;
                        module.exports.insert(export.name, export);
                    }
                }
                Payload::ElementSection(section) => module.elements = Some(section),
                Payload::DataCountSection { .. } => module.has_data_count = true,
                Payload::DataSection(section) => module.data = Some(section),
                Payload::CodeSectionEntry(body) => module.bodies.push(body),
                Payload::CustomSection(custom) => {
                    // Other custom sections are dropped: they may contain offsets in this binary.
                    if let KnownCustom::Name(names) = custom.as_known() {
                        module.names = Some(names);
                    }
                }
                Payload::Version { .. } | Payload::CodeSectionStart { .. } | Payload::End(_) => {}
                // A start function must run before the segments of the next module are applied.
                // Tags and unknown sections are not supported.
                _ => return Err(Unmergeable),
            }
        }
        Ok(module)
    }

    /// Adds the function types of a group.
    fn add_types(&mut self, group: wasmparser::RecGroup) -> Result<()> {
        let is_group = group.is_explicit_rec_group();
        for ty in group.into_types() {
            let CompositeInnerType::Func(function) = ty.composite_type.inner else {
                return Err(Unmergeable);
            };
            let mut values = function.params().iter().chain(function.results());
            // Types in groups are compared by group, which `Linker::add_types` does not support.
            if is_group
                || !ty.is_final
                || ty.supertype_idx.is_some()
                || ty.composite_type.shared
                || !values.all(|value| is_plain(*value))
            {
                return Err(Unmergeable);
            }
            self.types.push(function);
        }
        Ok(())
    }

    /// Returns the number of definitions by kind.
    pub(crate) fn defined(&self) -> [usize; KINDS] {
        [
            self.functions.len(),
            self.tables.len(),
            self.memories.len(),
            self.globals.len(),
        ]
    }
}

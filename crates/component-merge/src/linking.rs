//! Linking of core modules (the members of a merge) into one. An import of one member from another
//! becomes an index within the linked module.

use crate::Limits;
use crate::core_module::{
    CoreModule, FUNCTION, GLOBAL, KINDS, MEMORY, Result, TABLE, Unmergeable, kind_of, narrow,
};
use crate::items::wide;
use std::collections::HashMap;
use std::convert::Infallible;
use wasm_encoder::reencode::{self, Reencode};
use wasmparser::{ConstExpr, ElementItems, FuncType, Name, Operator, TypeRef};

/// Upper bounds of the bytes in Wasmtime's record of an instance: for each import, export and entry
/// of an element segment, for each global, and for everything else.
const REFERENCE_BYTES: usize = 32;
const GLOBAL_BYTES: usize = 16;
const OTHER_INSTANCE_BYTES: usize = 64 << 10;

type Reencoded<T> = Result<T, reencode::Error>;

/// Definition to which an import of a member refers.
#[derive(Clone, Copy)]
pub(crate) enum ImportTarget {
    /// Import of the linked module, by its number among these imports.
    External(usize),
    /// Item of an earlier member, by its kind and its index in that member.
    Member {
        member: usize,
        kind: usize,
        index: u32,
    },
}

/// Core module that is merged with others.
pub(crate) struct Member<'a> {
    pub(crate) module: &'a CoreModule<'a>,
    /// Target of each import, in order.
    pub(crate) imports: Vec<ImportTarget>,
}

/// Export of the linked module: an item of a member, by its kind and its index in that member.
pub(crate) struct LinkedExport {
    pub(crate) name: String,
    pub(crate) member: usize,
    pub(crate) kind: usize,
    pub(crate) index: u32,
}

/// Known value of an immutable global.
#[derive(Clone, Copy)]
enum Constant {
    I32(i32),
    I64(i64),
}

/// Maps the indices of a member's types and items to indices in the linked module.
#[derive(Default)]
struct Numbers {
    /// New indices, by old index.
    types: Vec<u32>,
    /// New indices by kind and old index. Imports come first.
    items: [Vec<u32>; KINDS],
    /// New index of the first element segment.
    first_element: u32,
    /// New index of the first data segment.
    first_data: u32,
}

/// Reencoder of one member, which replaces all indices.
struct Relocation<'a> {
    numbers: &'a Numbers,
    /// Values of immutable globals, by index in the linked module.
    constants: &'a [Option<Constant>],
}

/// Returns the new index of `index`.
fn new_index(numbers: &[u32], index: u32) -> Reencoded<u32> {
    let found = usize::try_from(index).ok().and_then(|at| numbers.get(at));
    found.copied().ok_or(reencode::Error::InvalidConstExpr)
}

impl Relocation<'_> {
    /// Returns the new index of a function, table, memory or global.
    fn item(&self, kind: usize, index: u32) -> Reencoded<u32> {
        let numbers = self.numbers.items.get(kind).map_or(&[][..], Vec::as_slice);
        new_index(numbers, index)
    }

    /// Evaluates a constant expression of integers. Returns `None` if the value depends on an
    /// import, or if the expression has other operators. The expression may read globals of earlier
    /// members, whose values are known.
    fn constant(&self, expression: &ConstExpr<'_>) -> Result<Option<Constant>> {
        // Constant expressions are programs of a stack machine.
        let mut stack = Vec::new();
        for operator in expression.get_operators_reader() {
            let top = |stack: &mut Vec<Constant>| stack.pop().ok_or(Unmergeable);
            match operator? {
                Operator::I32Const { value } => stack.push(Constant::I32(value)),
                Operator::I64Const { value } => stack.push(Constant::I64(value)),
                Operator::GlobalGet { global_index } => {
                    let number = self.item(GLOBAL, global_index)?;
                    let at = usize::try_from(number).map_err(|_| Unmergeable)?;
                    let Some(Some(value)) = self.constants.get(at) else {
                        // A mutable global, or a global that the linked module imports.
                        return Ok(None);
                    };
                    stack.push(*value);
                }
                Operator::I32Add => match (top(&mut stack)?, top(&mut stack)?) {
                    (Constant::I32(a), Constant::I32(b)) => {
                        stack.push(Constant::I32(a.wrapping_add(b)));
                    }
                    _ => return Err(Unmergeable),
                },
                Operator::End => {}
                // Another operator is valid, but its value is not computed here.
                _ => return Ok(None),
            }
        }
        Ok(stack.pop())
    }
}

impl Reencode for Relocation<'_> {
    type Error = Infallible;

    fn type_index(&mut self, index: u32) -> Reencoded<u32> {
        new_index(&self.numbers.types, index)
    }

    fn function_index(&mut self, index: u32) -> Reencoded<u32> {
        self.item(FUNCTION, index)
    }

    fn table_index(&mut self, index: u32) -> Reencoded<u32> {
        self.item(TABLE, index)
    }

    fn memory_index(&mut self, index: u32) -> Reencoded<u32> {
        self.item(MEMORY, index)
    }

    fn global_index(&mut self, index: u32) -> Reencoded<u32> {
        self.item(GLOBAL, index)
    }

    fn element_index(&mut self, index: u32) -> Reencoded<u32> {
        // Wraps only for invalid input. The caller validates the output.
        Ok(index.wrapping_add(self.numbers.first_element))
    }

    fn data_index(&mut self, index: u32) -> Reencoded<u32> {
        Ok(index.wrapping_add(self.numbers.first_data))
    }

    fn const_expr(&mut self, expression: ConstExpr<'_>) -> Reencoded<wasm_encoder::ConstExpr> {
        match self.constant(&expression) {
            Ok(Some(Constant::I32(value))) => Ok(wasm_encoder::ConstExpr::i32_const(value)),
            Ok(Some(Constant::I64(value))) => Ok(wasm_encoder::ConstExpr::i64_const(value)),
            Ok(None) => reencode::utils::const_expr(self, expression),
            Err(Unmergeable) => Err(reencode::Error::InvalidConstExpr),
        }
    }
}

/// Links `members` into one module. The module imports `externals` items from the module "", named
/// by their numbers. Segments are applied in the order of the members, segments of tables before
/// segments of memories.
///
/// # Errors
///
/// Fails if the linked module exceeds `limits`.
pub(crate) fn link(
    members: &[Member<'_>],
    externals: usize,
    exports: &[LinkedExport],
    limits: &Limits,
) -> Result<Vec<u8>> {
    Linker::default().link(members, externals, exports, limits)
}

/// Sections of the linked module.
#[derive(Default)]
struct Linker {
    /// Indices by member.
    numbers: Vec<Numbers>,
    /// Values of the linked module's globals, if known, by index.
    constants: Vec<Option<Constant>>,
    /// Indices of the types, so that equal types are written once.
    known_types: HashMap<FuncType, u32>,
    types: wasm_encoder::TypeSection,
    imports: wasm_encoder::ImportSection,
    functions: wasm_encoder::FunctionSection,
    tables: wasm_encoder::TableSection,
    memories: wasm_encoder::MemorySection,
    globals: wasm_encoder::GlobalSection,
    elements: wasm_encoder::ElementSection,
    code: wasm_encoder::CodeSection,
    data: wasm_encoder::DataSection,
    names: wasm_encoder::NameMap,
}

impl Linker {
    /// Merges the core modules `members` into one module. `externals` is the number of functions
    /// that are imported from outside, and `exports` lists the exports of the result.
    fn link(
        mut self,
        members: &[Member<'_>],
        externals: usize,
        exports: &[LinkedExport],
        limits: &Limits,
    ) -> Result<Vec<u8>> {
        // The order matters: imports refer to types, and definitions refer to imports.
        self.add_types(members)?;
        let imported = self.import(members, externals)?;
        self.number(members, &imported)?;
        let mut has_data_count = false;
        for (at, member) in members.iter().enumerate() {
            self.add(at, member.module)?;
            has_data_count |= member.module.has_data_count;
        }
        // Check the limits here: the runtime would reject every instance beyond them.
        let instance_bytes = self.max_instance_bytes(members, externals + exports.len())?;
        self.check_limits(limits, instance_bytes)?;
        let export_section = self.export_section(exports)?;
        Ok(self.finish(&export_section, has_data_count))
    }

    /// Returns the export section of the linked module.
    fn export_section(&self, exports: &[LinkedExport]) -> Result<wasm_encoder::ExportSection> {
        let mut export_section = wasm_encoder::ExportSection::new();
        for export in exports {
            let number = self.number_of(export.member, export.kind, export.index)?;
            let kind = match export.kind {
                FUNCTION => wasm_encoder::ExportKind::Func,
                TABLE => wasm_encoder::ExportKind::Table,
                MEMORY => wasm_encoder::ExportKind::Memory,
                _ => wasm_encoder::ExportKind::Global,
            };
            export_section.export(&export.name, kind, number);
        }
        Ok(export_section)
    }

    /// Writes the sections in the order of the binary format.
    fn finish(self, exports: &wasm_encoder::ExportSection, has_data_count: bool) -> Vec<u8> {
        let mut module = wasm_encoder::Module::new();
        module
            .section(&self.types)
            .section(&self.imports)
            .section(&self.functions)
            .section(&self.tables)
            .section(&self.memories)
            .section(&self.globals)
            .section(exports)
            .section(&self.elements);
        // Without the section, instructions must not refer to data segments.
        if has_data_count {
            let count = self.data.len();
            module.section(&wasm_encoder::DataCountSection { count });
        }
        module.section(&self.code).section(&self.data);
        if !self.names.is_empty() {
            let mut names = wasm_encoder::NameSection::new();
            names.functions(&self.names);
            module.section(&names);
        }
        module.finish()
    }

    /// Returns an upper bound of the size of an instance's record. `references` is the number of
    /// imports and exports.
    fn max_instance_bytes(&self, members: &[Member<'_>], mut references: usize) -> Result<usize> {
        let element_sections = members
            .iter()
            .filter_map(|member| member.module.elements.as_ref());
        for elements in element_sections {
            // Every function in a segment needs a reference in the instance's record.
            for element in elements.clone() {
                references += match element?.items {
                    ElementItems::Functions(functions) => wide(functions.count()),
                    ElementItems::Expressions(_, expressions) => wide(expressions.count()),
                };
            }
        }
        let globals = self.constants.len();
        Ok(references * REFERENCE_BYTES + globals * GLOBAL_BYTES + OTHER_INSTANCE_BYTES)
    }

    /// Fails if the members exceed a limit together. Each member is within the limits by itself.
    fn check_limits(&self, limits: &Limits, instance_bytes: usize) -> Result<()> {
        let is_within = self.memories.len() <= limits.memories
            && self.tables.len() <= limits.tables
            && instance_bytes < limits.instance_bytes;
        if is_within { Ok(()) } else { Err(Unmergeable) }
    }

    /// Adds the types of all members. Equal types get the same index.
    fn add_types(&mut self, members: &[Member<'_>]) -> Result<()> {
        for member in members {
            let mut numbers = Numbers::default();
            for ty in &member.module.types {
                let number = match self.known_types.get(ty) {
                    Some(number) => *number,
                    None => {
                        let number = narrow(self.known_types.len())?;
                        // Types are compared by their structure, so a hash map finds equal types.
                        let ty = self.known_types.entry(ty.clone()).insert_entry(number);
                        let plain = reencode::RoundtripReencoder.func_type(ty.key().clone())?;
                        self.types.ty().func_type(&plain);
                        number
                    }
                };
                numbers.types.push(number);
            }
            self.numbers.push(numbers);
        }
        Ok(())
    }

    /// Adds the imports that no member defines. Returns the kind and the new index of each external
    /// item, by the number of the item.
    fn import(&mut self, members: &[Member<'_>], externals: usize) -> Result<Vec<(usize, u32)>> {
        // By number of the external item: the first member that imports the item, and the type of
        // this import. The linked module imports the item with the same type.
        let mut found = vec![None; externals];
        for (at, member) in members.iter().enumerate() {
            for (import, target) in member.module.imports.iter().zip(&member.imports) {
                if let ImportTarget::External(external) = target {
                    let place = found.get_mut(*external).ok_or(Unmergeable)?;
                    place.get_or_insert((at, import.ty));
                }
            }
        }
        let mut counts = [0; KINDS];
        let mut imported = Vec::new();
        for (external, place) in found.into_iter().enumerate() {
            // Every external item is imported by at least one member.
            let (at, ty) = place.ok_or(Unmergeable)?;
            let kind = kind_of(&ty)?;
            // Types of imports refer to types only, so no constants are needed.
            let mut relocation = Relocation {
                numbers: self.numbers.get(at).ok_or(Unmergeable)?,
                constants: &[],
            };
            let entity = relocation.entity_type(ty)?;
            self.imports.import("", &external.to_string(), entity);
            let count = counts.get_mut(kind).ok_or(Unmergeable)?;
            imported.push((kind, *count));
            *count += 1;
            if kind == GLOBAL {
                self.constants.push(None);
            }
        }
        Ok(imported)
    }

    /// Returns the new index of a member's item.
    fn number_of(&self, member: usize, kind: usize, index: u32) -> Result<u32> {
        let numbers = self.numbers.get(member).ok_or(Unmergeable)?;
        let items = numbers.items.get(kind).ok_or(Unmergeable)?;
        Ok(new_index(items, index)?)
    }

    /// Assigns indices to the items of all members: first to the imports, then to the definitions
    /// of the members in order.
    fn number(&mut self, members: &[Member<'_>], imported: &[(usize, u32)]) -> Result<()> {
        let mut next = [0_u32; KINDS];
        for (kind, _) in imported {
            *next.get_mut(*kind).ok_or(Unmergeable)? += 1;
        }
        for (at, member) in members.iter().enumerate() {
            let mut items: [Vec<u32>; KINDS] = Default::default();
            for (import, target) in member.module.imports.iter().zip(&member.imports) {
                let (kind, number) = match *target {
                    ImportTarget::External(external) => {
                        *imported.get(external).ok_or(Unmergeable)?
                    }
                    ImportTarget::Member {
                        member,
                        kind,
                        index,
                    } => (kind, self.number_of(member, kind, index)?),
                };
                // An invalid component may pass an item of another kind.
                if kind != kind_of(&import.ty)? {
                    return Err(Unmergeable);
                }
                items.get_mut(kind).ok_or(Unmergeable)?.push(number);
            }
            for ((items, next), defined) in
                items.iter_mut().zip(&mut next).zip(member.module.defined())
            {
                let end = next.checked_add(narrow(defined)?).ok_or(Unmergeable)?;
                items.extend(*next..end);
                *next = end;
            }
            self.numbers.get_mut(at).ok_or(Unmergeable)?.items = items;
        }
        Ok(())
    }

    /// Adds the definitions of a member. Its indices must be assigned.
    fn add(&mut self, at: usize, module: &CoreModule<'_>) -> Result<()> {
        let numbers = self.numbers.get_mut(at).ok_or(Unmergeable)?;
        numbers.first_element = self.elements.len();
        numbers.first_data = self.data.len();
        let numbers = &*numbers;
        // Globals come first, since segments and later members use their values.
        for global in &module.globals {
            let mut relocation = Relocation {
                numbers,
                constants: &self.constants,
            };
            relocation.parse_global(&mut self.globals, global.clone())?;
            let value = if global.ty.mutable {
                None
            } else {
                relocation.constant(&global.init_expr)?
            };
            self.constants.push(value);
        }
        let mut relocation = Relocation {
            numbers,
            constants: &self.constants,
        };
        for ty in &module.functions {
            self.functions.function(relocation.type_index(*ty)?);
        }
        for table in &module.tables {
            relocation.parse_table(&mut self.tables, table.clone())?;
        }
        for memory in &module.memories {
            self.memories.memory(relocation.memory_type(*memory)?);
        }
        if let Some(elements) = &module.elements {
            relocation.parse_element_section(&mut self.elements, elements.clone())?;
        }
        for body in &module.bodies {
            relocation.parse_function_body(&mut self.code, body.clone())?;
        }
        if let Some(data) = &module.data {
            relocation.parse_data_section(&mut self.data, data.clone())?;
        }
        // Imported functions have the first indices. Their names are skipped: a function gets its
        // name from the member that defines it.
        let imported = module.imports.iter();
        let imported = imported.filter(|import| matches!(import.ty, TypeRef::Func(_)));
        let imported = narrow(imported.count())?;
        for subsection in module.names.clone().into_iter().flatten() {
            // Names only serve debugging: ignore names that cannot be parsed.
            let Ok(Name::Function(names)) = subsection else {
                continue;
            };
            for name in names.into_iter().map_while(Result::ok) {
                if name.index >= imported
                    && let Ok(number) = relocation.function_index(name.index)
                {
                    self.names.append(number, name.name);
                }
            }
        }
        Ok(())
    }
}

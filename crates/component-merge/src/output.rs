//! Writes the component with the merged module in place of its members.
//!
//! The *members* are the core modules that were merged into one.

use crate::Limits;
use crate::binary_sections::{COMPONENT_HEAD, MODULE_HEAD, write_section};
use crate::core_module::{FUNCTION, KINDS, Result, Unmergeable, kind_number, narrow};
use crate::items::{CORE_MODULE, Item, Reference, option_reference, wide};
use crate::linking::link;
use crate::plan::{External, Placement, Plan, export_name, imports_from};
use std::collections::{HashMap, HashSet};
use wasm_encoder::{
    Alias, CanonicalFunctionSection, ComponentAliasSection, ComponentSection, ExportKind,
    InstanceSection, ModuleArg,
};
use wasmparser::{CanonicalFunction, CanonicalOption, Instance};

/// Kinds of exports, by the number of the kind of a core item (see `kind_number`).
const EXPORT_KINDS: [ExportKind; KINDS] = [
    ExportKind::Func,
    ExportKind::Table,
    ExportKind::Memory,
    ExportKind::Global,
];

fn export_kind(kind: usize) -> Result<ExportKind> {
    EXPORT_KINDS.get(kind).copied().ok_or(Unmergeable)
}

/// Component that is being written, with the new indices of its items.
pub(crate) struct Output<'p, 'a> {
    plan: &'p Plan<'p, 'a>,
    binary: Vec<u8>,
    /// New indices of core instances and core items, by position of the defining item in
    /// `plan.items.list`.
    numbers: HashMap<usize, u32>,
    /// Index of the next core instance.
    next_instance: u32,
    /// Indices of the next core items, by kind.
    next_core: [u32; KINDS],
    /// Core instance of the merged module.
    merged_instance: u32,
}

impl<'p, 'a: 'p> Output<'p, 'a> {
    /// Writes the component of a plan.
    pub(crate) fn write(plan: &'p Plan<'p, 'a>, limits: &Limits) -> Result<Vec<u8>> {
        let mut output = Self {
            plan,
            binary: COMPONENT_HEAD.to_vec(),
            numbers: HashMap::new(),
            next_instance: 0,
            next_core: [0; KINDS],
            merged_instance: 0,
        };
        // The exports of the merged module depend on the items that are written.
        let is_written = plan.written_items()?;
        let (members, externals) = plan.resolved_members()?;
        let merged = link(
            &members,
            externals.len(),
            &plan.exports(&is_written)?,
            limits,
        )?;
        // The merged module is instantiated in place of the last member: all other items that it
        // requires are written before.
        let (last_instance, last_module) = *plan.members.last().ok_or(Unmergeable)?;
        let last = plan.items.target(Reference::Instance(last_instance))?;
        let replaced: HashSet<_> = plan.members.iter().map(|(_, module)| *module).collect();
        // Index of the next core module.
        let mut modules = 0;
        // Items that require a member but precede the last member. They are written after it.
        let mut deferred = Vec::new();
        for (at, item) in plan.items.list.iter().enumerate() {
            if let Item::Module(binary) = item {
                // The indices of modules do not change. The merged module takes the place of the
                // last member's module; the modules of the other members become empty.
                let binary = match (modules == last_module, replaced.contains(&modules)) {
                    (true, _) => &merged,
                    (false, true) => MODULE_HEAD,
                    (false, false) => binary,
                };
                write_section(&mut output.binary, CORE_MODULE, binary);
                modules += 1;
            } else if is_written.get(at) == Some(&true) {
                let is_deferred = at < last && plan.placements.get(at) > Some(&Placement::Before);
                if is_deferred {
                    deferred.push((at, item))
                } else {
                    output.item(at, item)?
                }
            } else if at == last {
                // The last member itself is not written. All external items have their new indices
                // now.
                output.instantiate(last_module, &externals)?;
                for (at, item) in deferred.drain(..) {
                    output.item(at, item)?;
                }
            }
        }
        Ok(output.binary)
    }

    /// Appends a section with one entry.
    fn section(&mut self, section: &impl ComponentSection) {
        section.append_to_component(&mut self.binary);
    }

    /// Returns the new index of a core instance or core item.
    fn new_number(&self, reference: Reference) -> Result<u32> {
        let at = self.plan.items.target(reference)?;
        self.numbers.get(&at).copied().ok_or(Unmergeable)
    }

    /// Assigns an index to a new core instance.
    fn count_instance(&mut self) -> u32 {
        let number = self.next_instance;
        self.next_instance += 1;
        number
    }

    /// Assigns an index to a new core item.
    fn count_core(&mut self, kind: usize) -> Result<u32> {
        let next = self.next_core.get_mut(kind).ok_or(Unmergeable)?;
        *next += 1;
        Ok(*next - 1)
    }

    /// Writes an alias of a core instance's export, and returns its index.
    fn alias(&mut self, instance: u32, kind: usize, name: &str) -> Result<u32> {
        let mut section = ComponentAliasSection::new();
        section.alias(Alias::CoreInstanceExport {
            instance,
            kind: export_kind(kind)?,
            name,
        });
        self.section(&section);
        self.count_core(kind)
    }

    /// Writes an instance that consists of listed items, and returns its index.
    fn instance_of(&mut self, exports: &[(String, ExportKind, u32)]) -> u32 {
        let mut section = InstanceSection::new();
        section.export_items(
            exports
                .iter()
                .map(|(name, kind, index)| (name, *kind, *index)),
        );
        self.section(&section);
        self.count_instance()
    }

    /// Writes the instance of the merged module with its imports.
    fn instantiate(&mut self, module: usize, externals: &[External<'a>]) -> Result<()> {
        let mut exports = Vec::new();
        // The only argument is an instance that lists the imported items. The name of each item is
        // its number.
        for (number, external) in externals.iter().enumerate() {
            let (kind, index) = match *external {
                External::Core { kind, index } => {
                    (kind, self.new_number(Reference::Core { kind, index })?)
                }
                External::OfInstance {
                    instance,
                    kind,
                    name,
                } => {
                    let instance = self.new_number(Reference::Instance(instance))?;
                    (kind, self.alias(instance, kind, name)?)
                }
            };
            exports.push((number.to_string(), export_kind(kind)?, index));
        }
        let imports = self.instance_of(&exports);
        let mut section = InstanceSection::new();
        section.instantiate(narrow(module)?, [("", ModuleArg::Instance(imports))]);
        self.section(&section);
        self.merged_instance = self.count_instance();
        Ok(())
    }

    /// Writes an item with new indices.
    fn item(&mut self, at: usize, item: &Item<'a>) -> Result<()> {
        let number = match item {
            Item::Other { section, content } => {
                write_section(&mut self.binary, *section, content);
                return Ok(());
            }
            Item::Module(_) => return Err(Unmergeable),
            Item::Instance(Instance::FromExports(exports)) => {
                let mut renumbered = Vec::new();
                for export in exports {
                    let kind = kind_number(export.kind)?;
                    let index = wide(export.index);
                    let number = self.new_number(Reference::Core { kind, index })?;
                    renumbered.push((export.name.to_owned(), export_kind(kind)?, number));
                }
                self.instance_of(&renumbered)
            }
            Item::Instance(Instance::Instantiate { module_index, args }) => {
                let mut arguments = Vec::new();
                for argument in args {
                    let instance = wide(argument.index);
                    // The instance of a member no longer exists. An instance with the same exports
                    // takes its place.
                    let number = match self.plan.member_of.get(&instance) {
                        Some(member) => {
                            self.instance_of_member(*member, wide(*module_index), argument.name)?
                        }
                        None => self.new_number(Reference::Instance(instance))?,
                    };
                    arguments.push((argument.name, ModuleArg::Instance(number)));
                }
                let mut section = InstanceSection::new();
                section.instantiate(*module_index, arguments);
                self.section(&section);
                self.count_instance()
            }
            Item::Alias {
                kind,
                instance,
                name,
            } => match self.plan.member_of.get(instance) {
                Some(member) => {
                    let name = export_name(*member, name);
                    self.alias(self.merged_instance, *kind, &name)?
                }
                None => {
                    let instance = self.new_number(Reference::Instance(*instance))?;
                    self.alias(instance, *kind, name)?
                }
            },
            Item::Canon(canon) => {
                self.canon(canon)?;
                // A lifted function has no core index.
                if matches!(canon, CanonicalFunction::Lift { .. }) {
                    return Ok(());
                }
                self.count_core(FUNCTION)?
            }
        };
        self.numbers.insert(at, number);
        Ok(())
    }

    /// Writes an instance with the exports of a member that a module imports under `from`.
    fn instance_of_member(&mut self, member: usize, module: usize, from: &str) -> Result<u32> {
        let mut exports = Vec::new();
        for (kind, name) in imports_from(self.plan.module(module)?, from)? {
            let number = self.alias(self.merged_instance, kind, &export_name(member, name))?;
            exports.push((name.to_owned(), export_kind(kind)?, number));
        }
        Ok(self.instance_of(&exports))
    }

    /// Writes a function that converts between core and component values.
    fn canon(&mut self, canon: &CanonicalFunction) -> Result<()> {
        let mut section = CanonicalFunctionSection::new();
        match canon {
            CanonicalFunction::Lift {
                core_func_index,
                type_index,
                options,
            } => {
                let index = wide(*core_func_index);
                let function = self.new_number(Reference::Core {
                    kind: FUNCTION,
                    index,
                })?;
                section.lift(function, *type_index, self.options(options)?);
            }
            CanonicalFunction::Lower {
                func_index,
                options,
            } => {
                section.lower(*func_index, self.options(options)?);
            }
            CanonicalFunction::ResourceNew { resource } => {
                section.resource_new(*resource);
            }
            CanonicalFunction::ResourceDrop { resource } => {
                section.resource_drop(*resource);
            }
            CanonicalFunction::ResourceRep { resource } => {
                section.resource_rep(*resource);
            }
            _ => return Err(Unmergeable),
        }
        self.section(&section);
        Ok(())
    }

    /// Returns the options with new indices.
    fn options(&self, options: &[CanonicalOption]) -> Result<Vec<wasm_encoder::CanonicalOption>> {
        let renumbered = |option: &CanonicalOption| {
            let number = match option_reference(*option) {
                Some(reference) => self.new_number(reference)?,
                // `number` is not used for these options.
                None => 0,
            };
            Ok(match option {
                CanonicalOption::Memory(_) => wasm_encoder::CanonicalOption::Memory(number),
                CanonicalOption::Realloc(_) => wasm_encoder::CanonicalOption::Realloc(number),
                CanonicalOption::PostReturn(_) => wasm_encoder::CanonicalOption::PostReturn(number),
                CanonicalOption::Callback(_) => wasm_encoder::CanonicalOption::Callback(number),
                CanonicalOption::UTF8 => wasm_encoder::CanonicalOption::UTF8,
                CanonicalOption::UTF16 => wasm_encoder::CanonicalOption::UTF16,
                CanonicalOption::CompactUTF16 => wasm_encoder::CanonicalOption::CompactUTF16,
                _ => return Err(Unmergeable),
            })
        };
        options.iter().map(renumbered).collect()
    }
}

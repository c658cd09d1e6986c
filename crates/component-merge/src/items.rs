//! Parses a component into items, and finds the references between the items.
//!
//! An *item* is a definition in the outermost component, for example a module, an instance or a
//! function. Items refer to earlier items by index.

use crate::binary_sections::{COMPONENT_HEAD, borrowed_sections, write_number};
use crate::core_module::{FUNCTION, KINDS, MEMORY, Result, Unmergeable, kind_number};
use std::borrow::Cow;
use wasmparser::{
    BinaryReader, CanonicalFunction, CanonicalOption, ComponentAlias, ComponentAliasSectionReader,
    ComponentCanonicalSectionReader, ComponentExportSectionReader, ComponentExternalKind,
    ComponentImportSectionReader, ComponentInstance, ComponentInstanceSectionReader,
    ComponentOuterAliasKind, ComponentType, ComponentTypeRef, ComponentTypeSectionReader, Instance,
    InstanceSectionReader,
};

/// Ids of a component's sections.
pub(crate) const CORE_MODULE: u8 = 1;
const CORE_INSTANCE: u8 = 2;
const COMPONENT: u8 = 4;
pub(crate) const COMPONENT_INSTANCE: u8 = 5;
const ALIAS: u8 = 6;
const TYPE: u8 = 7;
const CANON: u8 = 8;
const IMPORT: u8 = 10;
const EXPORT: u8 = 11;
/// Maximum depth of nested components.
const MAX_DEPTH: usize = 8;

/// Item of a component: a section, or one entry of a section.
pub(crate) enum Item<'a> {
    /// Section that has no reference to a core instance or to one of its items.
    Other { section: u8, content: Cow<'a, [u8]> },
    /// Core module.
    Module(&'a [u8]),
    /// Core instance.
    Instance(Instance<'a>),
    /// Alias of an export of a core instance.
    Alias {
        kind: usize,
        instance: usize,
        name: &'a str,
    },
    /// Core function that is lowered or built in, or component function that is lifted.
    Canon(CanonicalFunction),
}

/// Reference of an item to a core instance, or to a core item: a function, table, memory or global.
#[derive(Clone, Copy)]
pub(crate) enum Reference {
    Instance(usize),
    Core { kind: usize, index: usize },
}

/// Converts an index of the binary format to an index of a list.
pub(crate) fn wide(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Returns the core item that an option refers to.
pub(crate) fn option_reference(option: CanonicalOption) -> Option<Reference> {
    let (kind, index) = match option {
        CanonicalOption::Memory(index) => (MEMORY, index),
        CanonicalOption::Realloc(index)
        | CanonicalOption::PostReturn(index)
        | CanonicalOption::Callback(index) => (FUNCTION, index),
        // Other options, such as the string encoding, refer to no core item.
        _ => return None,
    };
    let index = wide(index);
    Some(Reference::Core { kind, index })
}

impl Item<'_> {
    /// Calls `visit` with each reference to a core instance or to one of its items.
    pub(crate) fn references(&self, mut visit: impl FnMut(Reference)) -> Result<()> {
        match self {
            Self::Other { .. } | Self::Module(_) => {}
            Self::Instance(Instance::Instantiate { args, .. }) => {
                for argument in args {
                    visit(Reference::Instance(wide(argument.index)));
                }
            }
            Self::Instance(Instance::FromExports(exports)) => {
                for export in exports {
                    let kind = kind_number(export.kind)?;
                    let index = wide(export.index);
                    visit(Reference::Core { kind, index });
                }
            }
            Self::Alias { instance, .. } => visit(Reference::Instance(*instance)),
            Self::Canon(canon) => {
                let options = match canon {
                    CanonicalFunction::Lift {
                        core_func_index,
                        options,
                        ..
                    } => {
                        let index = wide(*core_func_index);
                        visit(Reference::Core {
                            kind: FUNCTION,
                            index,
                        });
                        options
                    }
                    CanonicalFunction::Lower { options, .. } => options,
                    // Functions for resources refer to types of the component only.
                    _ => return Ok(()),
                };
                for option in options {
                    option_reference(*option).into_iter().for_each(&mut visit);
                }
            }
        }
        Ok(())
    }
}

/// Items of a component in order. The other lists contain the positions in `list` of core modules,
/// core instances and core items, by their index.
#[derive(Default)]
pub(crate) struct Items<'a> {
    pub(crate) list: Vec<Item<'a>>,
    pub(crate) modules: Vec<usize>,
    pub(crate) instances: Vec<usize>,
    pub(crate) core: [Vec<usize>; KINDS],
}

impl<'a> Items<'a> {
    /// Parses a component. Fails if a core module or a core function is used in a way that this
    /// crate does not support.
    pub(crate) fn parse(binary: &'a [u8]) -> Result<Self> {
        let body = binary.strip_prefix(COMPONENT_HEAD).ok_or(Unmergeable)?;
        let mut items = Self::default();
        for (section, content) in borrowed_sections(body)? {
            items.add_section(section, content)?;
        }
        Ok(items)
    }

    fn push(&mut self, item: Item<'a>) {
        self.list.push(item);
    }

    /// Parses a section of the component into items. Sections that a merge does not change are one
    /// item.
    fn add_section(&mut self, section: u8, content: &'a [u8]) -> Result<()> {
        let reader = BinaryReader::new(content, 0);
        match section {
            CORE_MODULE => {
                self.modules.push(self.list.len());
                self.push(Item::Module(content));
            }
            CORE_INSTANCE => {
                for instance in InstanceSectionReader::new(reader)? {
                    self.instances.push(self.list.len());
                    self.push(Item::Instance(instance?));
                }
            }
            ALIAS => self.add_aliases(content)?,
            CANON => {
                for canon in ComponentCanonicalSectionReader::new(reader)? {
                    self.add_canon(canon?)?;
                }
            }
            // Other sections are copied unchanged, so they must not contain indices that a merge
            // changes.
            _ => {
                check_section(section, content, MAX_DEPTH)?;
                let content = Cow::Borrowed(content);
                self.push(Item::Other { section, content });
            }
        }
        Ok(())
    }

    /// Parses a section of aliases into one item per alias.
    fn add_aliases(&mut self, content: &'a [u8]) -> Result<()> {
        let reader = ComponentAliasSectionReader::new(BinaryReader::new(content, 0))?;
        // The reader returns the offset of each alias, which is needed to copy it.
        let aliases: Vec<_> = reader.into_iter_with_offsets().collect::<Result<_, _>>()?;
        let ends = aliases.iter().skip(1).map(|(start, _)| *start);
        // Each alias ends where the next one starts.
        let ends: Vec<_> = ends.chain([content.len()]).collect();
        for ((start, alias), end) in aliases.into_iter().zip(ends) {
            check_alias(&alias)?;
            if let ComponentAlias::CoreInstanceExport {
                kind,
                instance_index,
                name,
            } = alias
            {
                let kind = kind_number(kind)?;
                let at = self.list.len();
                self.core.get_mut(kind).ok_or(Unmergeable)?.push(at);
                let instance = wide(instance_index);
                self.push(Item::Alias {
                    kind,
                    instance,
                    name,
                });
            } else {
                // A section with only this alias.
                let mut one = Vec::new();
                write_number(&mut one, 1);
                one.extend_from_slice(content.get(start..end).ok_or(Unmergeable)?);
                self.push(Item::Other {
                    section: ALIAS,
                    content: Cow::Owned(one),
                });
            }
        }
        Ok(())
    }

    /// Adds a canonical function, and counts it in the index space of core functions.
    fn add_canon(&mut self, canon: CanonicalFunction) -> Result<()> {
        match canon {
            // A lifted function is a function of the component, not a core function.
            CanonicalFunction::Lift { .. } => {}
            CanonicalFunction::Lower { .. }
            | CanonicalFunction::ResourceNew { .. }
            | CanonicalFunction::ResourceDrop { .. }
            | CanonicalFunction::ResourceRep { .. } => {
                let at = self.list.len();
                self.core.get_mut(FUNCTION).ok_or(Unmergeable)?.push(at);
            }
            _ => return Err(Unmergeable),
        }
        self.push(Item::Canon(canon));
        Ok(())
    }

    /// Returns the position of the item that defines the target of a reference.
    pub(crate) fn target(&self, reference: Reference) -> Result<usize> {
        let found = match reference {
            Reference::Instance(index) => self.instances.get(index),
            Reference::Core { kind, index } => self.core.get(kind).and_then(|all| all.get(index)),
        };
        found.copied().ok_or(Unmergeable)
    }
}

/// Fails if an alias refers to a core module. The module could then have further instances, but a
/// merged module has only one.
fn check_alias(alias: &ComponentAlias<'_>) -> Result<()> {
    match alias {
        ComponentAlias::InstanceExport {
            kind: ComponentExternalKind::Module,
            ..
        }
        | ComponentAlias::Outer {
            kind: ComponentOuterAliasKind::CoreModule,
            ..
        } => Err(Unmergeable),
        _ => Ok(()),
    }
}

/// Fails if an instance passes or exports a core module.
fn check_instance(instance: &ComponentInstance<'_>) -> Result<()> {
    let is_module = match instance {
        ComponentInstance::Instantiate { args, .. } => args
            .iter()
            .any(|argument| argument.kind == ComponentExternalKind::Module),
        ComponentInstance::FromExports(exports) => exports
            .iter()
            .any(|export| export.kind == ComponentExternalKind::Module),
    };
    if is_module { Err(Unmergeable) } else { Ok(()) }
}

/// Fails if a section, or a section of a nested component, refers to core modules or core
/// functions.
fn check_section(section: u8, content: &[u8], depth: usize) -> Result<()> {
    let reader = BinaryReader::new(content, 0);
    match section {
        COMPONENT => {
            // A nested component has its own indices. Only aliases can refer to items outside.
            let depth = depth.checked_sub(1).ok_or(Unmergeable)?;
            let body = content.strip_prefix(COMPONENT_HEAD).ok_or(Unmergeable)?;
            for (section, content) in borrowed_sections(body)? {
                match section {
                    COMPONENT => check_section(section, content, depth)?,
                    ALIAS => {
                        let reader = BinaryReader::new(content, 0);
                        for alias in ComponentAliasSectionReader::new(reader)? {
                            check_alias(&alias?)?;
                        }
                    }
                    // Other sections refer to items of the nested component only.
                    _ => {}
                }
            }
        }
        COMPONENT_INSTANCE => {
            for instance in ComponentInstanceSectionReader::new(reader)? {
                check_instance(&instance?)?;
            }
        }
        TYPE => {
            for ty in ComponentTypeSectionReader::new(reader)? {
                // A destructor is a core function, whose index would change.
                if let ComponentType::Resource { dtor: Some(_), .. } = ty? {
                    return Err(Unmergeable);
                }
            }
        }
        IMPORT => {
            for import in ComponentImportSectionReader::new(reader)? {
                if matches!(import?.ty, ComponentTypeRef::Module(_)) {
                    return Err(Unmergeable);
                }
            }
        }
        EXPORT => {
            for export in ComponentExportSectionReader::new(reader)? {
                if export?.kind == ComponentExternalKind::Module {
                    return Err(Unmergeable);
                }
            }
        }
        // Other sections cannot refer to core modules or core functions.
        _ => {}
    }
    Ok(())
}

//! Selects the core modules to merge (the members), and the position of all other items relative to
//! them.

use crate::core_module::{CoreModule, Result, Unmergeable, kind_number, kind_of};
use crate::items::{COMPONENT_INSTANCE, Item, Items, Reference, wide};
use crate::linking::{ImportTarget, LinkedExport, Member};
use std::collections::{BTreeSet, HashMap};
use wasmparser::{CanonicalFunction, Export, Instance};

/// Maximum number of steps for resolving all imports. Bounds the time for hostile components.
const MAX_STEPS: usize = 10_000_000;

/// Position of an item relative to the members. The order of the variants matters: an item is
/// placed at least as late as each core instance and core item to which it refers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Placement {
    /// The item requires no member, and retains its position.
    Before,
    /// The item is a member, or an alias or instance of exports of members.
    Within,
    /// The item is written after the merged module: it requires a member and cannot be merged, or
    /// it is a lifted function, or a canonical function that follows one. Instances of components
    /// have the same effect as lifted functions: no member may follow them.
    After,
}

/// Function, memory, table or global that the merged module imports.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum External<'a> {
    /// Item with an index in the component.
    Core { kind: usize, index: usize },
    /// Export of an instance of a module that is not merged.
    OfInstance {
        instance: usize,
        kind: usize,
        name: &'a str,
    },
}

/// Selection of the members, with the items around them.
pub(crate) struct Plan<'p, 'a> {
    pub(crate) items: &'p Items<'a>,
    /// Parsed core modules, by index. `None` if a module cannot be merged.
    modules: &'p [Option<CoreModule<'a>>],
    /// Positions of the items, in the order of `items.list`.
    pub(crate) placements: Vec<Placement>,
    /// Core instances of the members, in order, with the indices of their modules.
    pub(crate) members: Vec<(usize, usize)>,
    /// Members by core instance.
    pub(crate) member_of: HashMap<usize, usize>,
    /// Exports (kind and index) of instances that consist of listed items, by core instance.
    item_instances: HashMap<usize, HashMap<&'a str, (usize, usize)>>,
}

impl<'p, 'a> Plan<'p, 'a> {
    /// Selects the members. Returns `None` if there are fewer than two.
    pub(crate) fn make(
        items: &'p Items<'a>,
        modules: &'p [Option<CoreModule<'a>>],
    ) -> Result<Option<Self>> {
        let mut plan = Self {
            items,
            modules,
            placements: Vec::new(),
            members: Vec::new(),
            member_of: HashMap::new(),
            item_instances: HashMap::new(),
        };
        let uses = plan.count_instantiations()?;
        // Set at the first lifted function or component instance. Either may call into any
        // earlier item, which must exist by then, so no later module becomes a member.
        let mut is_member_forbidden = false;
        let mut instance = 0;
        for item in &items.list {
            // The references of an item are earlier in the list, so their placements are known.
            let needed = plan.placement_of_references(item)?;
            let placement = match item {
                // An instance of a nested component has no reference to core items.
                Item::Other { section, .. } if *section == COMPONENT_INSTANCE => {
                    is_member_forbidden = true;
                    Placement::Before
                }
                // Sections and modules have no references, so their placement is `Before`. An alias
                // has the placement of its instance.
                Item::Other { .. } | Item::Module(_) | Item::Alias { .. } => needed,
                Item::Canon(CanonicalFunction::Lift { .. }) => {
                    is_member_forbidden = true;
                    Placement::After
                }
                // A lowered function is an import of the members if it exists before all of them.
                Item::Canon(_) if needed == Placement::Before && !is_member_forbidden => {
                    Placement::Before
                }
                Item::Canon(_) => Placement::After,
                Item::Instance(Instance::FromExports(exports)) => {
                    plan.add_item_instance(instance, exports)?;
                    needed
                }
                Item::Instance(Instance::Instantiate { module_index, .. }) => {
                    let module = wide(*module_index);
                    // Two instances need two memories. The merged module has only one instance.
                    let is_used_once = uses.get(module) == Some(&1);
                    plan.add_instance(
                        instance,
                        module,
                        is_used_once && !is_member_forbidden,
                        needed,
                    )
                }
            };
            plan.placements.push(placement);
            // Instances are numbered in the order of their definitions.
            instance += usize::from(matches!(item, Item::Instance(_)));
        }
        Ok((plan.members.len() > 1).then_some(plan))
    }

    /// Returns how often each core module is instantiated.
    fn count_instantiations(&self) -> Result<Vec<usize>> {
        let mut uses = vec![0; self.modules.len()];
        for item in &self.items.list {
            if let Item::Instance(Instance::Instantiate { module_index, .. }) = item {
                *uses.get_mut(wide(*module_index)).ok_or(Unmergeable)? += 1;
            }
        }
        Ok(uses)
    }

    /// Returns the last placement among the items that `item` refers to.
    fn placement_of_references(&self, item: &Item<'a>) -> Result<Placement> {
        let mut last = Placement::Before;
        // Only an invalid component refers to an unknown target or to a later item. Such a
        // reference counts as `After`, so that the item does not become a member.
        item.references(|reference| {
            let target = self.items.target(reference).ok();
            let placement = target.and_then(|at| self.placements.get(at)).copied();
            last = last.max(placement.unwrap_or(Placement::After));
        })?;
        Ok(last)
    }

    /// Records the exports of an instance that consists of listed items.
    fn add_item_instance(&mut self, instance: usize, exports: &[Export<'a>]) -> Result<()> {
        let mut items = HashMap::new();
        for export in exports {
            items.insert(export.name, (kind_number(export.kind)?, wide(export.index)));
        }
        self.item_instances.insert(instance, items);
        Ok(())
    }

    /// Makes the instance of a module a member if possible. Returns its placement.
    fn add_instance(
        &mut self,
        instance: usize,
        module: usize,
        may_be_member: bool,
        needed: Placement,
    ) -> Placement {
        let is_parsed = self.modules.get(module).is_some_and(Option::is_some);
        if is_parsed && may_be_member && needed < Placement::After {
            self.member_of.insert(instance, self.members.len());
            self.members.push((instance, module));
            return Placement::Within;
        }
        match needed {
            Placement::Before => Placement::Before,
            Placement::Within | Placement::After => Placement::After,
        }
    }

    fn instance(&self, instance: usize) -> Result<&'p Instance<'a>> {
        let at = self.items.target(Reference::Instance(instance))?;
        match self.items.list.get(at) {
            Some(Item::Instance(instance)) => Ok(instance),
            _ => Err(Unmergeable),
        }
    }

    pub(crate) fn module(&self, module: usize) -> Result<&'p CoreModule<'a>> {
        let found = self.modules.get(module).and_then(Option::as_ref);
        found.ok_or(Unmergeable)
    }

    fn member_module(&self, member: usize) -> Result<&'p CoreModule<'a>> {
        let (_, module) = self.members.get(member).ok_or(Unmergeable)?;
        self.module(*module)
    }

    /// Follows an export of an instance to its definition.
    fn resolve(
        &self,
        mut instance: usize,
        kind: usize,
        mut name: &'a str,
        steps: &mut usize,
    ) -> Result<Resolved<'a>> {
        loop {
            // Instances can form long chains of aliases, and each import follows its chain.
            *steps = steps.checked_sub(1).ok_or(Unmergeable)?;
            // The chain ends at an export of a member, at an item, or at another instance.
            if let Some(member) = self.member_of.get(&instance) {
                let exports = &self.member_module(*member)?.exports;
                let export = exports.get(name).ok_or(Unmergeable)?;
                return Ok(Resolved::Member {
                    member: *member,
                    kind: kind_number(export.kind)?,
                    index: export.index,
                });
            }
            let Some(exports) = self.item_instances.get(&instance) else {
                // The instance of a module that is not a member.
                return Ok(Resolved::External(External::OfInstance {
                    instance,
                    kind,
                    name,
                }));
            };
            let (kind, index) = *exports.get(name).ok_or(Unmergeable)?;
            let at = self.items.target(Reference::Core { kind, index })?;
            match self.items.list.get(at) {
                // The item is an alias of another instance's export: continue there.
                Some(Item::Alias {
                    instance: of,
                    name: as_name,
                    ..
                }) => (instance, name) = (*of, *as_name),
                _ => return Ok(Resolved::External(External::Core { kind, index })),
            }
        }
    }

    /// Returns the members with resolved imports, and the imports of the merged module.
    pub(crate) fn resolved_members(&self) -> Result<(Vec<Member<'p>>, Vec<External<'a>>)>
    where
        'a: 'p,
    {
        let mut externals = Vec::new();
        let mut known = HashMap::new();
        let mut steps = MAX_STEPS;
        let mut members = Vec::new();
        for (instance, module) in &self.members {
            let Instance::Instantiate { args, .. } = self.instance(*instance)? else {
                return Err(Unmergeable);
            };
            // A module imports each item from a named argument.
            let arguments: HashMap<_, _> = args.iter().map(|a| (a.name, wide(a.index))).collect();
            let module = self.module(*module)?;
            let mut imports = Vec::new();
            for import in &module.imports {
                let from = *arguments.get(import.module).ok_or(Unmergeable)?;
                let kind = kind_of(&import.ty)?;
                imports.push(match self.resolve(from, kind, import.name, &mut steps)? {
                    Resolved::External(external) => {
                        // The same external item is imported once.
                        let number = *known.entry(external).or_insert(externals.len());
                        if number == externals.len() {
                            externals.push(external);
                        }
                        ImportTarget::External(number)
                    }
                    Resolved::Member {
                        member,
                        kind,
                        index,
                    } => ImportTarget::Member {
                        member,
                        kind,
                        index,
                    },
                });
            }
            members.push(Member { module, imports });
        }
        Ok((members, externals))
    }

    /// Returns whether each item is written. Members are not written, and neither are items that
    /// only members need.
    pub(crate) fn written_items(&self) -> Result<Vec<bool>> {
        // Items outside of the merge are always written. Their references make other items needed.
        let mut is_needed = vec![false; self.items.list.len()];
        // In reverse order: an item refers only to earlier items.
        for (at, item) in self.items.list.iter().enumerate().rev() {
            let is_within = self.placements.get(at) == Some(&Placement::Within);
            let needed = is_needed.get_mut(at).ok_or(Unmergeable)?;
            *needed |= !is_within;
            if !*needed {
                continue;
            }
            let mut referred = Vec::new();
            item.references(|reference| referred.push(reference))?;
            for reference in referred {
                let target = self.items.target(reference)?;
                *is_needed.get_mut(target).ok_or(Unmergeable)? = true;
            }
        }
        // Written items refer to exports of the merged module instead.
        for (instance, _) in &self.members {
            let at = self.items.target(Reference::Instance(*instance))?;
            *is_needed.get_mut(at).ok_or(Unmergeable)? = false;
        }
        Ok(is_needed)
    }

    /// Returns the exports of the merged module: the exports of members that written items use.
    pub(crate) fn exports(&self, is_written: &[bool]) -> Result<Vec<LinkedExport>> {
        // Sort the names and remove duplicates, so that equal components give equal bytes.
        let mut named = BTreeSet::new();
        for (item, _) in self
            .items
            .list
            .iter()
            .zip(is_written)
            .filter(|(_, is_written)| **is_written)
        {
            match item {
                Item::Alias { instance, name, .. } => {
                    let member = self.member_of.get(instance);
                    named.extend(member.map(|member| (*member, *name)));
                }
                Item::Instance(Instance::Instantiate { module_index, args }) => {
                    for argument in args {
                        let Some(member) = self.member_of.get(&wide(argument.index)) else {
                            continue;
                        };
                        // An instance of another module receives the exports that this module
                        // imports.
                        let module = self.module(wide(*module_index))?;
                        let imports = imports_from(module, argument.name)?;
                        named.extend(imports.into_iter().map(|(_, name)| (*member, name)));
                    }
                }
                _ => {}
            }
        }
        let exports = named.into_iter().map(|(member, name)| {
            let export = self.member_module(member)?.exports.get(name);
            let export = export.ok_or(Unmergeable)?;
            Ok(LinkedExport {
                name: export_name(member, name),
                member,
                kind: kind_number(export.kind)?,
                index: export.index,
            })
        });
        exports.collect()
    }
}

/// Returns kind and name of each import that a module has from the argument `from`.
pub(crate) fn imports_from<'a>(
    module: &CoreModule<'a>,
    from: &str,
) -> Result<Vec<(usize, &'a str)>> {
    let imports = module.imports.iter().filter(|import| import.module == from);
    let imports = imports.map(|import| Ok((kind_of(&import.ty)?, import.name)));
    // A module may have the same import twice.
    let mut imports = imports.collect::<Result<Vec<_>>>()?;
    imports.sort_unstable();
    imports.dedup();
    Ok(imports)
}

/// Returns the name of a member's export among the exports of the merged module.
pub(crate) fn export_name(member: usize, name: &str) -> String {
    // The number makes the name unique, since two members may export the same name.
    format!("{member} {name}")
}

/// Definition of an import.
enum Resolved<'a> {
    External(External<'a>),
    Member {
        member: usize,
        kind: usize,
        index: u32,
    },
}

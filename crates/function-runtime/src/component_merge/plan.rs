//! Choice of the core modules that are merged, and order of all around them.

use super::core_module::{CoreModule, Result, Unmergeable, kind_number, kind_of};
use super::items::{COMPONENT_INSTANCE, Item, Items, Reference, wide};
use super::linking::{ImportTarget, LinkedExport, Member};
use super::output::export_name;
use std::collections::{BTreeSet, HashMap};
use wasmparser::{CanonicalFunction, Instance};

/// Steps that finding what imports are may take, for all of them together.
const MAX_STEPS: usize = 10_000_000;

/// Place of an item beside the merged modules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// Needs none of them.
    Before,
    /// Is one of them, or of what one of them exports.
    Within,
    /// Needs one of them, and cannot be merged.
    Behind,
}

/// Function, memory, table or global that the merged module imports.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum External<'a> {
    Core {
        kind: usize,
        index: usize,
    },
    OfInstance {
        instance: usize,
        kind: usize,
        name: &'a str,
    },
}

pub(super) struct Plan<'p, 'a> {
    pub(super) items: &'p Items<'a>,
    modules: &'p [Option<CoreModule<'a>>],
    pub(super) standings: Vec<Standing>,
    /// Core instances that are merged, in order, with the numbers of their modules.
    pub(super) members: Vec<(usize, usize)>,
    /// By core instance.
    pub(super) member_of: HashMap<usize, usize>,
    /// Exports of instances that are made of items, by core instance.
    bags: HashMap<usize, HashMap<&'a str, (usize, usize)>>,
}

impl<'p, 'a> Plan<'p, 'a> {
    pub(super) fn make(
        items: &'p Items<'a>,
        modules: &'p [Option<CoreModule<'a>>],
    ) -> Result<Option<Self>> {
        let mut plan = Self {
            items,
            modules,
            standings: Vec::new(),
            members: Vec::new(),
            member_of: HashMap::new(),
            bags: HashMap::new(),
        };
        let mut uses = vec![0_usize; modules.len()];
        for item in &items.list {
            if let Item::Instance(Instance::Instantiate { module_index, .. }) = item {
                *uses.get_mut(wide(*module_index)).ok_or(Unmergeable)? += 1;
            }
        }
        // Behind the first function of the component itself anything may need anything.
        let mut is_sealed = false;
        let mut instances = 0;
        for item in &items.list {
            let mut standing = Standing::Before;
            item.references(|reference| {
                let found = items.target(reference).ok();
                let found = found.and_then(|at| plan.standings.get(at));
                standing = standing.max(found.copied().unwrap_or(Standing::Behind));
            })?;
            let standing = match item {
                Item::Other {
                    section: COMPONENT_INSTANCE,
                    ..
                } => {
                    is_sealed = true;
                    Standing::Before
                }
                Item::Other { .. } | Item::Module(_) | Item::Alias { .. } => standing,
                Item::Canon(CanonicalFunction::Lift { .. }) => {
                    is_sealed = true;
                    Standing::Behind
                }
                Item::Canon(_) => match standing == Standing::Before && !is_sealed {
                    true => Standing::Before,
                    false => Standing::Behind,
                },
                Item::Instance(Instance::FromExports(exports)) => {
                    let mut bag = HashMap::new();
                    for export in exports {
                        let item = (kind_number(export.kind)?, wide(export.index));
                        bag.insert(export.name, item);
                    }
                    plan.bags.insert(instances, bag);
                    standing
                }
                Item::Instance(Instance::Instantiate { module_index, .. }) => {
                    let module = wide(*module_index);
                    let parsed = modules.get(module).is_some_and(Option::is_some);
                    let is_member = parsed
                        && uses.get(module) == Some(&1)
                        && standing < Standing::Behind
                        && !is_sealed;
                    match (is_member, standing) {
                        (true, _) => {
                            plan.member_of.insert(instances, plan.members.len());
                            plan.members.push((instances, module));
                            Standing::Within
                        }
                        (false, Standing::Before) => Standing::Before,
                        (false, _) => Standing::Behind,
                    }
                }
            };
            plan.standings.push(standing);
            instances += usize::from(matches!(item, Item::Instance(_)));
        }
        Ok((plan.members.len() > 1).then_some(plan))
    }

    fn instance(&self, instance: usize) -> Result<&'p Instance<'a>> {
        let at = self.items.target(Reference::Instance(instance))?;
        match self.items.list.get(at) {
            Some(Item::Instance(instance)) => Ok(instance),
            _ => Err(Unmergeable),
        }
    }

    pub(super) fn module(&self, module: usize) -> Result<&'p CoreModule<'a>> {
        let found = self.modules.get(module).and_then(Option::as_ref);
        found.ok_or(Unmergeable)
    }

    fn member_module(&self, member: usize) -> Result<&'p CoreModule<'a>> {
        let (_, module) = self.members.get(member).ok_or(Unmergeable)?;
        self.module(*module)
    }

    /// Follows an export of an instance to what defines it.
    fn resolve(
        &self,
        mut instance: usize,
        kind: usize,
        mut name: &'a str,
        steps: &mut usize,
    ) -> Result<Resolved<'a>> {
        loop {
            *steps = steps.checked_sub(1).ok_or(Unmergeable)?;
            if let Some(member) = self.member_of.get(&instance) {
                let exports = &self.member_module(*member)?.exports;
                let export = exports.get(name).ok_or(Unmergeable)?;
                return Ok(Resolved::Member {
                    member: *member,
                    kind: kind_number(export.kind)?,
                    index: export.index,
                });
            }
            let Some(bag) = self.bags.get(&instance) else {
                return Ok(Resolved::External(External::OfInstance {
                    instance,
                    kind,
                    name,
                }));
            };
            let (kind, index) = *bag.get(name).ok_or(Unmergeable)?;
            let at = self.items.target(Reference::Core { kind, index })?;
            match self.items.list.get(at) {
                Some(Item::Alias {
                    instance: of,
                    name: as_name,
                    ..
                }) => (instance, name) = (*of, *as_name),
                _ => return Ok(Resolved::External(External::Core { kind, index })),
            }
        }
    }

    /// Members with what their imports are, and what is imported from outside.
    pub(super) fn resolved_members(&self) -> Result<(Vec<Member<'p>>, Vec<External<'a>>)>
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
            let arguments: HashMap<_, _> = args.iter().map(|a| (a.name, wide(a.index))).collect();
            let module = self.module(*module)?;
            let mut imports = Vec::new();
            for import in &module.imports {
                let from = *arguments.get(import.module).ok_or(Unmergeable)?;
                let kind = kind_of(&import.ty)?;
                imports.push(match self.resolve(from, kind, import.name, &mut steps)? {
                    Resolved::External(external) => {
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

    /// Returns which items are written: all but members, and what only they need.
    pub(super) fn written_items(&self) -> Result<Vec<bool>> {
        let mut is_needed = vec![false; self.items.list.len()];
        for (at, item) in self.items.list.iter().enumerate().rev() {
            let is_between = self.standings.get(at) == Some(&Standing::Within);
            let needed = is_needed.get_mut(at).ok_or(Unmergeable)?;
            *needed |= !is_between;
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
        for (instance, _) in &self.members {
            let at = self.items.target(Reference::Instance(*instance))?;
            *is_needed.get_mut(at).ok_or(Unmergeable)? = false;
        }
        Ok(is_needed)
    }

    /// Exports of the merged module: of the members' those that written items name.
    pub(super) fn exports(&self, is_written: &[bool]) -> Result<Vec<LinkedExport>> {
        let mut named = BTreeSet::new();
        for (item, _) in self
            .items
            .list
            .iter()
            .zip(is_written)
            .filter(|(_, is)| **is)
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

/// Kinds and names of what a module imports under `from`.
pub(super) fn imports_from<'a>(
    module: &CoreModule<'a>,
    from: &str,
) -> Result<Vec<(usize, &'a str)>> {
    let imports = module.imports.iter().filter(|import| import.module == from);
    let imports = imports.map(|import| Ok((kind_of(&import.ty)?, import.name)));
    // An import may be there twice.
    let mut imports = imports.collect::<Result<Vec<_>>>()?;
    imports.sort_unstable();
    imports.dedup();
    Ok(imports)
}

enum Resolved<'a> {
    External(External<'a>),
    Member {
        member: usize,
        kind: usize,
        index: u32,
    },
}

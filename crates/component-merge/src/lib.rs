//! Merges the core modules of a WebAssembly component into one module.
//!
//! A component of a language with shared libraries has a core module for each library, and a table
//! and hundreds of globals by which the libraries find each other. Python's component has 14
//! modules with 2,300 imports, and fills a table of 5,500 functions. Each instance repeats this
//! work, which takes as long as a request. The modules and their imports from each other are
//! known, so one module can replace them: its functions call each other directly, and its table is
//! filled from an image.
//!
//! [`merge_core_modules`] works in these steps:
//!
//! 1. [`items`]: parse the component into items and the references between them.
//! 2. [`core_module`]: parse the core modules.
//! 3. [`plan`]: choose the modules to merge (the *members*) and resolve their imports. Members
//!    belong to the outermost component, are instantiated once, and import only from each other
//!    and from items that exist before all members. A host function that uses the memory of a
//!    member must be created after the members, and so must each module that imports the function.
//! 4. [`linking`]: write the members as one module with new indices.
//! 5. [`output`]: write the component around the merged module.
//!
//! [`merge_data_segments`] reduces the number of data segments of a module or component.
//!
//! The input is untrusted. The output is untrusted as well: the caller must validate it.

mod binary_sections;
mod core_module;
mod data_segments;
mod items;
mod linking;
mod output;
mod plan;
#[cfg(test)]
mod tests;

pub use data_segments::merge as merge_data_segments;

use core_module::CoreModule;
use items::{Item, Items};
use output::Output;
use plan::Plan;

/// Limits of the runtime that apply to the merged module.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of memories.
    pub memories: u32,
    /// Maximum number of tables.
    pub tables: u32,
    /// Maximum size of the runtime's record of an instance (Wasmtime's `VMContext`) in bytes,
    /// without memories and tables.
    pub instance_bytes: usize,
}

/// Returns an equivalent component with fewer core modules. Returns `None` if fewer than two
/// modules can be merged, if the component cannot be parsed or uses an unsupported feature, or if
/// the merged module exceeds `limits`.
#[must_use]
pub fn merge_core_modules(component: &[u8], limits: &Limits) -> Option<Vec<u8>> {
    // On an error, the caller uses the original component, so the reason is not needed.
    let items = Items::parse(component).ok()?;
    let modules = parse_modules(&items);
    let plan = Plan::make(&items, &modules).ok().flatten()?;
    Output::write(&plan, limits).ok()
}

/// Parses the core modules, by index. A module that cannot be merged is `None`.
fn parse_modules<'a>(items: &Items<'a>) -> Vec<Option<CoreModule<'a>>> {
    let parse = |at: &usize| match items.list.get(*at) {
        Some(Item::Module(binary)) => CoreModule::parse(binary).ok(),
        _ => None,
    };
    items.modules.iter().map(parse).collect()
}

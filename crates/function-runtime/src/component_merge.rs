//! Core modules of a component merged into one.
//!
//! Components of languages with libraries have a core module for each library, and a table and
//! hundreds of globals by which these find each other: Python's has 14 modules with 2,300 imports
//! and fills a table of 5,500 functions. All of that is done anew for each instance, and takes as
//! long as a request. The modules are known and so is what they import from each other, so that
//! they are as well one module: its functions call each other, and its table is filled from an
//! image.
//!
//! Merged are the core modules of the outermost component that are instantiated once and import
//! from each other, with nothing in between that the host or a component has to make: a function of
//! the host that uses a memory of a merged module comes behind them, and so do the modules that
//! import it.

mod core_module;
mod items;
mod linking;
mod output;
mod plan;
#[cfg(test)]
mod tests;

use core_module::CoreModule;
use items::{Item, Items};
use output::Output;
use plan::Plan;

/// Returns a component that does the same with fewer core modules, or none where there are no two
/// that can be merged.
pub(crate) fn merge(component: &[u8]) -> Option<Vec<u8>> {
    // One that is not understood stays as it is: the compiler tells what is wrong with it.
    let items = Items::parse(component).ok()?;
    let modules = parsed_modules(&items);
    let plan = Plan::make(&items, &modules).ok().flatten()?;
    Output::write(&plan).ok()
}

/// Core modules by their numbers; none where one cannot be merged.
fn parsed_modules<'a>(items: &Items<'a>) -> Vec<Option<CoreModule<'a>>> {
    let module = |at: &usize| match items.list.get(*at) {
        Some(Item::Module(binary)) => CoreModule::parse(binary).ok(),
        _ => None,
    };
    items.modules.iter().map(module).collect()
}

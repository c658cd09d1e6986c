//! Tests of placement and budgets.

mod budget;
mod placement;
mod support;

//! Garbage collection: snapshots that nothing needs, and files that belong to nothing.
//!
//! Records go at once, in memory and in the journal; files go behind the answer, on a thread of their own ([`remover`]). What
//! a daemon that ends does not come to is removed by the sweep of the next ([`sweep`]), which runs while that one serves.

mod collect;
pub(super) mod remover;
mod sweep;

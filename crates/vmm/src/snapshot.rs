//! Snapshots:
//! - the state of a machine ([`machine_state`])
//! - memory as layers ([`memory_layers`], [`linear_memory`], [`mod@map_layers`], [`mod@populate`]),
//!   to which it can be reverted ([`mod@revert_memory`])
//! - the search for changed chunks ([`pagemap_scan`])
//! - writing changed chunks ([`layer_writer`], [`layer_output`]) while the guest runs
//!   ([`writer_process`])
//! - memory that is not stored on this host ([`lazy_memory`]), fetched by a [`fault_handler`]

pub mod chunk_hashes;
pub mod fault_handler;
pub mod huge_mappings;
pub mod layer_output;
pub mod layer_writer;
pub mod lazy_memory;
pub mod linear_memory;
pub mod machine_state;
pub mod map_layers;
pub mod memory_layers;
pub mod pagemap_scan;
pub mod populate;
pub mod revert_memory;
pub mod userfaultfd;
pub mod writer_process;
pub mod written_pages;

use crate::error::VmmError;
use nix::errno::Errno;

/// Returns a function that creates the error of a step of a snapshot.
pub(crate) fn failed(what: &'static str) -> impl Fn(Errno) -> VmmError {
    move |e| VmmError::host(what, e)
}

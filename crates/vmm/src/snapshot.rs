//! Snapshots: a machine's state ([`machine_state`]), memory as layers ([`memory_layers`],
//! [`linear_memory`], [`mod@map_layers`], [`mod@populate`]) to which it can be put back
//! ([`mod@revert_memory`]), the search for changed chunks ([`pagemap_scan`]), and writing them
//! ([`layer_writer`], [`layer_output`]) while the guest runs on ([`writer_process`]). Memory that
//! has not all arrived is a [`lazy_memory`], which a [`fault_handler`] fills.

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

/// Error of one step of a snapshot.
pub(crate) fn failed(what: &'static str) -> impl Fn(Errno) -> VmmError {
    move |e| VmmError::host(what, e)
}

//! Snapshots of a VM, and the memory that is restored from them. A snapshot contains:
//! - the state of the machine ([`machine_state`])
//! - memory as a layer of changed chunks on top of the layers of earlier snapshots
//!   ([`memory_layers`], [`linear_memory`])
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory.
//!
//! Taking a snapshot: [`pagemap_scan`] finds changed chunks, and [`layer_writer`] writes them with
//! [`layer_output`], while the guest runs in a [`writer_process`].
//!
//! Restoring: [`mod@map_layers`] maps the layers, and [`mod@populate`] copies pages in advance. A
//! [`fault_handler`] fetches memory that is not stored on this host ([`lazy_memory`]).
//! [`mod@revert_memory`] reverts the memory of a running VM. [`write_tracker`] restricts both
//! snapshots and rollbacks to the pages that the guest has written since its newest snapshot.

pub mod chunk_hashes;
pub mod fault_handler;
pub mod huge_mappings;
pub mod layer_mappings;
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
pub mod write_tracker;
pub mod writer_process;
pub mod written_pages;

use crate::error::VmmError;
use nix::errno::Errno;

/// Returns a function that creates the error of a step of a snapshot.
pub(crate) fn failed(what: &'static str) -> impl Fn(Errno) -> VmmError {
    move |e| VmmError::host(what, e)
}

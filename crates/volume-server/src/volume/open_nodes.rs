//! Nodes that clients use. A node without names is removed when no client uses it.
//!
//! A *node* is a file, directory or link of a volume, identified by a number as in FUSE.

use std::collections::HashMap;

/// Number of clients that use each node.
#[derive(Debug, Default)]
pub(crate) struct OpenNodes(HashMap<u64, u32>);

impl OpenNodes {
    pub(crate) fn hold(&mut self, node: u64) {
        let count = self.0.entry(node).or_default();
        *count = count.saturating_add(1);
    }

    /// Returns whether no client uses the node any longer.
    pub(crate) fn release(&mut self, node: u64) -> bool {
        let Some(count) = self.0.get_mut(&node) else {
            return true;
        };
        *count = count.saturating_sub(1);
        if *count > 0 {
            return false;
        }
        self.0.remove(&node);
        true
    }

    pub(crate) fn is_held(&self, node: u64) -> bool {
        self.0.contains_key(&node)
    }
}

//! Limits of direct connections to functions, of each owner and together.
//!
//! Such a connection occupies an exchange of its owner's key only while a request is under way.
//! Otherwise clients without a key could use up the exchanges of an owner by connections on which
//! they say nothing.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of direct connections to functions of one owner; a process accepts as many.
pub const MAX_PER_OWNER: usize = 4096;

/// Open direct connections.
#[derive(Debug)]
pub struct DirectConnections {
    /// Maximum number of all owners together.
    most: usize,
    open: Mutex<OpenConnections>,
}

#[derive(Debug, Default)]
struct OpenConnections {
    total: usize,
    of_owners: HashMap<Option<String>, usize>,
}

/// Place of a connection, which is released on drop.
#[derive(Debug)]
pub struct DirectPlace {
    owner: Option<String>,
    connections: Arc<DirectConnections>,
}

impl DirectConnections {
    /// Limits connections to `most` of all owners together.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            open: Mutex::default(),
        })
    }

    /// Counts a connection to a function of `owner`; `None` stands for the host's owner. Returns
    /// `None` if a limit is reached.
    pub fn enter(self: &Arc<Self>, owner: Option<&str>) -> Option<DirectPlace> {
        let owner = owner.map(str::to_owned);
        let mut open = self.open.lock();
        let of_owner = open.of_owners.get(&owner).copied().unwrap_or(0);
        if open.total >= self.most || of_owner >= MAX_PER_OWNER {
            return None;
        }
        open.total += 1;
        open.of_owners.insert(owner.clone(), of_owner + 1);
        Some(DirectPlace {
            owner,
            connections: self.clone(),
        })
    }
}

impl Drop for DirectPlace {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        open.total -= 1;
        if let Some(count) = open.of_owners.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                open.of_owners.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_leaves_connections_to_others_and_all_together_are_bounded() {
        let connections = DirectConnections::new(MAX_PER_OWNER + 2);
        let enter = |owner| connections.enter(owner);
        let mut places: Vec<_> = (0..MAX_PER_OWNER).map_while(|_| enter(Some("a"))).collect();
        assert_eq!(places.len(), MAX_PER_OWNER);
        assert!(enter(Some("a")).is_none());
        let others = [enter(Some("b")).unwrap(), enter(None).unwrap()];
        assert!(enter(Some("b")).is_none(), "all together");
        places.pop();
        assert!(enter(Some("b")).is_some());
        drop((places, others));
        let open = connections.open.lock();
        assert!(open.total == 0 && open.of_owners.is_empty());
    }
}

//! Order and start position of a list by age. The API returns lists in pages, and the position of
//! the last item is the start of the next page.

use smol_str::SmolStr;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Position of an item in a list: the time of its creation, in milliseconds since 1970, and its id.
pub type ListPosition = (u64, String);

/// [`ListPosition`] with an id that is shared with other indexes.
pub(crate) type SharedPosition = (u64, SmolStr);

/// Order and start of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListOrder {
    /// True if the newest item comes first.
    pub descending: bool,
    /// Position after which the list starts. `None` for the whole list.
    pub after: Option<ListPosition>,
}

impl ListOrder {
    /// Returns the positions in this order. The cost depends on the number of positions taken.
    pub(crate) fn of<'a>(
        &self,
        positions: &'a BTreeSet<SharedPosition>,
    ) -> Box<dyn Iterator<Item = &'a SharedPosition> + 'a> {
        let after = match &self.after {
            // A position and not an index, so that pages stay correct while items are added or
            // removed.
            Some((ms, id)) => Bound::Excluded((*ms, SmolStr::new(id))),
            None => Bound::Unbounded,
        };
        if self.descending {
            Box::new(positions.range((Bound::Unbounded, after)).rev())
        } else {
            Box::new(positions.range((after, Bound::Unbounded)))
        }
    }
}

/// Selection of the sandboxes in a list. Lists of few sandboxes come from indexes, so they are
/// cheap on large hosts too.
#[derive(Debug, Clone, Copy)]
pub enum ListedSandboxes<'a> {
    /// All sandboxes, including killed ones.
    All,
    /// Running sandboxes.
    Running,
    /// Sandboxes of an owner that are not killed.
    OfOwner(&'a str),
}

/// Selection of the snapshots in a list.
#[derive(Debug, Clone, Copy)]
pub enum ListedSnapshots<'a> {
    /// All snapshots, also of templates and of paused sandboxes.
    All,
    /// Snapshots requested by clients.
    Requested,
    /// Snapshots requested by an owner.
    RequestedBy(&'a str),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(order: &ListOrder) -> String {
        let all = [(1, "b"), (1, "a"), (2, "c"), (3, "d")];
        let all = all.map(|(ms, id)| (ms, SmolStr::new(id)));
        let all = BTreeSet::from(all);
        order.of(&all).map(|(_, id)| &**id).collect()
    }

    #[test]
    fn a_list_begins_after_its_position_in_both_orders() {
        let from = |descending, after: Option<(u64, &str)>| {
            let after = after.map(|(ms, id)| (ms, id.to_owned()));
            listed(&ListOrder { descending, after })
        };
        assert_eq!(from(false, None), "abcd");
        assert_eq!(from(true, None), "dcba");
        assert_eq!(from(false, Some((1, "a"))), "bcd");
        assert_eq!(from(true, Some((2, "c"))), "ba");
        // The item at the position no longer exists.
        assert_eq!(from(false, Some((2, "x"))), "d");
        assert_eq!(from(true, Some((0, ""))), "");
    }
}

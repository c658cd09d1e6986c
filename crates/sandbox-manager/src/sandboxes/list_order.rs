//! Lists by age, a part at a time.

use smol_str::SmolStr;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Position of an item in a list: the moment of its creation, in milliseconds since 1970, and its
/// id.
pub type ListPosition = (u64, String);

/// The same, with an id that other indexes have, too.
pub(crate) type SharedPosition = (u64, SmolStr);

/// Order of a list, and where to begin.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListOrder {
    /// True if the youngest comes first.
    pub descending: bool,
    /// Position behind which the list begins; none: at its beginning.
    pub after: Option<ListPosition>,
}

impl ListOrder {
    /// The positions in this order. Costs as much as is taken of them.
    pub(crate) fn of<'a>(
        &self,
        positions: &'a BTreeSet<SharedPosition>,
    ) -> Box<dyn Iterator<Item = &'a SharedPosition> + 'a> {
        let after = match &self.after {
            Some((ms, id)) => Bound::Excluded((*ms, SmolStr::new(id))),
            None => Bound::Unbounded,
        };
        match self.descending {
            true => Box::new(positions.range((Bound::Unbounded, after)).rev()),
            false => Box::new(positions.range((after, Bound::Unbounded))),
        }
    }
}

/// Sandboxes that a list is made of. What comes from an index of few costs little on a host that
/// has many.
#[derive(Debug, Clone, Copy)]
pub enum ListedSandboxes<'a> {
    /// All, also those that were killed.
    All,
    /// Those that run.
    Running,
    /// Those of an owner that were not killed.
    OfOwner(&'a str),
}

/// Snapshots that a list is made of.
#[derive(Debug, Clone, Copy)]
pub enum ListedSnapshots<'a> {
    /// All, also those of templates and of sandboxes that sleep.
    All,
    /// Those that were asked for.
    Asked,
    /// Those that an owner asked for.
    AskedBy(&'a str),
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
    fn a_list_begins_behind_its_position_in_either_order() {
        let from = |descending, after: Option<(u64, &str)>| {
            let after = after.map(|(ms, id)| (ms, id.to_owned()));
            listed(&ListOrder { descending, after })
        };
        assert_eq!(from(false, None), "abcd");
        assert_eq!(from(true, None), "dcba");
        assert_eq!(from(false, Some((1, "a"))), "bcd");
        assert_eq!(from(true, Some((2, "c"))), "ba");
        // An item that is not there any more.
        assert_eq!(from(false, Some((2, "x"))), "d");
        assert_eq!(from(true, Some((0, ""))), "");
    }
}

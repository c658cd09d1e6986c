//! [`OwnerAges`]: index of ids by owner and time of creation, for the lists of one owner.

use super::list_order::{ListOrder, ListPosition};
use smol_str::SmolStr;
use std::collections::BTreeSet;
use std::ops::Bound;

/// Owner, time of creation in milliseconds since 1970, and id.
type OwnedPosition = (SmolStr, u64, SmolStr);

/// Ids by owner and time of creation. The cost of a page of one owner's list does not depend on
/// other owners.
#[derive(Debug, Default)]
pub(crate) struct OwnerAges(BTreeSet<OwnedPosition>);

fn position(owner: Option<&str>, created_ms: u64, id: &SmolStr) -> Option<OwnedPosition> {
    // Ids without an owner are in no owner's list.
    let owner = owner.filter(|owner| !owner.is_empty())?;
    Some((SmolStr::new(owner), created_ms, id.clone()))
}

impl OwnerAges {
    /// Adds an id, if it has an owner.
    pub fn add(&mut self, owner: Option<&str>, created_ms: u64, id: &SmolStr) {
        self.0.extend(position(owner, created_ms, id));
    }

    pub fn take(&mut self, owner: Option<&str>, created_ms: u64, id: &SmolStr) {
        if let Some(position) = position(owner, created_ms, id) {
            self.0.remove(&position);
        }
    }

    /// Returns the ids of `owner`, oldest first.
    pub fn of(&self, owner: &str) -> impl Iterator<Item = &SmolStr> {
        // All positions, oldest first.
        let all = self.0.range(range(owner, false, None));
        all.map(|(_, _, id)| id)
    }

    /// Returns the times and ids of `owner` in the order and from the position of `order`. The cost
    /// depends on the number of items taken.
    pub fn in_order<'a>(
        &'a self,
        owner: &str,
        order: &ListOrder,
    ) -> Box<dyn Iterator<Item = (u64, &'a SmolStr)> + 'a> {
        let range = self
            .0
            .range(range(owner, order.descending, order.after.as_ref()));
        let positions = range.map(|(_, created_ms, id)| (*created_ms, id));
        if order.descending {
            Box::new(positions.rev())
        } else {
            Box::new(positions)
        }
    }
}

/// Returns the range of an owner's positions after `after`, in the order of the list. The newest
/// position is first if `descending` is true, and last otherwise.
fn range(
    owner: &str,
    descending: bool,
    after: Option<&ListPosition>,
) -> (Bound<OwnedPosition>, Bound<OwnedPosition>) {
    // Precedes all positions of the owner: time 0 and the empty id.
    let edge = |owner: &str| (SmolStr::new(owner), 0, SmolStr::default());
    // The smallest text that is greater than `owner` ends the range.
    let following = format!("{owner}\0");
    let all = (
        Bound::Included(edge(owner)),
        Bound::Excluded(edge(&following)),
    );
    let after = after.map(|(ms, id)| Bound::Excluded((SmolStr::new(owner), *ms, SmolStr::new(id))));
    match (after, descending) {
        (None, _) => all,
        (Some(after), true) => (all.0, after),
        (Some(after), false) => (after, all.1),
    }
}

impl<'a> FromIterator<(Option<&'a str>, u64, &'a SmolStr)> for OwnerAges {
    fn from_iter<T: IntoIterator<Item = (Option<&'a str>, u64, &'a SmolStr)>>(all: T) -> Self {
        let all = all.into_iter();
        Self(
            all.filter_map(|(owner, ms, id)| position(owner, ms, id))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owners_list_contains_only_own_ids_in_both_orders() {
        let ids = ["a", "b", "c", "d"].map(SmolStr::new);
        let owners = [Some("k"), Some("k\0"), Some("k"), None];
        let mut ages: OwnerAges = (1..)
            .zip(owners.iter().zip(&ids))
            .map(|(ms, (owner, id))| (*owner, ms, id))
            .collect();
        ages.add(Some("k"), 3, &SmolStr::new("e"));
        ages.add(Some("j"), 3, &SmolStr::new("f"));
        let listed = |ages: &OwnerAges, descending, after: Option<(u64, &str)>| -> String {
            let after = after.map(|(ms, id)| (ms, id.to_owned()));
            let order = ListOrder { descending, after };
            ages.in_order("k", &order).map(|(_, id)| &**id).collect()
        };
        assert_eq!(listed(&ages, false, None), "ace");
        assert_eq!(listed(&ages, true, None), "eca");
        assert_eq!(listed(&ages, false, Some((3, "c"))), "e");
        assert_eq!(listed(&ages, true, Some((3, "c"))), "a");
        assert_eq!(listed(&ages, true, Some((0, ""))), "");
        ages.take(Some("k"), 3, &SmolStr::new("c"));
        assert_eq!(listed(&ages, false, None), "ae");
        assert_eq!(ages.of("k").count(), 2);
    }
}

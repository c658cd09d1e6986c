//! Recent decisions about placements (selections of hosts for new sandboxes), in the memory of the
//! coordinator. `jiffy fleet why` shows them. If the selected host rejects a sandbox, the create is
//! repeated with another host: the next decision names the *former* one.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. A
//! *row* is an entry of the coordinator's directory: the hash of the id, the name or the
//! idempotency key of a sandbox.

use crate::node::query::Decision;
use jiffy_fleet_core::{MemberId, Millis, SandboxHash, Term};
use jiffy_scheduler::ReservationId;
use std::collections::{HashMap, VecDeque};

/// Maximum number of decisions in memory.
const MAX_DECISIONS: usize = 4096;
/// Maximum length of an explanation.
const MAX_REASON: usize = 2048;
/// Maximum number of decisions about one sandbox in an answer.
const MAX_ANSWER: usize = 8;

/// A decision.
#[derive(Debug)]
pub(super) struct Entry {
    /// Number of the decision in its term.
    pub number: u64,
    pub at: Millis,
    /// Selected host. `None` if no host was suitable.
    pub host: Option<MemberId>,
    /// Reservation of resources on the host, until the create has ended.
    pub reservation: Option<ReservationId>,
    /// Explanation of the selection.
    pub reason: String,
    /// Reason for which the selected host has rejected the sandbox.
    pub rejected: Option<String>,
    /// Former decision for the same create.
    former: Option<u64>,
    /// Hashes of the id and the name of the sandbox.
    rows: Vec<SandboxHash>,
}

/// Decisions of a term, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Decisions {
    entries: VecDeque<Entry>,
    /// Numbers of the decisions for a row.
    by_row: HashMap<SandboxHash, Vec<u64>>,
    /// Number of the latest decision.
    next: u64,
}

impl Decisions {
    /// Records a decision. Returns its number.
    pub fn add(
        &mut self,
        at: Millis,
        placed: Option<(MemberId, ReservationId)>,
        mut reason: String,
        (rows, former): (Vec<SandboxHash>, Option<u64>),
    ) -> u64 {
        if self.entries.len() == MAX_DECISIONS
            && let Some(oldest) = self.entries.pop_front()
        {
            for row in &oldest.rows {
                self.forget(*row, oldest.number);
            }
        }
        let cut = (0..=MAX_REASON.min(reason.len())).rev();
        let cut = cut.into_iter().find(|&at| reason.is_char_boundary(at));
        reason.truncate(cut.unwrap_or(0));
        self.next += 1;
        let entry = Entry {
            number: self.next,
            at,
            host: placed.map(|placed| placed.0),
            reservation: placed.map(|placed| placed.1),
            reason,
            rejected: None,
            // `former` comes from another host. It must be an earlier number, so that a chain of
            // decisions cannot be a cycle.
            former: former.filter(|&former| former < self.next),
            rows: Vec::new(),
        };
        self.entries.push_back(entry);
        self.connect(self.next, rows);
        self.next
    }

    fn forget(&mut self, row: SandboxHash, number: u64) {
        if let Some(numbers) = self.by_row.get_mut(&row) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                self.by_row.remove(&row);
            }
        }
    }

    /// Makes a decision, and the former ones for the same create, findable under further rows
    /// (hashes of the id and the name of the sandbox).
    pub fn connect(&mut self, number: u64, rows: Vec<SandboxHash>) {
        let mut next = Some(number);
        for _ in 0..MAX_ANSWER {
            let Some(entry) = next.and_then(|number| self.find_mut(number)) else {
                return;
            };
            let number = entry.number;
            next = entry.former;
            let known = entry.rows.clone();
            let new: Vec<_> = rows.iter().filter(|row| !known.contains(row)).collect();
            entry.rows.extend(new.iter().copied());
            for row in new {
                let numbers = self.by_row.entry(*row).or_default();
                let index = numbers.partition_point(|other| *other < number);
                numbers.insert(index, number);
            }
        }
    }

    /// Returns a decision for changes.
    pub fn find_mut(&mut self, number: u64) -> Option<&mut Entry> {
        let first = self.entries.front()?.number;
        let index = usize::try_from(number.checked_sub(first)?).ok()?;
        self.entries.get_mut(index)
    }

    /// Returns the decisions for a row, or the decision with a number. The newest is last.
    pub fn about(
        &mut self,
        now: Millis,
        term: Term,
        row: SandboxHash,
        number: Option<u64>,
    ) -> Vec<Decision> {
        let mut numbers = self.by_row.get(&row).cloned().unwrap_or_default();
        numbers.extend(number);
        let skipped = numbers.len().saturating_sub(MAX_ANSWER);
        let entries = numbers.into_iter().skip(skipped);
        let entries: Vec<_> = entries
            .filter_map(|number| {
                let entry = self.find_mut(number)?;
                Some(Decision {
                    id: decision_id(term, entry.number),
                    age_ms: now.since(entry.at),
                    host: entry.host,
                    reason: entry.reason.clone(),
                    rejected: entry.rejected.clone(),
                })
            })
            .collect();
        entries
    }

    /// Forgets all decisions. Numbers are not reused.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.by_row.clear();
    }
}

/// Returns the id of a decision.
pub(super) fn decision_id(term: Term, number: u64) -> String {
    format!("d{}-{number}", term.0)
}

/// Returns the number in the id of a decision of this term.
pub(super) fn decision_number(term: Term, id: &str) -> Option<u64> {
    let rest = id.strip_prefix('d')?.strip_prefix(&term.0.to_string())?;
    rest.strip_prefix('-')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_decisions_is_bounded_and_the_newest_are_found() {
        let mut decisions = Decisions::default();
        // Each hash occurs twice. Its first decision is removed before the second one is added.
        let hash = |n: u64| SandboxHash(u128::from(n % 5000).to_be_bytes());
        for n in 1..=10_000 {
            let number = decisions.add(Millis(n), None, "ä".repeat(3000), (vec![hash(n)], None));
            assert_eq!(number, n);
        }
        assert_eq!(decisions.entries.len(), MAX_DECISIONS);
        assert!(decisions.by_row.len() <= MAX_DECISIONS);
        let found = decisions.about(Millis(10_001), Term(3), hash(10_000), None);
        assert_eq!(found.len(), 1);
        assert_eq!((&*found[0].id, found[0].age_ms), ("d3-10000", 1));
        assert!(found[0].reason.len() <= MAX_REASON);
        assert!(
            decisions
                .about(Millis(0), Term(3), hash(1), None)
                .is_empty()
        );
        assert!(decisions.find_mut(1).is_none());
        assert_eq!(decision_number(Term(3), "d3-10000"), Some(10_000));
        assert_eq!(decision_number(Term(4), "d3-10000"), None);
        assert_eq!(decision_number(Term(3), "web"), None);
    }
}

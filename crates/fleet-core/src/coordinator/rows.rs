//! Rows of the members' sandboxes, which fill the directory of the coordinator. The *directory*
//! lists the host and the state of each sandbox. A *row* is its entry for one sandbox. A *list* is
//! a complete transmission of a member's rows, in pages.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.

use super::Coordinator;
use crate::directory::RowMessage;
use crate::effect::Effect;
use crate::ids::{Epoch, MemberId, Term};
use crate::message::Body;

impl Coordinator {
    /// Applies rows of a member to the directory.
    pub fn receive_rows(
        &mut self,
        from: MemberId,
        epoch: Option<Epoch>,
        message: &RowMessage,
        effects: &mut Vec<Effect>,
    ) {
        let Some(member_row) = self.committed.row(from) else {
            return;
        };
        if Some(member_row.epoch) != epoch || !member_row.state.is_live() {
            return;
        }
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        let mut removed = Vec::new();
        let received = peer
            .rows
            .receive(from, message, &mut self.directory, &mut removed);
        if !removed.is_empty() {
            effects.push(Effect::RowsRemoved {
                member: from,
                rows: removed,
            });
        }
        let is_wanted = match received {
            Ok(is_wanted) => is_wanted,
            Err(error) => {
                effects.push(Effect::RowsRejected {
                    member: from,
                    error,
                });
                false
            }
        };
        if is_wanted {
            let request = peer.rows.request();
            effects.push(self.message(member_row, Body::RowsWanted(request)));
        }
    }
}

/// Returns the number of the first list after a registration: the term in the high 32 bits, the
/// registration in the next 16, and zero. [`RowReceiver`] increments the low 16 bits for each
/// further list of the registration. Lists of different registrations have different numbers, so
/// that late pages of a former process are ignored. After 65,536 registrations in a term, the
/// numbers repeat. They never equal a number of a later coordinator, because the high bits are its
/// term.
pub(super) fn list_number(term: Term, registration: u64) -> u64 {
    term.0 << 32 | (registration & 0xffff) << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_lists_never_have_the_term_of_a_later_coordinator() {
        for registration in [0, 1, 0xffff, 0x1_0000, u64::MAX] {
            assert_eq!(list_number(Term(7), registration) >> 32, 7);
        }
        assert_ne!(list_number(Term(7), 1), list_number(Term(7), 2));
    }
}

//! Transfer of directory rows from members to the coordinator. A *member* is the daemon of one host
//! of a fleet. The *coordinator* is the member whose *directory* lists the hosts of all sandboxes.
//! A row states host and state of one sandbox, whose id is replaced by a hash.
//!
//! A member numbers its changes. The coordinator applies them in order; after a gap it requests a
//! full list. A list is sent in pages in the order of the hashes. The coordinator requests each
//! page after the previous one, and then the changes since the start of the list. A page may
//! contain newer states than the start of the list: applying the changes again ends in the same
//! state.
//!
//! [`RowSender`] is the member's side, and [`RowReceiver`] the coordinator's side for one member.

use super::{Directory, DirectoryError, Row, SandboxHash};
use crate::ids::MemberId;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Maximum number of rows or changes of a message.
pub const MAX_ROWS_PER_MESSAGE: usize = 4_000;
/// Number of changes that a member retains. A coordinator that needs older changes requests a list.
const RETAINED_CHANGES: usize = 16_000;

/// Change of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowChange {
    /// The row is new or has changed.
    Put(Row),
    /// The host no longer has the sandbox.
    Removed(SandboxHash),
}

/// Message with rows of the sending member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowMessage {
    /// Changes with consecutive numbers.
    Changes {
        /// Number of the first change.
        first: u64,
        /// Changes.
        changes: Vec<RowChange>,
    },
    /// Page of a full list.
    Page {
        /// Number of the list.
        list: u64,
        /// Last hash of the previous page.
        after: Option<SandboxHash>,
        /// Number of the last change before the start of the list.
        at: u64,
        /// Rows in the order of their hashes.
        rows: Vec<Row>,
        /// No page follows.
        is_last: bool,
    },
}

/// Request of a coordinator for rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowRequest {
    /// Changes from this number.
    Changes {
        /// Number of the first change.
        from: u64,
    },
    /// Page of a full list.
    Page {
        /// Number of the list.
        list: u64,
        /// Last hash of the previous page.
        after: Option<SandboxHash>,
    },
}

/// Stream of a member's rows.
#[derive(Debug, Default)]
pub struct RowSender {
    /// Number of the last change.
    last: u64,
    /// The newest changes.
    changes: VecDeque<RowChange>,
    /// Number of the list that is being sent, and of the last change before its start.
    list: Option<(u64, u64)>,
}

impl RowSender {
    /// Records a change and returns the message for it.
    pub fn record(&mut self, change: RowChange) -> RowMessage {
        if self.changes.len() == RETAINED_CHANGES {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
        self.last += 1;
        RowMessage::Changes {
            first: self.last,
            changes: vec![change],
        }
    }

    /// Returns the number of the last change.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Returns the message with the changes from this number. `None` if no such change exists.
    #[must_use]
    pub fn changes(&self, from: u64) -> Option<RowMessage> {
        let oldest = self.last + 1 - self.changes.len() as u64;
        // Older changes are not available: the coordinator detects the gap.
        let first = from.max(oldest);
        let skipped = usize::try_from(first - oldest).ok()?;
        let changes: Vec<_> = self
            .changes
            .iter()
            .skip(skipped)
            .take(MAX_ROWS_PER_MESSAGE)
            .copied()
            .collect();
        (!changes.is_empty()).then_some(RowMessage::Changes { first, changes })
    }

    /// Returns the message with a page of the list. `None` if another list was started
    /// since. `rows` are at most [`MAX_ROWS_PER_MESSAGE`] rows after `after`, read after the call
    /// of [`Self::start_page`].
    #[must_use]
    pub fn page(
        &self,
        list: u64,
        after: Option<SandboxHash>,
        rows: Vec<Row>,
        is_last: bool,
    ) -> Option<RowMessage> {
        let (_, at) = self.list.filter(|&(current, _)| current == list)?;
        Some(RowMessage::Page {
            list,
            after,
            at,
            rows,
            is_last,
        })
    }

    /// Prepares a page. Must be called before the rows are read: changes after the call are sent
    /// after the list, so that none is missed.
    pub fn start_page(&mut self, list: u64, after: Option<SandboxHash>) {
        // If this process was restarted during the list, the number of its last change differs from
        // the one in earlier pages. The coordinator then finds another `at` in this page, and
        // requests a new list.
        let is_started = self.list.is_some_and(|(current, _)| current == list);
        if after.is_none() || !is_started {
            self.list = Some((list, self.last));
        }
    }
}

/// State of the transfer of a member's rows.
#[derive(Debug, Clone, Copy)]
enum Receiving {
    /// A full list is requested page by page.
    List {
        /// Last hash of the received pages.
        after: Option<SandboxHash>,
        /// Number of the last change before the start of the list. `None` before the first page.
        at: Option<u64>,
        /// True if the directory had rows of the member at the start of the list.
        had_rows: bool,
    },
    /// The list is complete, and changes are applied.
    Changes {
        /// Number of the next change to apply.
        next: u64,
    },
}

/// State of a member's stream at the coordinator.
#[derive(Debug)]
pub struct RowReceiver {
    /// Number of the current list, or of the last one after its end.
    list: u64,
    receiving: Receiving,
}

impl RowReceiver {
    /// Creates the state of a member whose rows are unknown. `list` is the number of the list that
    /// will be requested, and must differ from the numbers of earlier lists of the same member.
    #[must_use]
    pub fn new(list: u64) -> Self {
        Self {
            list,
            receiving: Receiving::List {
                after: None,
                at: None,
                had_rows: false,
            },
        }
    }

    /// Returns whether the directory contains all rows of the member, except changes in transit.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(self.receiving, Receiving::Changes { .. })
    }

    /// Returns the next request.
    #[must_use]
    pub fn request(&self) -> RowRequest {
        match self.receiving {
            Receiving::List { after, .. } => RowRequest::Page {
                list: self.list,
                after,
            },
            Receiving::Changes { next } => RowRequest::Changes { from: next },
        }
    }

    /// Requests a new list.
    fn restart(&mut self) {
        // Only the low 16 bits count lists. The other bits identify the registration of the member.
        let next = self.list.wrapping_add(1) & 0xffff;
        *self = Self::new(self.list & !0xffff | next);
    }

    /// Applies a message to the directory. Adds the rows that the member has removed to `removed`.
    /// Returns whether the next request must be sent.
    ///
    /// # Errors
    /// [`DirectoryError`] if a row cannot be stored. [`Self::request`] then returns the first page
    /// of a new list.
    pub fn receive(
        &mut self,
        member: MemberId,
        message: &RowMessage,
        directory: &mut Directory,
        removed: &mut Vec<SandboxHash>,
    ) -> Result<bool, DirectoryError> {
        let result = match message {
            RowMessage::Changes { first, changes } => {
                self.receive_changes(member, (*first, changes), directory, removed)
            }
            RowMessage::Page {
                list,
                after,
                at,
                rows,
                is_last,
            } if *list == self.list => {
                self.receive_page(member, (*after, *at), rows, *is_last, directory)
            }
            RowMessage::Page { .. } => Ok(false),
        };
        if result.is_err() {
            self.restart();
        }
        result
    }

    /// Applies changes, and skips changes that were applied before. Requests a list after a gap.
    fn receive_changes(
        &mut self,
        member: MemberId,
        (first, changes): (u64, &[RowChange]),
        directory: &mut Directory,
        removed: &mut Vec<SandboxHash>,
    ) -> Result<bool, DirectoryError> {
        let Receiving::Changes { next } = &mut self.receiving else {
            return Ok(false);
        };
        if first > *next {
            self.restart();
            return Ok(true);
        }
        let known = usize::try_from(*next - first).unwrap_or(usize::MAX);
        for change in changes.iter().skip(known) {
            match change {
                RowChange::Put(row) => directory.put(member, row)?,
                RowChange::Removed(hash) => {
                    if directory.remove(member, *hash) {
                        removed.push(*hash);
                    }
                }
            }
            *next += 1;
        }
        Ok(false)
    }

    /// Applies a page, and ignores pages other than the requested one. After the last page, rows
    /// that the list did not contain are removed.
    fn receive_page(
        &mut self,
        member: MemberId,
        (page_after, page_at): (Option<SandboxHash>, u64),
        rows: &[Row],
        is_last: bool,
        directory: &mut Directory,
    ) -> Result<bool, DirectoryError> {
        let Receiving::List {
            after,
            at,
            had_rows,
        } = &mut self.receiving
        else {
            return Ok(false);
        };
        if page_after != *after {
            return Ok(false);
        }
        if at.is_none() {
            *had_rows = directory.start_list(member)?;
            *at = Some(page_at);
        }
        if *at != Some(page_at) {
            self.restart();
            return Ok(true);
        }
        for row in rows {
            directory.put(member, row)?;
        }
        // A page without rows is also the last one.
        match rows.last() {
            Some(row) if !is_last => *after = Some(row.hash),
            _ => {
                // A host that had no rows cannot have rows that the list does not contain.
                if *had_rows {
                    directory.finish_list(member);
                }
                self.receiving = Receiving::Changes {
                    next: page_at.saturating_add(1),
                };
            }
        }
        Ok(true)
    }
}

//! Takeover: this member becomes the coordinator of the shard if the former coordinator stops
//! renewing the shard's record.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor. An
//! *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A *shard* is a part of the fleet's sandboxes. A *share* is the part of an API
//! key's limit that one member may use.
//!
//! A coordinator replaces the record every few seconds (`Timing::renew`). A member whose heartbeats
//! are not acknowledged reads the record periodically. If its version has not changed for
//! `Timing::unchanged`, the member writes a record with the next term, and itself as the
//! coordinator. The write is conditional on the observed version, so that at most one candidate
//! succeeds.

use super::{Member, Observed};
use crate::coordinator::Coordinator;
use crate::effect::{Effect, ReadOutcome, TermEnd, WriteOutcome};
use crate::ids::{MemberId, Millis, Term, Version, WriteId};
use crate::record::{MemberRow, MemberState, ShardRecord};

/// Maximum number of preceding candidates for which a member waits. Each adds `Timing::rank` to the
/// delay of its takeover, so that candidates rarely write at the same time.
const MAX_RANK: u64 = 20;

/// Conditional write by which this member becomes the coordinator, until its outcome is known.
#[derive(Debug)]
pub(super) struct Takeover {
    pub write: WriteId,
    pub record: ShardRecord,
    pub expected: Version,
    /// Time of the first attempt.
    pub first_sent: Millis,
    /// True if an earlier attempt of the write may still arrive at the store.
    pub is_uncertain: bool,
    /// Time of the next attempt. `None` if no attempt is planned.
    pub repeat_at: Option<Millis>,
}

impl Member {
    /// Handles the answer to `Effect::ReadShard`. If the record has a later term than the
    /// coordinator of this member, another member has taken over, and the own term ends.
    pub(super) fn shard_read(
        &mut self,
        now: Millis,
        outcome: ReadOutcome<ShardRecord>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(started) = self.reading.take() else {
            return;
        };
        let ReadOutcome::Found(record, version) = outcome else {
            return;
        };
        if let Some(coordinator) = &self.coordinator {
            if record.term <= coordinator.term() {
                return;
            }
            self.end_term(
                TermEnd::Replaced {
                    by: Some(record.term),
                },
                effects,
            );
        }
        self.observe(now, started, *record, version, effects);
        self.consider_takeover(now, effects);
    }

    /// Stores a record that was read by a request sent at `started`. Ends the epoch of this member
    /// if the record declares it dead.
    ///
    /// `started` is zero for the record in the outcome of a write. An older record is then ignored
    /// without a report: only a read that started after the last one proves that the record went
    /// back.
    pub(super) fn observe(
        &mut self,
        now: Millis,
        started: Millis,
        record: ShardRecord,
        version: Version,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(observed) = &self.observed {
            let known = (observed.record.term, observed.record.seq);
            if (record.term, record.seq) < known {
                // A read that started earlier may return an older record.
                if started > observed.read_at {
                    effects.push(Effect::Regressed {
                        term: record.term,
                        seq: record.seq,
                    });
                }
                return;
            }
        }
        self.newest_version(now, &version);
        if self
            .observed
            .as_ref()
            .is_some_and(|observed| observed.version == version)
        {
            return;
        }
        let is_new_term = self.term() != Some(record.term);
        let row = record.row(self.config.id);
        let is_ended = self.epoch.is_some_and(|epoch| {
            row.is_none_or(|row| row.epoch > epoch || row.epoch == epoch && !row.state.is_live())
        });
        self.observed = Some(Observed {
            record,
            version,
            read_at: now,
        });
        if is_ended {
            self.end_epoch(effects);
        }
        if is_new_term {
            self.next_heartbeat = now;
        }
    }

    /// Records that the shard's record has this version, and when this member learned of it.
    ///
    /// The coordinator wrote this version before this member learned of it. A takeover may
    /// therefore count `Timing::unchanged` from this receipt, also if it was an acknowledgement of
    /// a heartbeat and no read.
    pub(super) fn newest_version(&mut self, now: Millis, version: &Version) {
        if self
            .newest
            .as_ref()
            .is_none_or(|(newest, _)| newest != version)
        {
            self.newest = Some((version.clone(), now));
        }
    }

    pub(super) fn term(&self) -> Option<Term> {
        self.shard().map(|record| record.term)
    }

    /// Ends the epoch of this member. Without an epoch it must not claim, resume or restore
    /// sandboxes. Unused shares of budgets are returned, because the coordinator does not count
    /// them in a new epoch.
    pub(super) fn end_epoch(&mut self, effects: &mut Vec<Effect>) {
        if let Some(epoch) = self.epoch.take() {
            self.ended = Some(epoch);
            self.deadline = None;
            self.sent.clear();
            self.shares.lock().return_all_unused();
            effects.push(Effect::EpochEnded { epoch });
        }
    }

    /// Starts a takeover if the record was unchanged for long enough.
    fn consider_takeover(&mut self, now: Millis, effects: &mut Vec<Effect>) {
        let timing = self.config.timing;
        let Some(observed) = &self.observed else {
            return;
        };
        if self.coordinator.is_some() || self.takeover.is_some() {
            return;
        }
        // If an acknowledgement has named a newer version, the observed record is outdated: read it
        // first.
        let newest = self
            .newest
            .as_ref()
            .filter(|(version, _)| *version == observed.version);
        let Some(&(_, since)) = newest else {
            return;
        };
        let Some(rank) = rank(&observed.record, self.config.id) else {
            return;
        };
        let due = since
            .plus(timing.unchanged + rank * timing.rank)
            .max(self.acknowledged.plus(timing.unacknowledged));
        // The record of a new fleet names its first member, but no process has been the coordinator
        // yet. No acknowledgement of a former coordinator can be in use.
        let is_new = observed.record.is_new() && observed.record.coordinator == self.config.id;
        if now < due && !is_new {
            self.next_read = self.next_read.min(due);
            return;
        }
        let mut record = observed.record.clone();
        record.term = Term(record.term.0.saturating_add(1));
        record.seq = record.seq.saturating_add(1);
        record.coordinator = self.config.id;
        if let Some(row) = record.row_mut(self.config.id) {
            // Members must reach the new coordinator, also if it has moved since its registration.
            row.address.clone_from(&self.config.address);
        }
        let takeover = Takeover {
            write: WriteId(self.next_write),
            record,
            expected: observed.version.clone(),
            first_sent: now,
            is_uncertain: false,
            repeat_at: None,
        };
        self.next_write += 1;
        effects.push(Effect::ReplaceShard {
            write: takeover.write,
            record: Box::new(takeover.record.clone()),
            expected: takeover.expected.clone(),
        });
        self.takeover = Some(takeover);
    }

    /// Handles the outcome of a write of the shard's record, either by a takeover or by the
    /// coordinator of this member.
    pub(super) fn shard_written(
        &mut self,
        now: Millis,
        write: WriteId,
        outcome: WriteOutcome<ShardRecord>,
        effects: &mut Vec<Effect>,
    ) {
        if self
            .takeover
            .as_ref()
            .is_some_and(|takeover| takeover.write == write)
        {
            self.takeover_written(now, outcome, effects);
        } else if let Some(coordinator) = &mut self.coordinator {
            let lost = match &outcome {
                WriteOutcome::Lost(Some(current)) => Some(current.clone()),
                _ => None,
            };
            let Some(end) = coordinator.written(now, write, outcome, effects) else {
                return;
            };
            self.end_term(end, effects);
            if let Some((record, version)) = lost.map(|current| *current) {
                self.observe(now, Millis(0), record, version, effects);
            }
        }
    }

    /// Handles the outcome of the write with which this member takes over the role of the
    /// coordinator.
    fn takeover_written(
        &mut self,
        now: Millis,
        outcome: WriteOutcome<ShardRecord>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(mut takeover) = self.takeover.take() else {
            return;
        };
        match outcome {
            // No attempt can arrive later: the takeover is abandoned, and considered again after
            // the next read.
            WriteOutcome::Rejected if !takeover.is_uncertain => {}
            // The rejection of a repetition proves nothing about earlier attempts, which may still
            // arrive. Repeat the same write until its outcome is known.
            WriteOutcome::Rejected | WriteOutcome::Unknown => {
                takeover.is_uncertain = true;
                takeover.repeat_at = Some(now.plus(self.config.timing.repeat));
                self.takeover = Some(takeover);
            }
            WriteOutcome::Lost(current) => {
                if let Some((record, version)) = current.map(|current| *current) {
                    self.observe(now, Millis(0), record, version, effects);
                }
            }
            WriteOutcome::Done(version) => {
                let term = takeover.record.term;
                let coordinator = Coordinator::new(
                    self.config.timing,
                    takeover.record,
                    version,
                    WriteId(self.next_write),
                    (takeover.first_sent, now),
                    self.limits.clone(),
                );
                effects.push(Effect::TermStarted(term));
                coordinator.announce(effects);
                self.coordinator = Some(Box::new(coordinator));
                self.next_heartbeat = now;
            }
        }
    }

    /// Drops the coordinator. Its write numbers are not reused, since a late answer may name one of
    /// them.
    fn end_term(&mut self, reason: TermEnd, effects: &mut Vec<Effect>) {
        if let Some(coordinator) = self.coordinator.take() {
            let term = coordinator.term();
            self.next_write = coordinator.next_write().0;
            effects.push(Effect::TermEnded { term, reason });
        }
    }
}

/// Returns the number of candidates that precede a member. `None` if the member must not take over.
fn rank(record: &ShardRecord, id: MemberId) -> Option<u64> {
    let row = record.row(id)?;
    if row.state == MemberState::Left {
        return None;
    }
    let is_candidate =
        |row: &&MemberRow| row.state.is_live() && row.id != record.coordinator && row.id != id;
    let candidates = record.members.iter().filter(is_candidate);
    // A dead member takes over only if no live one does.
    let preceding = candidates.filter(|other| other.id < id || !row.state.is_live());
    Some((preceding.count() as u64).min(MAX_RANK))
}

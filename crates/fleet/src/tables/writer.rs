//! The writer of the tables (API keys, template names): one task of the coordinator. The other
//! members send their changes to it.
//!
//! The *term* counts the coordinators of a fleet: each has a higher term than its predecessor.
//!
//! The rows of the tables are stored in parts, which are records. One more record, the index, lists
//! the last commits. A commit is one conditional replacement of the index, which contains the
//! changed rows until a *fold* moves them to their parts.
//!
//! Changes within [`COMMIT_INTERVAL`] share a commit. A revocation is committed at once, together
//! with all changes that wait. A writer whose term was taken over cannot replace the index: its
//! callers receive an error.

mod fold;

use super::change::{Change, Staged};
use super::load::{index_key, part_key, read_part};
use super::{Shared, TableError};
use crate::RecordError;
use crate::records::{Outcome, PendingWrite, Record};
use jiffy_fleet_core::record::{MAX_PENDING_BYTES, Row, TableIndex};
use jiffy_fleet_core::{MemberId, Term};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until};

/// Minimum interval between two commits of changes that are not urgent.
const COMMIT_INTERVAL: Duration = Duration::from_secs(3);
/// Interval between two checks whether pending rows must be moved to their parts.
const FOLD_INTERVAL: Duration = Duration::from_secs(10);
/// Size of pending rows above which they are moved to their parts.
const FOLD_BYTES: usize = 64 << 10;
/// Maximum number of changes of one commit.
const MAX_BATCH: usize = 1_000;
/// Size of the rows of one commit above which further changes wait for the next one.
const MAX_BATCH_BYTES: usize = 512 << 10;
/// Pause before a write with an unknown outcome is repeated.
const REPEAT_PAUSE: Duration = Duration::from_millis(500);

/// Change with the caller that waits for it.
pub(super) struct WriteRequest {
    pub change: Change,
    pub answer: oneshot::Sender<Result<Committed, TableError>>,
}

/// Committed change.
#[derive(Debug, Clone)]
pub(super) struct Committed {
    pub row: Row,
    /// Number of the commit.
    pub number: u64,
    /// Members that have not confirmed the commit.
    pub unconfirmed: Vec<MemberId>,
}

/// Callers of a commit with the rows that they changed.
type Callers = Vec<(oneshot::Sender<Result<Committed, TableError>>, Row)>;

/// Last index that this member has written or read. It is replaced only if the record still has
/// this version, which fails after another member took over.
pub(super) struct Held {
    pub term: Term,
    pub index: TableIndex,
    pub record: Record,
}

/// Task that commits changes of the tables while this member is the coordinator.
pub(super) struct Writer {
    pub shared: Arc<Shared>,
    requests: mpsc::Receiver<WriteRequest>,
    pub held: Option<Held>,
    /// Requests that wait for the next commit.
    queue: VecDeque<WriteRequest>,
    /// Time of the last commit. `None` before the first one.
    last_commit: Option<Instant>,
}

impl Writer {
    pub fn new(shared: Arc<Shared>, requests: mpsc::Receiver<WriteRequest>) -> Self {
        Self {
            shared,
            requests,
            held: None,
            queue: VecDeque::new(),
            last_commit: None,
        }
    }

    /// Main loop: collects changes, commits them together, and folds periodically. Ends when all
    /// senders are dropped.
    pub async fn run(mut self) {
        let mut next_fold = Instant::now() + FOLD_INTERVAL;
        loop {
            let due = self.due();
            tokio::select! {
                biased;
                () = sleep_until(due), if !self.queue.is_empty() => self.commit_queue().await,
                request = self.requests.recv() => match request {
                    Some(request) => self.queue.push_back(request),
                    None => return,
                },
                () = sleep_until(next_fold) => {
                    self.fold_if_due().await;
                    next_fold = Instant::now() + FOLD_INTERVAL;
                }
            }
            // All requests that have arrived share the commit.
            while let Ok(request) = self.requests.try_recv() {
                self.queue.push_back(request);
            }
        }
    }

    /// Returns the time of the next commit.
    fn due(&self) -> Instant {
        let is_urgent = |request: &WriteRequest| request.change.action.is_urgent();
        match self.last_commit {
            Some(last) if !self.queue.iter().any(is_urgent) && self.queue.len() < MAX_BATCH => {
                last + COMMIT_INTERVAL
            }
            _ => Instant::now(),
        }
    }

    /// Rewrites the parts of the table with the pending changes, if there are any and this host is
    /// still the writer.
    async fn fold_if_due(&mut self) {
        let Some(held) = &self.held else { return };
        if held.index.pending.is_empty() || self.shared.term() != Some(held.term) {
            return;
        }
        if let Err(e) = self.fold().await {
            tracing::warn!(error = %e, "cannot rewrite the parts of a table");
        }
    }

    /// Commits the queued changes together, and answers their callers. Changes that do not fit into
    /// the commit return to the queue.
    async fn commit_queue(&mut self) {
        let requests: Vec<_> = {
            let count = self.queue.len().min(MAX_BATCH);
            self.queue.drain(..count).collect()
        };
        if let Err(e) = self.prepare().await {
            for request in requests {
                // Ignore the error: the caller no longer waits.
                let _ = request.answer.send(Err(e.clone()));
            }
            return;
        }
        let (rows, callers, rest) = self.stage(requests);
        for request in rest.into_iter().rev() {
            self.queue.push_front(request);
        }
        if rows.is_empty() {
            // All requests were repetitions of changes that are committed.
            let number = self.held.as_ref().map_or(0, |held| held.index.number);
            self.answer(number, Vec::new(), callers);
            return;
        }
        self.last_commit = Some(Instant::now());
        match self.commit(&rows).await {
            Ok(number) => {
                {
                    let mut state = self.shared.state.write();
                    let (since, term) = (number - 1, self.shared.term().unwrap_or_default());
                    state.apply_commits(since, number, term, rows.clone());
                }
                self.shared.announce(number);
                self.answer(number, rows, callers);
            }
            Err(e) => {
                self.held = None;
                self.settle_lost(callers, e).await;
            }
        }
        let pending = self
            .held
            .as_ref()
            .map_or(0, |held| pending_bytes(&held.index));
        if pending > FOLD_BYTES && self.queue.is_empty() {
            self.fold_if_due().await;
        }
    }

    /// Takes the index over, unless this member holds it in its current term.
    async fn prepare(&mut self) -> Result<(), TableError> {
        let term = self.shared.term();
        let own = self.shared.peers.own();
        let Some(term) = term else {
            self.held = None;
            return Err(TableError::NotWriter(own));
        };
        if self.held.as_ref().is_some_and(|held| held.term == term) {
            return Ok(());
        }
        self.held = None;
        self.held = Some(self.take_over(term).await?);
        Ok(())
    }

    /// Writes the term of this member to the index. From then on no former writer can commit.
    async fn take_over(&self, term: Term) -> Result<Held, TableError> {
        let (shared, own) = (&self.shared, self.shared.peers.own());
        let key = index_key()?;
        loop {
            let current = shared.load().await?;
            let (index, write) = match current {
                None => {
                    let index = TableIndex::new(shared.fleet.clone(), term, own);
                    let write = shared.records.create(&key, index.encode()?)?;
                    (index, write)
                }
                Some((index, _)) if index.term > term => {
                    return Err(TableError::NotWriter(own));
                }
                Some((mut index, record)) => {
                    (index.term, index.writer) = (term, own);
                    index.commit(&[]);
                    let write = shared.records.replace(&key, index.encode()?, &record)?;
                    (index, write)
                }
            };
            if let Outcome::Done(record) = shared.settle(&write).await? {
                shared.load_parts(&index).await?;
                tracing::info!(%term, number = index.number, "became the writer of the tables");
                let (shared, number) = (shared.clone(), index.number);
                // The takeover changed no row.
                tokio::spawn(async move { shared.push(number - 1, number, Vec::new()).await });
                return Ok(Held {
                    term,
                    index,
                    record,
                });
            }
            if shared.term() != Some(term) {
                return Err(TableError::NotWriter(own));
            }
        }
    }

    /// Validates changes in their order. Returns the changed rows, the callers whose changes are
    /// part of the commit, and the requests that do not fit.
    fn stage(&self, requests: Vec<WriteRequest>) -> (Vec<Row>, Callers, Vec<WriteRequest>) {
        let number = self.held.as_ref().map_or(0, |held| held.index.number) + 1;
        let state = self.shared.state.read();
        let mut staged = Staged::new(&state, number, now_ms());
        let (mut callers, mut rest) = (Vec::new(), Vec::new());
        for request in requests {
            if staged.encoded_bytes() > MAX_BATCH_BYTES {
                rest.push(request);
                continue;
            }
            match staged.add(request.change) {
                Ok(row) => callers.push((request.answer, row)),
                // The caller may have disconnected.
                Err(e) => drop(request.answer.send(Err(e))),
            }
        }
        (staged.into_rows(), callers, rest)
    }

    /// Commits rows. Returns the number of the commit.
    async fn commit(&mut self, rows: &[Row]) -> Result<u64, TableError> {
        let bytes: usize = rows.iter().map(super::state::encoded_bytes).sum();
        if self.pending_bytes() + bytes > MAX_PENDING_BYTES {
            self.fold().await?;
        }
        let own = self.shared.peers.own();
        let held = self.held.as_ref().ok_or(TableError::NotWriter(own))?;
        let mut index = held.index.clone();
        index.commit(rows);
        let write = self.replacement(&index)?;
        self.replace_index(index, &write).await
    }

    /// Replaces the index by the next one. Returns the number of its last commit.
    pub(super) async fn replace_index(
        &mut self,
        index: TableIndex,
        write: &PendingWrite,
    ) -> Result<u64, TableError> {
        let started = (self.shared.clock)();
        match self.shared.settle(write).await? {
            Outcome::Done(record) => {
                // The condition of the write held, so no other member had changed the tables: those
                // of this member were current when the write was sent. `Contact` records this time.
                self.shared.contact.lock().verify(started);
                let number = index.number;
                if let Some(held) = &mut self.held {
                    (held.index, held.record) = (index, record);
                }
                Ok(number)
            }
            Outcome::Lost(_) => Err(TableError::NotWriter(self.shared.peers.own())),
        }
    }

    /// Prepares the replacement of the index.
    pub(super) fn replacement(&self, index: &TableIndex) -> Result<PendingWrite, TableError> {
        let own = self.shared.peers.own();
        let held = self.held.as_ref().ok_or(TableError::NotWriter(own))?;
        let records = &self.shared.records;
        Ok(records.replace(&index_key()?, index.encode()?, &held.record)?)
    }

    fn pending_bytes(&self) -> usize {
        self.held
            .as_ref()
            .map_or(0, |held| pending_bytes(&held.index))
    }

    /// Pushes a commit to all members, and answers its callers when the members have confirmed it.
    fn answer(&self, number: u64, rows: Vec<Row>, callers: Callers) {
        let shared = self.shared.clone();
        tokio::spawn(async move {
            // Without rows, the push contains no commit: it only announces `number`.
            let since = number - u64::from(!rows.is_empty());
            let unconfirmed = shared.push(since, number, rows).await;
            for (answer, row) in callers {
                let committed = Committed {
                    row,
                    number,
                    unconfirmed: unconfirmed.clone(),
                };
                // Ignore the error: the caller no longer waits.
                let _ = answer.send(Ok(committed));
            }
        });
    }

    /// Answers the callers of a failed commit. If the index had another version
    /// ([`TableError::NotWriter`]), the rows are looked up: the commit may have been executed, but
    /// its answer was lost, before another writer replaced the index.
    async fn settle_lost(&self, callers: Callers, error: TableError) {
        let is_lost = matches!(error, TableError::NotWriter(_));
        let index = if is_lost {
            self.shared.load().await.ok().flatten()
        } else {
            None
        };
        for (answer, row) in callers {
            let result = match &index {
                Some((index, _)) => self.committed(index, row).await,
                None if is_lost => Err(TableError::Unsettled),
                None => Err(error.clone()),
            };
            let _ = answer.send(result);
        }
    }

    /// Returns the change if `index` or the part of the row shows that it was committed.
    async fn committed(&self, index: &TableIndex, row: Row) -> Result<Committed, TableError> {
        let key = row.key();
        let (table, part) = (key.table(), key.part());
        let is_same = |other: &&Row| other.key() == key;
        let is_done = match index.pending.iter().find(is_same) {
            Some(pending) => is_result(&row, Some(pending)),
            None => {
                let shared = &self.shared;
                let read = read_part(&shared.records, &shared.fleet, table, part).await;
                let read = read.map_err(|e| {
                    tracing::warn!(error = %e, part = ?part_key(table, part), "cannot read a part");
                    TableError::Unsettled
                })?;
                let part = read.as_ref().map(|(part, _)| &part.rows);
                is_result(&row, part.and_then(|rows| rows.iter().find(is_same)))
            }
        };
        if !is_done {
            return Err(TableError::NotWriter(self.shared.peers.own()));
        }
        Ok(Committed {
            number: row.revision,
            row,
            unconfirmed: self.shared.peers.others(),
        })
    }
}

/// Returns whether the change to `row` is the reason for the present state of the row. `current` is
/// `None` if the row does not exist.
fn is_result(row: &Row, current: Option<&Row>) -> bool {
    match current {
        Some(current) if !current.removed => current.request == row.request,
        // Parts omit removed rows. The change that removed the row is not known there, but its
        // result is.
        _ => row.removed,
    }
}

fn pending_bytes(index: &TableIndex) -> usize {
    index.pending.iter().map(super::state::encoded_bytes).sum()
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |time| {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    })
}

impl Shared {
    /// Sends a write until its outcome is known.
    pub(super) async fn settle(&self, write: &PendingWrite) -> Result<Outcome, TableError> {
        loop {
            match self.records.send(write).await {
                Err(e @ RecordError::Unknown { .. }) => {
                    tracing::warn!(error = %e, "repeating a write of the tables");
                    sleep(REPEAT_PAUSE).await;
                }
                outcome => return Ok(outcome?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_fleet_core::record::{RequestId, RowContent, TemplateRow};

    fn row(request: u8, removed: bool) -> Row {
        Row {
            revision: 2,
            request: RequestId([request; 16]),
            removed,
            content: RowContent::Template(TemplateRow {
                owner: None,
                name: "web".to_owned(),
                tag: "default".to_owned(),
                template_version: "v1".to_owned(),
                root: None,
                home: None,
                public: false,
                updated_ms: 1,
                unknown: Default::default(),
            }),
        }
    }

    #[test]
    fn a_lost_answer_is_settled_by_the_present_row_also_after_a_fold() {
        let (put, removal) = (row(1, false), row(1, true));
        // (changed row, present row, whether the change was committed)
        for (changed, current, is_committed) in [
            (&put, Some(row(1, false)), true),
            (&put, Some(row(2, false)), false),
            (&put, Some(row(2, true)), false),
            (&put, None, false),
            (&removal, Some(row(1, true)), true),
            // A fold has removed the row from the index and from its part.
            (&removal, None, true),
            // Another member has created the row again, or the removal was not committed.
            (&removal, Some(row(2, false)), false),
        ] {
            let result = is_result(changed, current.as_ref());
            assert_eq!(result, is_committed, "{changed:?} {current:?}");
        }
    }
}

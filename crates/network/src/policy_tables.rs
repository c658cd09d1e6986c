//! Applies the egress policies of sandboxes to their slots. The program `nft` compiles the table of
//! a policy once. The result is recorded, and replayed without `nft` for other sandboxes with the
//! same policy.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::NetError;
use crate::program;
use crate::ruleset::{RecordedRuleset, RulesetScope};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Name of the table of a policy. See [`crate::policy::EgressPolicy::script`].
const TABLE: &str = "jiffy";
/// Maximum number of recorded policies, the most recently used ones.
const MAX_RECORDED_POLICIES: usize = 16;
/// Maximum size in bytes of a script whose table is recorded.
const MAX_RECORDED_SCRIPT_BYTES: usize = 64 * 1024;

/// Recordings of the tables of recently used policies.
#[derive(Debug, Default)]
pub(crate) struct PolicyTables {
    /// Ordered by use, the most recent last.
    recorded: Mutex<VecDeque<RecordedTable>>,
    /// True if this kernel's tables cannot be replayed.
    is_disabled: AtomicBool,
}

/// Table that `nft` created from a script.
#[derive(Debug, Clone)]
struct RecordedTable {
    /// Script in the language of `nft`.
    script: Arc<str>,
    table: Arc<RecordedRuleset>,
    /// True if a replayed table was compared with the recording.
    is_verified: bool,
}

impl PolicyTables {
    /// Atomically replaces the table in the network namespace of this thread by the table of
    /// `script`.
    pub fn enforce(&self, script: &str) -> Result<(), NetError> {
        if let Some(table) = self.take(script) {
            match replay(&table) {
                Ok(()) => {
                    self.remember(RecordedTable {
                        is_verified: true,
                        ..table
                    });
                    return Ok(());
                }
                Err(why) => self.disable(&why),
            }
        }
        program::nft(script)?;
        // Record the new table for the next sandbox with this policy.
        self.record(script);
        Ok(())
    }

    /// Removes and returns the recording of `script`. The caller adds it again with `remember`,
    /// which makes it the most recently used.
    fn take(&self, script: &str) -> Option<RecordedTable> {
        let mut recorded = self.recorded.lock();
        let at = recorded.iter().position(|table| *table.script == *script)?;
        recorded.remove(at)
    }

    /// Adds a recorded table. If there are too many, the least recently used table is removed.
    fn remember(&self, table: RecordedTable) {
        let mut recorded = self.recorded.lock();
        // Another thread may have recorded the table as well.
        recorded.retain(|other| other.script != table.script);
        recorded.push_back(table);
        if recorded.len() > MAX_RECORDED_POLICIES {
            recorded.pop_front();
        }
    }

    /// Records the table that a script has just created, for later sandboxes with the same script.
    fn record(&self, script: &str) {
        // Relaxed: a thread that still reads `false` records one more table, whose replay then
        // fails and falls back to `nft`.
        if self.is_disabled.load(Ordering::Relaxed) || script.len() > MAX_RECORDED_SCRIPT_BYTES {
            return;
        }
        match RecordedRuleset::read(RulesetScope::InetTable(TABLE)) {
            Ok(table) => self.remember(RecordedTable {
                script: script.into(),
                table: Arc::new(table),
                is_verified: false,
            }),
            Err(e) => self.disable(&e.to_string()),
        }
    }

    /// Falls back to `nft` until the process ends, because the kernel did not accept a replayed
    /// table.
    fn disable(&self, why: &str) {
        tracing::warn!(
            error = why,
            "cannot replay egress rules: `nft` is run for each sandbox with rules of \
             its own"
        );
        self.is_disabled.store(true, Ordering::Relaxed);
        self.recorded.lock().clear();
    }
}

/// Replays a recording in the network namespace of this thread. The first replay of a recording is
/// verified by reading the table back.
fn replay(recorded: &RecordedTable) -> Result<(), String> {
    recorded
        .table
        .apply(Some(TABLE))
        .map_err(|e| e.to_string())?;
    if recorded.is_verified {
        return Ok(());
    }
    let replayed =
        RecordedRuleset::read(RulesetScope::InetTable(TABLE)).map_err(|e| e.to_string())?;
    if replayed == *recorded.table {
        Ok(())
    } else {
        Err("the replayed rules differ from the recorded ones".to_owned())
    }
}

#[cfg(test)]
#[path = "policy_tables_tests.rs"]
mod tests;

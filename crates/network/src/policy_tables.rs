//! Tables that enforce policies: compiled by `nft` once for each policy, recorded, and replayed for
//! further sandboxes with it.

use crate::NetError;
use crate::program;
use crate::ruleset::{RecordedRuleset, RulesetScope};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Name of the table of a policy, see [`crate::policy::EgressPolicy::script`].
const TABLE: &str = "jiffy";
/// Most policies that are recorded: those used last.
const MAX_RECORDED_POLICIES: usize = 16;
/// Length of the longest script whose table is recorded.
const MAX_RECORDED_SCRIPT_BYTES: usize = 64 * 1024;

/// Recordings of the tables of the policies used last.
#[derive(Debug, Default)]
pub(crate) struct PolicyTables {
    /// The one used last is the last.
    recorded: Mutex<VecDeque<RecordedTable>>,
    /// Tables of this kernel cannot be replayed.
    useless: AtomicBool,
}

#[derive(Debug, Clone)]
struct RecordedTable {
    /// In the language of `nft`.
    script: Arc<str>,
    table: Arc<RecordedRuleset>,
    /// The table of a slot where it was replayed is the same.
    proven: bool,
}

impl PolicyTables {
    /// Replaces the table in the network namespace of this thread by that of `script`, as a whole
    /// or not at all.
    pub fn enforce(&self, script: &str) -> Result<(), NetError> {
        if let Some(known) = self.find(script) {
            match replay(&known) {
                Ok(()) => {
                    self.remember(RecordedTable {
                        proven: true,
                        ..known
                    });
                    return Ok(());
                }
                Err(why) => self.give_up(&why),
            }
        }
        program::nft(script)?;
        self.record(script);
        Ok(())
    }

    fn find(&self, script: &str) -> Option<RecordedTable> {
        let mut recorded = self.recorded.lock();
        let at = recorded.iter().position(|known| *known.script == *script)?;
        recorded.remove(at)
    }

    fn remember(&self, table: RecordedTable) {
        let mut recorded = self.recorded.lock();
        // Another thread may have recorded it as well.
        recorded.retain(|known| known.script != table.script);
        recorded.push_back(table);
        if recorded.len() > MAX_RECORDED_POLICIES {
            recorded.pop_front();
        }
    }

    fn record(&self, script: &str) {
        if self.useless.load(Ordering::Relaxed) || script.len() > MAX_RECORDED_SCRIPT_BYTES {
            return;
        }
        match RecordedRuleset::read(RulesetScope::InetTable(TABLE)) {
            Ok(table) => self.remember(RecordedTable {
                script: script.into(),
                table: Arc::new(table),
                proven: false,
            }),
            Err(e) => self.give_up(&e.to_string()),
        }
    }

    fn give_up(&self, why: &str) {
        tracing::warn!(
            "egress rules cannot be replayed here, so `nft` is run for each sandbox with rules of \
             its own: {why}"
        );
        self.useless.store(true, Ordering::Relaxed);
        self.recorded.lock().clear();
    }
}

fn replay(known: &RecordedTable) -> Result<(), String> {
    known.table.apply(Some(TABLE)).map_err(|e| e.to_string())?;
    if known.proven {
        return Ok(());
    }
    let there = RecordedRuleset::read(RulesetScope::InetTable(TABLE)).map_err(|e| e.to_string())?;
    match there == *known.table {
        true => Ok(()),
        false => Err("the rules that are in force then are others".to_owned()),
    }
}

#[cfg(test)]
#[path = "policy_tables_tests.rs"]
mod tests;

//! Logs and metrics of functions, read from the processes of their owners.
//!
//! All functions of one owner run in one process, which stores the latest log entries and counters
//! in memory.
//!
//! A daemon *adopts* the processes that continued to run while no daemon ran.

use super::Functions;
use crate::blocking::blocking;
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use crate::function_state::FunctionState;
use jiffy_proto::function::{LogEntry, MetricsSnapshot};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which new log entries are requested from a process while a log is followed.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

impl Functions {
    /// Returns a function after reading its log and metrics from the process, if the process runs.
    async fn refreshed(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<Arc<FunctionState>, FunctionError> {
        let owner = self.existing_owner(key, name)?;
        let state = owner.function(name)?;
        let running = owner.running.read().clone();
        if let Some(in_use) = running.and_then(|running| running.if_running()) {
            let read = state.clone();
            blocking(move || {
                read.read_from_process(&in_use.process);
                Ok(())
            })
            .await?;
        }
        Ok(state)
    }

    /// Returns the entries of a function's log from `after` on, and the next position. If there are
    /// no entries, waits for at most `wait`.
    pub async fn logs(
        &self,
        key: Option<&str>,
        name: &str,
        after: u64,
        wait: Duration,
    ) -> Result<(Vec<LogEntry>, u64), FunctionError> {
        let deadline = Instant::now() + wait;
        loop {
            let state = self.refreshed(key, name).await?;
            let (entries, next) = {
                let log = state.log.lock();
                (log.read(after), log.next())
            };
            if !entries.is_empty() || Instant::now() >= deadline {
                return Ok((entries, next));
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            // The log is polled, because the process does not report new entries by itself.
            tokio::time::sleep(FOLLOW_INTERVAL.min(remaining)).await;
        }
    }

    /// Returns the metrics of a function since the daemon started. An adopted process also
    /// contributes its metrics from before that time.
    pub async fn metrics(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<MetricsSnapshot, FunctionError> {
        Ok(self.refreshed(key, name).await?.metrics())
    }

    /// Returns the metrics of all functions as of the last maintenance pass, without requests to
    /// the processes.
    #[must_use]
    pub fn all_metrics(&self) -> Vec<(Arc<FunctionRecord>, MetricsSnapshot)> {
        let owners = self.owners();
        let states = owners.iter().flat_map(|owner| owner.states());
        states.map(|s| (s.record(), s.metrics())).collect()
    }
}

//! Logs and counts.

use super::Functions;
use crate::blocking::blocking;
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use crate::function_state::FunctionState;
use jiffy_proto::function::{LogEntry, MetricsSnapshot};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval at which a process is asked for further entries of a log that is followed.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

impl Functions {
    /// Function with everything that its process has to tell.
    async fn pulled(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<Arc<FunctionState>, FunctionError> {
        let owner = self.existing_owner(key, name)?;
        let state = owner.function(name)?;
        let running = owner.running.read().clone();
        if let Some(in_use) = running.and_then(|running| running.peek()) {
            let pulled = state.clone();
            blocking(move || {
                pulled.pull(&in_use.process);
                Ok(())
            })
            .await?;
        }
        Ok(state)
    }

    /// Entries of a function's log from `after` on, and the position behind them. Waits for `wait`
    /// at most if there are none.
    pub async fn logs(
        &self,
        key: Option<&str>,
        name: &str,
        after: u64,
        wait: Duration,
    ) -> Result<(Vec<LogEntry>, u64), FunctionError> {
        let deadline = Instant::now() + wait;
        loop {
            let state = self.pulled(key, name).await?;
            let (entries, next) = {
                let log = state.log.lock();
                (log.read(after), log.next())
            };
            if !entries.is_empty() || Instant::now() >= deadline {
                return Ok((entries, next));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            tokio::time::sleep(FOLLOW_INTERVAL.min(left)).await;
        }
    }

    /// Counts of a function since the daemon started, and of the process that it found.
    pub async fn metrics(
        &self,
        key: Option<&str>,
        name: &str,
    ) -> Result<MetricsSnapshot, FunctionError> {
        Ok(self.pulled(key, name).await?.metrics())
    }

    /// Counts of all functions, at most a second old.
    #[must_use]
    pub fn all_metrics(&self) -> Vec<(Arc<FunctionRecord>, MetricsSnapshot)> {
        let owners = self.owners();
        let states = owners.iter().flat_map(|owner| owner.states());
        states.map(|s| (s.record(), s.metrics())).collect()
    }
}

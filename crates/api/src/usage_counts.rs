//! Background task that adds usage to the ledger that sandboxes do not measure themselves: disk
//! space of keys, and requests to functions.

use crate::app::App;
use jiffy_sandbox_manager::UsageAmounts;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Interval between counts.
const INTERVAL: Duration = Duration::from_secs(60);

/// Function: its owner and name.
type FunctionName = (Option<String>, String);

/// State of the last count, behind a lock.
#[derive(Debug, Default)]
pub(crate) struct UsageCounts(Mutex<Counted>);

/// State of the last count, from which the next one computes differences.
#[derive(Debug, Default)]
struct Counted {
    /// Time of the last count.
    at: Option<Instant>,
    /// Requests to each function until the last count.
    requests: HashMap<FunctionName, u64>,
}

impl App {
    /// Counts the usage since the last call. The first call only sets the basis. Blocks.
    pub fn count_usage(&self) {
        let mut counted = self.usage_counts.0.lock();
        let period = counted.at.replace(Instant::now()).map(|at| at.elapsed());
        self.count_requests(&mut counted.requests, period);
        if let Some(period) = period {
            self.count_stored(period);
        }
    }

    /// Counts the requests to functions. `period` is `None` for the first call.
    fn count_requests(&self, counted: &mut HashMap<FunctionName, u64>, period: Option<Duration>) {
        let Some(hooks) = &self.functions else {
            return;
        };
        let mut present = HashMap::new();
        for (record, metrics) in hooks.functions.all_metrics() {
            let name = (record.owner.clone(), record.name.clone());
            let before = counted.get(&name).copied();
            present.insert(name, metrics.requests);
            let Some(period) = period else { continue };
            // A function that was deployed again counts from 0.
            let before = before.filter(|before| *before <= metrics.requests);
            let amounts = UsageAmounts {
                function_requests: metrics.requests - before.unwrap_or(0),
                ..UsageAmounts::default()
            };
            let owner = record.owner.as_deref();
            self.sandboxes.usage().add(owner, period, amounts);
        }
        *counted = present;
    }

    /// Counts the disk space of each key during `period`. Revoked keys may still have objects.
    fn count_stored(&self, period: Duration) {
        // Without the keys, this period is not counted.
        for key in self.keys.list().unwrap_or_default() {
            let Ok(used) = self.quota.usage_of(&key.id) else {
                continue;
            };
            let bytes = used.amount().disk_bytes;
            let kib_s = (bytes >> 10) as f64 * period.as_secs_f64();
            let amounts = UsageAmounts {
                stored_kib_s: kib_s as u64,
                max_stored_bytes: bytes,
                ..UsageAmounts::default()
            };
            self.sandboxes.usage().add(Some(&key.id), period, amounts);
        }
    }
}

/// Background task that counts usage. Never returns.
pub async fn count_usage(app: App) {
    loop {
        let counting = app.clone();
        // Reads databases. The task does not panic.
        let _ = tokio::task::spawn_blocking(move || counting.count_usage()).await;
        tokio::time::sleep(INTERVAL).await;
    }
}

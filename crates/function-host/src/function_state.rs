//! Function in the daemon's memory: its record, log and counts.

use crate::function_record::FunctionRecord;
use crate::log_buffer::LogBuffer;
use crate::tenant_process::TenantProcess;
use jiffy_proto::function::{ControlRequest, ControlResponse, MetricsSnapshot};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Function.
#[derive(Debug)]
pub(crate) struct FunctionState {
    record: RwLock<Arc<FunctionRecord>>,
    pub log: Mutex<LogBuffer>,
    counts: Mutex<FunctionCounts>,
    /// True if it ran since log and counts were taken from the process.
    pub ran: AtomicBool,
}

#[derive(Debug, Default)]
struct FunctionCounts {
    /// Of processes that have ended.
    past: MetricsSnapshot,
    /// Of the process that runs, as it told last.
    current: MetricsSnapshot,
}

impl FunctionState {
    pub(crate) fn new(record: FunctionRecord) -> Self {
        Self {
            record: RwLock::new(Arc::new(record)),
            log: Mutex::default(),
            counts: Mutex::default(),
            ran: AtomicBool::new(false),
        }
    }

    pub(crate) fn record(&self) -> Arc<FunctionRecord> {
        self.record.read().clone()
    }

    pub(crate) fn replace(&self, record: FunctionRecord) -> Arc<FunctionRecord> {
        let record = Arc::new(record);
        *self.record.write() = record.clone();
        record
    }

    /// Counts of all processes.
    pub(crate) fn metrics(&self) -> MetricsSnapshot {
        let counts = self.counts.lock();
        let mut sum = counts.past.clone();
        sum.add(&counts.current);
        sum
    }

    /// Takes log and counts from the process. Blocks.
    pub(crate) fn pull(&self, process: &TenantProcess) {
        self.ran.store(false, Ordering::Release);
        let function = self.record().name.clone();
        let order = ControlRequest::Metrics {
            function: function.clone(),
        };
        // Refused if this process never ran it.
        let Ok(ControlResponse::Metrics { metrics }) = process.order(&order) else {
            return;
        };
        self.counts.lock().current = metrics;
        loop {
            // Held over the order, so that pulls do not cross each other.
            let mut log = self.log.lock();
            let order = ControlRequest::Logs {
                function: function.clone(),
                sequence: log.process_next(),
            };
            match process.order(&order) {
                Ok(ControlResponse::Logs { entries }) if !entries.is_empty() => log.append(entries),
                _ => return,
            }
        }
    }

    /// The process has ended.
    pub(crate) fn end_process(&self) {
        self.ran.store(false, Ordering::Release);
        self.log.lock().end_process();
        let mut counts = self.counts.lock();
        let ended = std::mem::take(&mut counts.current);
        counts.past.add(&MetricsSnapshot {
            running: 0,
            ..ended
        });
    }
}

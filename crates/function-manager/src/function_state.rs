//! State of one function in the daemon's memory: its record, and its log and metrics, which the
//! daemon reads from the tenant's process.

use crate::function_record::FunctionRecord;
use crate::log_buffer::LogBuffer;
use crate::schedule::Schedule;
use crate::tenant_process::TenantProcess;
use jiff::Timestamp;
use jiffy_proto::function::{ControlRequest, ControlResponse, MetricsSnapshot};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// State of one function.
#[derive(Debug)]
pub(crate) struct FunctionState {
    record: RwLock<Arc<FunctionRecord>>,
    pub log: Mutex<LogBuffer>,
    counts: Mutex<FunctionCounts>,
    /// Parsed schedule of the record.
    pub schedule: Mutex<Option<Schedule>>,
    /// True if the function ran since its log and metrics were last read from the process.
    pub ran: AtomicBool,
}

/// Metrics of a function over all of its processes.
#[derive(Debug, Default)]
struct FunctionCounts {
    /// Metrics of exited processes.
    past: MetricsSnapshot,
    /// Metrics of the running process, as last read.
    current: MetricsSnapshot,
}

/// Parses the schedule of a record. The schedule was checked at the deployment.
fn parse(record: &FunctionRecord) -> Option<Schedule> {
    let schedule = Schedule::parse(record.schedule.as_deref()?, Timestamp::now());
    schedule
        .inspect_err(|e| tracing::error!(function = record.name, error = %e, "cannot parse the schedule of a function"))
        .ok()
}

impl FunctionState {
    pub(crate) fn new(record: FunctionRecord) -> Self {
        let schedule = parse(&record);
        Self {
            record: RwLock::new(Arc::new(record)),
            log: Mutex::default(),
            counts: Mutex::default(),
            schedule: Mutex::new(schedule),
            ran: AtomicBool::new(false),
        }
    }

    pub(crate) fn record(&self) -> Arc<FunctionRecord> {
        self.record.read().clone()
    }

    /// Replaces the record, and returns it.
    pub(crate) fn replace(&self, record: FunctionRecord) -> Arc<FunctionRecord> {
        {
            let mut schedule = self.schedule.lock();
            // An unchanged schedule keeps its status and the time of its next call.
            if schedule.as_ref().map(Schedule::expression) != record.schedule.as_deref() {
                *schedule = parse(&record);
            }
        }
        let record = Arc::new(record);
        *self.record.write() = record.clone();
        record
    }

    /// Returns whether to make a scheduled call now. Always false for a disabled function.
    pub(crate) fn start_scheduled(&self, now: Timestamp) -> bool {
        // The record is read before the schedule is locked: the locks of the record and of the
        // schedule are never held together.
        let is_enabled = self.record().enabled;
        let mut schedule = self.schedule.lock();
        is_enabled && schedule.as_mut().is_some_and(|s| s.start_if_due(now))
    }

    /// Returns the sum of the metrics of all processes.
    pub(crate) fn metrics(&self) -> MetricsSnapshot {
        let counts = self.counts.lock();
        let mut sum = counts.past.clone();
        sum.add(&counts.current);
        sum
    }

    /// Records the failure of a request that did not reach the process.
    pub(crate) fn record_fault(&self, request_id: &str, code: &str) {
        self.log.lock().push_fault(request_id, code);
        let mut counts = self.counts.lock();
        let count = counts.past.faults.entry(code.to_owned()).or_default();
        *count = count.saturating_add(1);
    }

    /// Reads log and metrics from the process. Blocks.
    pub(crate) fn read_from_process(&self, process: &TenantProcess) {
        // The flag is cleared first: a request that starts during the read sets it again.
        self.ran.store(false, Ordering::Release);
        let function = self.record().name.clone();
        let request = ControlRequest::Metrics {
            function: function.clone(),
        };
        // The process rejects the request if it never loaded the function.
        let Ok(ControlResponse::Metrics { metrics }) = process.execute(&request) else {
            return;
        };
        self.counts.lock().current = metrics;
        loop {
            // The lock of the log is held during the request, so that concurrent reads do not
            // append entries twice.
            let mut log = self.log.lock();
            let request = ControlRequest::Logs {
                function: function.clone(),
                sequence: log.process_next(),
            };
            match process.execute(&request) {
                Ok(ControlResponse::Logs { entries }) if !entries.is_empty() => log.append(entries),
                _ => return,
            }
        }
    }

    /// Adds the metrics of the exited process to the metrics of past processes. Prepares the log
    /// for the next process, which numbers its entries from 0.
    pub(crate) fn record_process_exit(&self) {
        self.ran.store(false, Ordering::Release);
        self.log.lock().record_process_exit();
        let mut counts = self.counts.lock();
        let exited = std::mem::take(&mut counts.current);
        counts.past.add(&MetricsSnapshot {
            // Requests of the process ended with it.
            running: 0,
            ..exited
        });
    }
}

//! [`RunningProcess`]: the process of an owner as requests use it. It counts uses, and knows the
//! loaded versions and the open connections.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway.

use crate::direct_link::DirectLink;
use crate::function_error::FunctionError;
use crate::process_connections::ProcessConnections;
use crate::tenant_process::{HTTP_SOCKET, TenantProcess};
use crate::use_count::{CountedUse, UseCount};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Running process with its connections and loaded functions.
#[derive(Debug)]
pub(crate) struct RunningProcess {
    pub process: Arc<TenantProcess>,
    pub connections: Arc<ProcessConnections>,
    /// Revisions of loaded functions by name.
    pub loaded: Mutex<HashMap<String, u64>>,
    /// Held while a function is loaded or changed in the process, and while the link `direct` is
    /// created.
    pub loading: tokio::sync::Mutex<()>,
    /// Link for direct connections, which the process serves without the daemon. `None` before the
    /// first use. When the link is dropped, the process closes these connections.
    direct: Mutex<Option<Arc<DirectLink>>>,
    uses: Arc<UseCount>,
    pub started: Instant,
}

impl RunningProcess {
    pub(crate) fn new(process: TenantProcess, directory: &Path) -> Self {
        let now = Instant::now();
        Self {
            // The process is shared with tasks that block on its control socket.
            process: Arc::new(process),
            connections: ProcessConnections::new(directory.join(HTTP_SOCKET)),
            loaded: Mutex::default(),
            loading: tokio::sync::Mutex::default(),
            direct: Mutex::default(),
            uses: Arc::new(UseCount::new(now)),
            started: now,
        }
    }

    /// Returns the link for direct connections, which is created on first use.
    pub(crate) async fn direct(self: &Arc<Self>) -> Result<Arc<DirectLink>, FunctionError> {
        // The common case does not wait for the async lock `loading`.
        if let Some(link) = &*self.direct.lock() {
            return Ok(link.clone());
        }
        // Only one task creates the link. While this task waited for the lock, another task may
        // have created it, so the check is repeated.
        let _loading = self.loading.lock().await;
        if let Some(link) = &*self.direct.lock() {
            return Ok(link.clone());
        }
        let unavailable = |e: &dyn std::fmt::Display| FunctionError::Unavailable(e.to_string());
        let (link, process_end) = DirectLink::new().map_err(|e| unavailable(&e))?;
        let process = self.process.clone();
        let attached =
            tokio::task::spawn_blocking(move || process.attach_direct(&process_end)).await;
        attached.map_err(|e| unavailable(&e))??;
        let link = Arc::new(link);
        *self.direct.lock() = Some(link.clone());
        Ok(link)
    }

    /// Marks the functions with direct connections as run, so that their logs and metrics are read.
    pub(crate) fn mark_direct(&self) {
        let link = self.direct.lock().clone();
        if let Some(link) = link {
            link.mark_run();
        }
    }

    /// Closes direct connections, each after the request in flight.
    pub(crate) fn close_direct(&self) {
        // Drop the link without the lock. The link closes when the last caller with a reference
        // drops it.
        let link = self.direct.lock().take();
        drop(link);
    }

    /// Counts a use, such as a request. `None` if the process is about to stop.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<ProcessUse> {
        let counted = self.uses.enter()?;
        Some(ProcessUse(self.clone(), counted))
    }

    /// Returns the process unless it has exited or is about to stop. Does not count as a use.
    pub(crate) fn if_running(self: Arc<Self>) -> Option<Arc<Self>> {
        Some(self).filter(|running| !running.is_over())
    }

    /// Waits for the exit of the process, at most for `limit`. The kernel closes the connections of
    /// a killed process before it reports the exit.
    pub(crate) async fn wait_for_end(&self, limit: Duration) {
        // Without a pidfd, the caller retries at once.
        let Ok(pidfd) = self.process.pidfd() else {
            return;
        };
        // SAFETY: the new `AsyncFd` owns the pidfd.
        let Ok(pidfd) = (unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) })
        else {
            return;
        };
        // The caller retries in either case.
        let _ = tokio::time::timeout(limit, pidfd.readable()).await;
    }

    /// Rejects further uses if the process is not in use and was idle for `idle`. Returns whether
    /// this call closed the process to further uses.
    pub(crate) fn close_if_idle(&self, idle: Duration) -> bool {
        self.uses.close_if_idle(idle)
    }

    /// Rejects further uses.
    pub(crate) fn close(&self) {
        self.uses.close();
    }

    /// Returns whether the process has exited or is about to stop.
    pub(crate) fn is_over(&self) -> bool {
        self.uses.is_closed() || self.process.has_exited()
    }
}

/// Use of a process. A process in use is not stopped as idle.
#[derive(Debug)]
pub(crate) struct ProcessUse(pub Arc<RunningProcess>, CountedUse);

impl ProcessUse {
    /// Returns only the counted use, without the process.
    pub(crate) fn into_counted(self) -> CountedUse {
        self.1
    }
}

//! Process of an owner while it runs: requests under way, loaded versions, connections.

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

/// Process that runs.
#[derive(Debug)]
pub(crate) struct RunningProcess {
    pub process: Arc<TenantProcess>,
    pub connections: Arc<ProcessConnections>,
    /// Revisions of functions that the process answers with.
    pub loaded: Mutex<HashMap<String, u64>>,
    /// Held while a version is loaded.
    pub loading: tokio::sync::Mutex<()>,
    /// Its connections end when it is taken.
    direct: Mutex<Option<Arc<DirectLink>>>,
    uses: Arc<UseCount>,
    pub started: Instant,
}

impl RunningProcess {
    pub(crate) fn new(process: TenantProcess, directory: &Path) -> Self {
        let now = Instant::now();
        Self {
            process: Arc::new(process),
            connections: ProcessConnections::new(directory.join(HTTP_SOCKET)),
            loaded: Mutex::default(),
            loading: tokio::sync::Mutex::default(),
            direct: Mutex::default(),
            uses: Arc::new(UseCount::new(now)),
            started: now,
        }
    }

    /// Link for direct connections, which is made when it is first needed.
    pub(crate) async fn direct(self: &Arc<Self>) -> Result<Arc<DirectLink>, FunctionError> {
        if let Some(link) = &*self.direct.lock() {
            return Ok(link.clone());
        }
        // One at a time.
        let _loading = self.loading.lock().await;
        if let Some(link) = &*self.direct.lock() {
            return Ok(link.clone());
        }
        let unavailable = |e: &dyn std::fmt::Display| FunctionError::Unavailable(e.to_string());
        let (link, theirs) = DirectLink::new().map_err(|e| unavailable(&e))?;
        let process = self.process.clone();
        let attached = tokio::task::spawn_blocking(move || process.attach_direct(&theirs)).await;
        attached.map_err(|e| unavailable(&e))??;
        let link = Arc::new(link);
        *self.direct.lock() = Some(link.clone());
        Ok(link)
    }

    /// Notes that functions with direct connections may have run.
    pub(crate) fn mark_direct(&self) {
        let link = self.direct.lock().clone();
        if let Some(link) = link {
            link.mark_running();
        }
    }

    /// Ends direct connections, each after the request under way.
    pub(crate) fn close_direct(&self) {
        let link = self.direct.lock().take();
        drop(link);
    }

    /// Counts a request, or another use; none if the process is about to end.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<ProcessUse> {
        let counted = self.uses.enter()?;
        Some(ProcessUse(self.clone(), counted))
    }

    /// The process, unless it is over. Does not keep it from ending as idle.
    pub(crate) fn peek(self: Arc<Self>) -> Option<Arc<Self>> {
        Some(self).filter(|running| !running.is_over())
    }

    /// Waits until the process has ended, at most for `limit`. One that is killed closes its
    /// connections before its end is told.
    pub(crate) async fn wait_for_end(&self, limit: Duration) {
        let Ok(pidfd) = self.process.pidfd() else {
            return;
        };
        // SAFETY: the descriptor is a pidfd of its own, which the value that is made here owns.
        let Ok(pidfd) = (unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) })
        else {
            return;
        };
        let _ = tokio::time::timeout(limit, pidfd.readable()).await;
    }

    /// Refuses further uses, if there is none and was none for `idle`.
    pub(crate) fn close_if_idle(&self, idle: Duration) -> bool {
        self.uses.close_if_idle(idle)
    }

    /// Refuses further uses.
    pub(crate) fn close(&self) {
        self.uses.close();
    }

    /// True if it has ended, or is about to.
    pub(crate) fn is_over(&self) -> bool {
        self.uses.is_closed() || self.process.has_ended()
    }
}

/// Use of a process, which does not end as idle meanwhile.
#[derive(Debug)]
pub(crate) struct ProcessUse(pub Arc<RunningProcess>, CountedUse);

impl ProcessUse {
    /// Returns the use alone, without the process.
    pub(crate) fn into_counted(self) -> CountedUse {
        self.1
    }
}

//! Short requests to the VMM of a running microVM: pause, resume, counters and working set.

use super::MicroVm;
use crate::snapshot_context::{SaveError, WorkingSet, add_fd};
use jiffy_proto::vm::{Event, Request, VmStats};
use jiffy_snapshot::Store;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

impl MicroVm {
    /// Pauses all vCPUs. Returns the time until the last one stopped, in microseconds.
    pub async fn pause(&self) -> Result<u64, SaveError> {
        // All requests hold the lock until the reply: replies carry no request id.
        let mut context = self.context.lock().await;
        self.link.send(&Request::Pause, &[])?;
        let paused = |event| match event {
            Event::Paused { stopped_us } => Some(stopped_us),
            _ => None,
        };
        context.reply(paused).await
    }

    /// Resumes all vCPUs.
    pub async fn resume(&self) -> Result<(), SaveError> {
        let mut context = self.context.lock().await;
        self.link.send(&Request::Resume, &[])?;
        let resumed = |event| matches!(event, Event::Resumed).then_some(());
        context.reply(resumed).await
    }

    /// Returns the disk space of the guest's writes since its last snapshot, in bytes. `None` while
    /// a snapshot is taken.
    pub fn overlay_bytes(&self) -> Option<u64> {
        // A snapshot holds the lock while it replaces the overlay.
        let context = self.context.try_lock().ok()?;
        let metadata = context.overlay.metadata().ok()?;
        // st_blocks counts units of 512 bytes (stat(2)).
        Some(metadata.blocks() * 512)
    }

    /// Returns the counters of the VMM since its start.
    pub async fn stats(&self) -> Result<VmStats, SaveError> {
        let mut context = self.context.lock().await;
        self.link.send(&Request::Stats, &[])?;
        let stats = |event| match event {
            Event::Stats(stats) => Some(stats),
            _ => None,
        };
        context.reply(stats).await
    }

    /// Records the memory that a VM restored with [`crate::MemoryPolicy::Map`] has touched. The
    /// result is stored in new unnamed files in `store`.
    pub async fn working_set(&self, store: &Store) -> Result<WorkingSet, SaveError> {
        let mut context = self.context.lock().await;
        let host = |what| move |source| SaveError::Host { what, source };
        // A jailed VMM has no /proc, so this process opens the pagemap for it.
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm_pid()))
            .map_err(host("cannot open the VMM's pagemap"))?;
        let (touched, written) = (store.overlay()?, store.overlay()?);
        let mut fds = Vec::new();
        let request = Request::WorkingSet {
            index: add_fd(&mut fds, &touched),
            pagemap: add_fd(&mut fds, &pagemap),
            written: add_fd(&mut fds, &written),
        };
        self.link.send(&request, &fds)?;
        let chunks = context
            .reply(|event| match event {
                Event::WorkingSet { chunks } => Some(chunks),
                _ => None,
            })
            .await?;
        let unsupported =
            || SaveError::Refused("this host does not report which pages are present".to_owned());
        Ok(WorkingSet {
            chunks: chunks.ok_or_else(unsupported)?,
            touched,
            written,
        })
    }
}

//! `fork`: creates children of a running or paused sandbox.
//!
//! All children start from one snapshot of the parent. Each receives its own identity (id, host
//! name, entropy, clock).
//!
//! A *pin* protects a snapshot from garbage collection.

use super::create::NewSandboxEntry;
use super::take_snapshot::SnapshotKind;
use super::{OperationError, Sandboxes};
use crate::operation_times::OperationTimes;
use crate::sandbox::Sandbox;
use crate::sandbox_settings::SandboxSettings;
use crate::snapshot::Snapshot;
use jiffy_api_types::{EventType, SnapshotPurpose};
use jiffy_engine_api::BootMode;
use jiffy_engine_api::steps::OperationSteps;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tracing::Instrument;

/// Maximum number of children of one fork.
pub(crate) const MAX_FORK_CHILDREN: usize = 1000;

/// Result of one child.
pub type ForkChild = Result<Sandbox, OperationError>;

/// Result of a fork.
#[derive(Debug)]
pub struct ForkReport {
    /// Snapshot from which all children start.
    pub snapshot: Snapshot,
    /// Result of each requested child, in the order of their completion.
    pub children: Vec<ForkChild>,
}

impl Sandboxes {
    /// Takes a snapshot of a sandbox and creates `count` sandboxes from it. Children have the
    /// settings of their parent and tokens of their own. The timeout of each child starts when the
    /// child runs. Its duration is `timeout`, where `Some(None)` means no limit, or the parent's if
    /// `timeout` is `None`.
    ///
    /// # Errors
    /// Fails if the snapshot cannot be taken. Each child succeeds or fails independently.
    pub async fn fork(
        &self,
        id: &str,
        count: usize,
        timeout: Option<Option<Duration>>,
    ) -> Result<ForkReport, OperationError> {
        if !(1..=MAX_FORK_CHILDREN).contains(&count) {
            return Err(OperationError::Count {
                count,
                most: MAX_FORK_CHILDREN,
            });
        }
        let (this, entry) = (self.clone(), self.0.entry(id)?);
        self.perform("fork", &entry.id(), async move {
            // The lock is released at the end of this block, before the children start, so that the
            // parent can be used meanwhile.
            let (mut sandbox, snapshot, _pin) = {
                let _op_guard = entry.op_lock().lock().await;
                let snapshot = this
                    .snapshot_for(
                        &entry,
                        SnapshotKind::full(SnapshotPurpose::Fork),
                        "fork",
                        None,
                    )
                    .await?;
                // While this operation holds the parent's `op_lock`, the parent references the
                // snapshot, so it cannot be collected before the pin.
                let (snapshot, pin) = this.snapshots().pin(&snapshot.id)?;
                (entry.record(), snapshot, pin)
            };
            let parent = sandbox.clone();
            if let Some(timeout) = timeout {
                // A change of the copy only. The parent keeps its timeout.
                sandbox.settings.timeout_s = timeout.map(|t| t.as_secs());
            }
            let mut work = JoinSet::new();
            for _ in 0..count {
                let (this, sandbox) = (this.clone(), sandbox.clone());
                let snapshot = snapshot.id.clone();
                // Each child has its own recorder: children run concurrently, so their steps would
                // mix.
                let recorder = OperationSteps::new();
                let child = async move { this.child(recorder, &sandbox, &snapshot).await };
                let span = tracing::info_span!(
                    "child",
                    sandbox = tracing::field::Empty,
                    error = tracing::field::Empty,
                );
                work.spawn(child.instrument(span));
            }
            let mut children = Vec::with_capacity(count);
            while let Some(child) = work.join_next().await {
                children.push(child.unwrap_or_else(|e| Err(OperationError::Lost(e.to_string()))));
            }
            let created = children.iter().filter(|child| child.is_ok()).count();
            this.report_with(EventType::SandboxForked, &parent, |event| {
                event.snapshot = Some(snapshot.id.clone());
                event.count = u64::try_from(created).ok();
            });
            Ok(ForkReport { snapshot, children })
        })
        .await
    }

    /// Creates a child and records its steps. Failed creates are counted here, and successful ones
    /// at the start of the sandbox.
    async fn child(&self, recorder: OperationSteps, parent: &Sandbox, snapshot: &str) -> ForkChild {
        let started_at = Instant::now();
        let child = self.child_of(parent, snapshot);
        let child = recorder.clone().scope(child).await;
        let times = OperationTimes::new("child", started_at.elapsed(), recorder.take());
        self.0.metrics.steps(&times);
        if let Err(e) = &child {
            tracing::warn!(outcome = e.kind().name(), error = %e, "cannot create a child of a fork");
            tracing::Span::current().record("error", e.kind().name());
            let mode = Some(BootMode::Fork);
            let outcome = e.kind().name();
            self.0.metrics.create(mode, outcome, Duration::ZERO);
        }
        child
    }

    /// Creates one child from the snapshot of its parent.
    async fn child_of(&self, parent: &Sandbox, snapshot: &str) -> ForkChild {
        let requested_at = Instant::now();
        let settings = SandboxSettings {
            // The idempotency key of the parent's create identifies the parent only.
            creation: None,
            ..parent.settings.clone()
        };
        let reservation = self.admit(parent.size)?;
        let new = NewSandboxEntry {
            template: parent.template.clone(),
            size: parent.size,
            env: parent.env.clone(),
            settings,
            // Names are unique, so a child has none.
            name: None,
            forked_from: Some(parent.id.clone()),
            started_from: Some(snapshot.to_owned()),
        };
        let new = self.register(reservation, new)?;
        let start = async {
            let (snapshots, mode) = (self.snapshots(), BootMode::Fork);
            let identity = self.identity_of(new.record(), false);
            let origin = snapshots.origin(snapshot, mode, &identity).await;
            self.start_registered(new, requested_at, origin).await
        };
        let owner = parent.settings.owner.as_deref();
        self.0.start_pacer.pace(owner, start).await
    }
}

//! `fork`: children of a live sandbox.

use super::{OperationError, Sandboxes, detached};
use crate::record::{Purpose, SandboxRecord, SnapshotRecord};
use jiffy_engine::{BootMode, Engine};
use std::time::Instant;
use tokio::task::JoinSet;

/// Most children of one fork.
pub(crate) const MOST: usize = 1000;

/// What became of one child.
pub type Child = Result<SandboxRecord, OperationError>;

/// What came of a fork.
#[derive(Debug)]
pub struct ForkReport {
    /// The snapshot all children start from.
    pub snapshot: SnapshotRecord,
    /// One for each child that was asked for.
    pub children: Vec<Child>,
}

impl<E: Engine> Sandboxes<E> {
    /// Takes a snapshot of a sandbox and makes `count` sandboxes from it. It fails as a whole only if there is no snapshot; each
    /// child succeeds or fails for itself.
    pub async fn fork(&self, id: &str, count: usize) -> Result<ForkReport, OperationError> {
        if !(1..=MOST).contains(&count) {
            return Err(OperationError::Count { count, most: MOST });
        }
        let (this, entry) = (self.clone(), self.entry(id)?);
        detached(async move {
            let (sandbox, snapshot, _pin) = {
                let _turn = entry.turn.lock().await;
                let taken = this
                    .snapshot_for(&entry, Purpose::Fork, None, "fork")
                    .await?;
                // The parent itself holds on to the snapshot as long as its turn is ours.
                let (snapshot, pin) = this.pin(&taken.id)?;
                (entry.record(), snapshot, pin)
            };
            let mut work = JoinSet::new();
            for _ in 0..count {
                let (this, sandbox) = (this.clone(), sandbox.clone());
                let snapshot = snapshot.id.clone();
                work.spawn(async move { this.child(&sandbox, &snapshot).await });
            }
            let mut children = Vec::with_capacity(count);
            while let Some(child) = work.join_next().await {
                children.push(child.unwrap_or_else(|e| Err(OperationError::Lost(e.to_string()))));
            }
            Ok(ForkReport { snapshot, children })
        })
        .await
    }

    async fn child(&self, parent: &SandboxRecord, snapshot: &str) -> Child {
        let asked = Instant::now();
        let (template, env) = (&parent.template, parent.env.clone());
        let new = self.enter(template, parent.size, env, Some(parent.id.clone()))?;
        let origin = self
            .origin_in_snapshot(template, snapshot, BootMode::Fork)
            .await;
        self.bring_up(new, asked, origin).await
    }
}

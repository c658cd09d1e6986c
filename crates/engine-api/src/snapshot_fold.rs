//! Fold of a snapshot's parent into the snapshot.

use crate::EngineError;
use jiffy_proto::snapshot::FoldedLayers;
use std::fmt;
use std::ops::ControlFlow;

/// Called after each copied piece of a fold with its length in bytes; `Break` cancels the fold.
pub type FoldPace<'a> = dyn FnMut(u64) -> ControlFlow<()> + 'a;

/// Result of [`crate::SnapshotFiles::prepare_fold`].
pub type FoldResult = Result<FoldPreparation, EngineError>;

/// Outcome of the preparation of a fold.
#[derive(Debug)]
pub enum FoldPreparation {
    /// The copy is made.
    Ready(PreparedFold),
    /// It is not worth its cost, or not possible, as long as both snapshots stay as they are.
    Refused,
    /// Something more urgent came, or the caller cancelled it: it may succeed later.
    Cancelled,
}

type Commit = Box<dyn FnOnce() -> Result<FoldedLayers, EngineError> + Send>;

/// Fold that has copied what the snapshot lacked. Dropped before [`Self::commit`], it leaves both
/// snapshots as they were.
pub struct PreparedFold {
    parent: String,
    commit: Commit,
}

impl PreparedFold {
    /// Fold of snapshot `parent`; `commit` replaces the snapshot above it in one step.
    pub fn new(
        parent: String,
        commit: impl FnOnce() -> Result<FoldedLayers, EngineError> + Send + 'static,
    ) -> Self {
        Self {
            parent,
            commit: Box::new(commit),
        }
    }

    /// Id of the snapshot whose files are not needed after the commit.
    pub fn parent(&self) -> &str {
        &self.parent
    }

    /// Completes the fold. Returns the files that became one, for guests that have them open
    /// ([`crate::Guest::fold_layers`]).
    pub fn commit(self) -> Result<FoldedLayers, EngineError> {
        (self.commit)()
    }
}

impl fmt::Debug for PreparedFold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedFold")
            .field("parent", &self.parent)
            .finish_non_exhaustive()
    }
}

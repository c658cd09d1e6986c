//! Fold of a parent snapshot into its child: the child takes over the data of the parent, so that
//! the parent can be removed.

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
    /// The data is copied; the fold can be committed.
    Ready(PreparedFold),
    /// The fold is not possible, or would copy too many bytes: see
    /// [`crate::SnapshotFiles::prepare_fold`]. An immediate retry would be rejected again.
    Refused,
    /// Cancelled by the caller or by a more urgent operation. A later attempt may succeed.
    Cancelled,
}

/// Function of an engine that replaces the child snapshot.
type Commit = Box<dyn FnOnce() -> Result<FoldedLayers, EngineError> + Send>;

/// Fold whose data is copied. If it is dropped before [`Self::commit`], both snapshots remain
/// unchanged.
pub struct PreparedFold {
    parent: String,
    commit: Commit,
}

impl PreparedFold {
    /// Creates a fold of snapshot `parent`. `commit` replaces the child snapshot atomically.
    pub fn new(
        parent: String,
        commit: impl FnOnce() -> Result<FoldedLayers, EngineError> + Send + 'static,
    ) -> Self {
        Self {
            parent,
            commit: Box::new(commit),
        }
    }

    /// Returns the id of the snapshot whose files are no longer needed after the commit.
    pub fn parent(&self) -> &str {
        &self.parent
    }

    /// Completes the fold. Returns the merged files for guests that have them open
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

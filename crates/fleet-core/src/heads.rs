//! Changes of heads, as state machines without I/O: resume, pause, kill and the return of a host.
//! The head of a sandbox is the record in the shared store that decides which member may run the
//! sandbox.
//!
//! A head changes only by conditional writes. A write of unknown outcome is repeated until its
//! outcome is known, even if the caller has received an error meanwhile.

mod publish;
mod reconcile;
mod resume;
mod update;
mod write;

pub use publish::{Publish, PublishEffect, PublishEvent, PublishInput};
pub use reconcile::{HeldSandbox, Reconciliation, reconcile};
pub use resume::{Resume, ResumeAnswer, ResumeEffect, ResumeEvent, ResumeInput};
pub use update::{HeadUpdate, Purpose, UpdateEffect, UpdateEvent, may_purge};

use crate::ids::{Version, WriteId};
use crate::record::Head;

/// Conditional write of a head. The same write may be requested again after
/// [`crate::WriteOutcome::Unknown`], and must then be sent with the same bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadWrite {
    /// Number of the write within its operation.
    pub write: WriteId,
    /// New head.
    pub head: Box<Head>,
    /// Version that the head must have. `None` if it must not exist.
    pub expected: Option<Version>,
}

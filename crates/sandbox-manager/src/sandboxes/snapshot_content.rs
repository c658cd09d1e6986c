//! [`SnapshotContent`]: whether a snapshot contains memory and disk, or the disk only.

use super::{OperationError, Sandboxes};
use jiffy_api_types::SnapshotContent;
use jiffy_engine_api::EngineError;

impl Sandboxes {
    /// Checks that `engine` can store `content`. Defaults to the engine of new sandboxes.
    ///
    /// # Errors
    /// The engine stores the disk only together with the memory.
    pub fn check_content(
        &self,
        engine: Option<&str>,
        content: SnapshotContent,
    ) -> Result<(), OperationError> {
        if content.is_full() {
            return Ok(());
        }
        let failed = OperationError::engine("store a sandbox without its memory");
        let engine = match engine.map(|name| self.0.engines.get(name)) {
            Some(Ok(engine)) => engine,
            Some(Err(e)) => return Err(failed(e)),
            None => self.0.engines.default_engine(),
        };
        if engine.description().capabilities.disk_snapshot {
            return Ok(());
        }
        Err(failed(EngineError::Unsupported {
            engine: engine.name(),
            what: "store the disk without the memory, because its snapshots contain both",
            instead: Some("the engine microvm, or omit `memory: false`"),
        }))
    }
}

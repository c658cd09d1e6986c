//! Checks whether an engine supports the requested content of a snapshot or pause: memory and disk,
//! or the disk only.

use crate::app::App;
use crate::error::ApiError;
use jiffy_api_types::SnapshotContent;

impl App {
    /// Checks that `engine` can store `content`. Defaults to the engine of new sandboxes.
    pub(crate) fn check_content(
        &self,
        engine: Option<&str>,
        content: SnapshotContent,
    ) -> Result<(), ApiError> {
        let checked = self.sandboxes.check_content(engine, content);
        checked.map_err(|e| ApiError::unsupported_option(e.to_string()))
    }
}

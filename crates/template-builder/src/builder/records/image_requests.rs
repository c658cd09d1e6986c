//! Requests by which templates were built from images, for later builds of the same image.

use super::{BuildRecords, RecordError};
use rusqlite::{OptionalExtension, params};

/// The table is not part of the versioned schema: earlier versions of this program ignore it.
pub(super) const IMAGE_REQUESTS_TABLE: &str = "
    CREATE TABLE IF NOT EXISTS image_requests (
        template TEXT PRIMARY KEY REFERENCES templates (id) ON DELETE CASCADE,
        request TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
";

impl BuildRecords {
    /// Stores the request of a template, as JSON without passwords. Replaces an earlier request.
    pub fn set_image_request(&self, template: &str, request: &str) -> Result<(), RecordError> {
        self.with_connection(|c| {
            let write = "INSERT INTO image_requests (template, request) VALUES (?1, ?2)
                ON CONFLICT (template) DO UPDATE SET request = ?2";
            c.execute(write, params![template, request]).map(drop)
        })
    }

    /// Returns the request of a template. `None` if the template was not built from an image.
    pub fn image_request(&self, template: &str) -> Result<Option<String>, RecordError> {
        self.with_connection(|c| {
            let query = "SELECT request FROM image_requests WHERE template = ?1";
            c.query_row(query, [template], |row| row.get(0)).optional()
        })
    }
}

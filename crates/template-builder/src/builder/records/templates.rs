//! Records of templates in the builder's database: their owners, names and latest builds.

use super::{BuildRecords, RecordError, from_sql, to_sql};
use jiffy_image::DEFAULT_TAG;
use rusqlite::{OptionalExtension, Row, params};

const TEMPLATE_COLUMNS: &str = "id, name, owner, public, created_ms";

/// Template that was built on this host, or whose build was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRecord {
    /// Id: letters and digits.
    pub id: String,
    /// Name without a tag.
    pub name: String,
    /// Key that owns the template. `None` for the host's owner.
    pub owner: Option<String>,
    /// Visibility for the first build. Later builds use the visibility in the manifest.
    pub public: bool,
    /// Milliseconds since 1970.
    pub created_ms: u64,
}

impl TemplateRecord {
    /// Returns the reference in the image store: `[owner/]name[:tag]`.
    pub fn reference(&self, tag: &str) -> String {
        let owner = self.owner.as_ref();
        let owner = owner.map_or_else(String::new, |owner| format!("{owner}/"));
        match tag {
            DEFAULT_TAG => format!("{owner}{}", self.name),
            tag => format!("{owner}{}:{tag}", self.name),
        }
    }
}

impl BuildRecords {
    /// Returns all templates, oldest first.
    pub fn templates(&self) -> Result<Vec<TemplateRecord>, RecordError> {
        let query = format!("SELECT {TEMPLATE_COLUMNS} FROM templates ORDER BY rowid");
        self.with_connection(|c| c.prepare_cached(&query)?.query_map([], template)?.collect())
    }

    /// Returns the template with this id.
    pub fn template(&self, id: &str) -> Result<Option<TemplateRecord>, RecordError> {
        let query = format!("SELECT {TEMPLATE_COLUMNS} FROM templates WHERE id = ?1");
        self.with_connection(|c| {
            let mut query = c.prepare_cached(&query)?;
            query.query_row([id], template).optional()
        })
    }

    /// Returns the template of this name in the namespace of `owner`. `None` stands for the host's
    /// owner.
    pub fn template_by_name(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<TemplateRecord>, RecordError> {
        // The unique index has the same expression, because two NULLs in an index differ.
        let query = format!(
            "SELECT {TEMPLATE_COLUMNS} FROM templates WHERE ifnull(owner, '') = ?1 AND name = ?2"
        );
        self.with_connection(|c| {
            let mut query = c.prepare_cached(&query)?;
            let found = query.query_row([owner.unwrap_or_default(), name], template);
            found.optional()
        })
    }

    /// Inserts a template unless its owner has a template of that name. Returns the existing or new
    /// template.
    pub fn insert_template(&self, new: &TemplateRecord) -> Result<TemplateRecord, RecordError> {
        self.with_connection(|c| {
            let insert = "INSERT OR IGNORE INTO templates (id, name, owner, public, created_ms)
                VALUES (?1, ?2, ?3, ?4, ?5)";
            let created = to_sql(new.created_ms);
            c.execute(
                insert,
                params![new.id, new.name, new.owner, new.public, created],
            )
        })?;
        // Read the record back: the insertion is ignored if the name exists.
        let found = self.template_by_name(new.owner.as_deref(), &new.name)?;
        Ok(found.unwrap_or_else(|| new.clone()))
    }

    /// Makes the host's owner the owner of a template.
    pub(in crate::builder) fn make_host_owned(&self, id: &str) -> Result<(), RecordError> {
        let change = "UPDATE templates SET owner = NULL WHERE id = ?1";
        self.with_connection(|c| c.execute(change, [id]).map(drop))
    }

    /// Makes a template public, or private to its owner.
    pub fn set_public(&self, id: &str, public: bool) -> Result<(), RecordError> {
        self.with_connection(|c| {
            c.execute(
                "UPDATE templates SET public = ?2 WHERE id = ?1",
                params![id, public],
            )
            .map(drop)
        })
    }

    /// Renames a template.
    pub(in crate::builder) fn set_name(&self, id: &str, name: &str) -> Result<(), RecordError> {
        let change = "UPDATE templates SET name = ?2 WHERE id = ?1";
        self.with_connection(|c| c.execute(change, params![id, name]).map(drop))
    }

    /// Deletes a template with its builds.
    pub fn delete_template(&self, id: &str) -> Result<(), RecordError> {
        self.with_connection(|c| {
            c.execute("DELETE FROM templates WHERE id = ?1", [id])
                .map(drop)
        })
    }
}

/// Decodes a row with [`TEMPLATE_COLUMNS`].
fn template(row: &Row<'_>) -> rusqlite::Result<TemplateRecord> {
    Ok(TemplateRecord {
        id: row.get(0)?,
        name: row.get(1)?,
        owner: row.get(2)?,
        public: row.get(3)?,
        created_ms: from_sql(row.get(4)?),
    })
}

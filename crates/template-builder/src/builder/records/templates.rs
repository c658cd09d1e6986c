//! Records of templates.

use super::{BuildRecords, RecordError, loaded, stored};
use jiffy_image::DEFAULT_TAG;
use rusqlite::{OptionalExtension, Row, params};

const TEMPLATE_COLUMNS: &str = "id, name, owner, public, created_ms";

/// A template that was built here, or is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRecord {
    /// Letters and digits.
    pub id: String,
    /// By which it is found, without a tag.
    pub name: String,
    /// API key in whose namespace its name is; none: the owner of this host.
    pub owner: Option<String>,
    /// Visible to every key when it is built for the first time; from then on its manifest says.
    pub public: bool,
    /// Milliseconds since 1970.
    pub created_ms: u64,
}

impl TemplateRecord {
    /// `[owner/]name[:tag]`, by which the image store finds it.
    pub fn called(&self, tag: &str) -> String {
        let owner = self.owner.as_ref();
        let owner = owner.map_or_else(String::new, |owner| format!("{owner}/"));
        match tag {
            DEFAULT_TAG => format!("{owner}{}", self.name),
            tag => format!("{owner}{}:{tag}", self.name),
        }
    }
}

impl BuildRecords {
    /// All templates, the oldest first.
    pub fn templates(&self) -> Result<Vec<TemplateRecord>, RecordError> {
        let query = format!("SELECT {TEMPLATE_COLUMNS} FROM templates ORDER BY rowid");
        self.with(|c| c.prepare_cached(&query)?.query_map([], template)?.collect())
    }

    /// The template with this id.
    pub fn template(&self, id: &str) -> Result<Option<TemplateRecord>, RecordError> {
        let query = format!("SELECT {TEMPLATE_COLUMNS} FROM templates WHERE id = ?1");
        self.with(|c| {
            let mut query = c.prepare_cached(&query)?;
            query.query_row([id], template).optional()
        })
    }

    /// The template of this name in the namespace of `owner`; none: of the host's owner.
    pub fn named(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<TemplateRecord>, RecordError> {
        let query = format!(
            "SELECT {TEMPLATE_COLUMNS} FROM templates WHERE ifnull(owner, '') = ?1 AND name = ?2"
        );
        self.with(|c| {
            let mut query = c.prepare_cached(&query)?;
            let found = query.query_row([owner.unwrap_or_default(), name], template);
            found.optional()
        })
    }

    /// Enters a template unless its owner has one of its name; returns the one there is.
    pub fn enter_template(&self, new: &TemplateRecord) -> Result<TemplateRecord, RecordError> {
        self.with(|c| {
            let insert = "INSERT OR IGNORE INTO templates (id, name, owner, public, created_ms)
                VALUES (?1, ?2, ?3, ?4, ?5)";
            let created = stored(new.created_ms);
            c.execute(
                insert,
                params![new.id, new.name, new.owner, new.public, created],
            )
        })?;
        let found = self.named(new.owner.as_deref(), &new.name)?;
        Ok(found.unwrap_or_else(|| new.clone()))
    }

    /// Gives a template to the host's owner, with its name.
    pub(in crate::builder) fn give_to_host(&self, id: &str) -> Result<(), RecordError> {
        let change = "UPDATE templates SET owner = NULL WHERE id = ?1";
        self.with(|c| c.execute(change, [id]).map(drop))
    }

    /// Shows a template to everybody, or only to its owner.
    pub fn set_public(&self, id: &str, public: bool) -> Result<(), RecordError> {
        self.with(|c| {
            c.execute(
                "UPDATE templates SET public = ?2 WHERE id = ?1",
                params![id, public],
            )
            .map(drop)
        })
    }

    /// Forgets a template with its builds.
    pub fn forget_template(&self, id: &str) -> Result<(), RecordError> {
        self.with(|c| {
            c.execute("DELETE FROM templates WHERE id = ?1", [id])
                .map(drop)
        })
    }
}

fn template(row: &Row<'_>) -> rusqlite::Result<TemplateRecord> {
    Ok(TemplateRecord {
        id: row.get(0)?,
        name: row.get(1)?,
        owner: row.get(2)?,
        public: row.get(3)?,
        created_ms: loaded(row.get(4)?),
    })
}

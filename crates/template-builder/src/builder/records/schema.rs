//! Schema of the builder's database, and its migration from earlier versions.

use rusqlite::Connection;

/// Version of the schema that this program reads and writes.
pub(super) const SCHEMA_VERSION: i64 = 2;
/// Schema of version 1. New files also start with it and apply [`MIGRATIONS`].
pub(super) const SCHEMA_V1: &str = "
    CREATE TABLE templates (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        owner TEXT,
        public INTEGER NOT NULL DEFAULT 0,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE builds (
        id TEXT PRIMARY KEY,
        template TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
        tags TEXT NOT NULL,
        size TEXT NOT NULL,
        status TEXT NOT NULL,
        reason TEXT,
        steps TEXT NOT NULL DEFAULT '[]',
        version TEXT,
        created_ms INTEGER NOT NULL,
        changed_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX builds_of ON builds (template, created_ms);
    CREATE TABLE lines (
        build TEXT NOT NULL REFERENCES builds (id) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        at_ms INTEGER NOT NULL,
        level TEXT NOT NULL,
        step TEXT,
        message TEXT NOT NULL,
        PRIMARY KEY (build, number)
    ) STRICT, WITHOUT ROWID;
";
/// Schema migrations; the first one upgrades version 1 to version 2. Foreign keys are disabled
/// during migrations. If they were enabled, replacing a table would delete the rows that refer to
/// it.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE templates_2 (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        owner TEXT,
        public INTEGER NOT NULL DEFAULT 0,
        created_ms INTEGER NOT NULL
    ) STRICT;
    INSERT INTO templates_2 SELECT id, name, owner, public, created_ms FROM templates ORDER BY rowid;
    DROP TABLE templates;
    ALTER TABLE templates_2 RENAME TO templates;
    CREATE UNIQUE INDEX templates_by_name ON templates (ifnull(owner, ''), name);
    ALTER TABLE builds ADD COLUMN caller TEXT;
    CREATE INDEX builds_by_status ON builds (status, created_ms);
    CREATE TABLE migrations (name TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
"];

/// Migrates the schema from version `found`. Version 0 is a new file.
pub(super) fn migrate(connection: &Connection, found: i64) -> rusqlite::Result<()> {
    let mut version = found;
    while version < SCHEMA_VERSION {
        let change = match version {
            0 => SCHEMA_V1,
            // In bounds: there is one change per version.
            n => usize::try_from(n - 1).map_or("", |n| MIGRATIONS.get(n).copied().unwrap_or("")),
        };
        version += 1;
        // Each version is one transaction: an interrupted migration leaves the previous version.
        connection.execute_batch(&format!(
            "BEGIN IMMEDIATE; {change} PRAGMA user_version = {version}; COMMIT;"
        ))?;
    }
    Ok(())
}

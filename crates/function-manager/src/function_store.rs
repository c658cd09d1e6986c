//! Files of one owner's functions. The order of writes makes a deployment crash-safe: a record
//! replaces its predecessor only after its module and machine code are on storage.
//!
//! ```text
//! <owner digest>/
//!   records/<name>.json          function; replacing this file commits a change
//!   modules/<blake3>.wasm        modules, named by content
//!   compiled/<engine>/<module>.cwasm   machine code of the modules
//!   http.sock, control.sock, process.json   sockets and record of the process
//! ```
//!
//! `<engine>` is the fingerprint of Wasmtime with its settings, on which machine code depends.

use crate::deploy_step::{DeployStep, reached};
use crate::function_error::FunctionError;
use crate::function_record::FunctionRecord;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Extension of a compiled module while its compiler writes it.
pub(crate) const UNFINISHED: &str = "new";

/// Records in the directory of an owner.
#[derive(Debug)]
pub(crate) struct StoredRecords {
    pub records: Vec<FunctionRecord>,
    /// False if a record could not be read. The files that it references are unknown, so no file of
    /// the owner may be removed.
    pub is_complete: bool,
}

impl Default for StoredRecords {
    fn default() -> Self {
        Self {
            records: Vec::new(),
            is_complete: true,
        }
    }
}

impl StoredRecords {
    fn skip(&mut self, path: &Path, error: &io::Error) {
        tracing::error!(
            path = %path.display(), %error, "cannot read the record of a function"
        );
        self.is_complete = false;
    }
}

/// Files of one owner's functions. Calls block.
#[derive(Debug)]
pub(crate) struct FunctionStore {
    directory: PathBuf,
}

impl FunctionStore {
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Creates the directories with access for this user only.
    pub(crate) fn create(&self) -> Result<(), FunctionError> {
        for name in ["records", "modules", "compiled"] {
            let path = self.directory.join(name);
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(FunctionError::file(&path))?;
        }
        Ok(())
    }

    /// Reads all records. Unreadable files are logged and skipped, so that one damaged record does
    /// not affect other functions.
    pub(crate) fn records(&self) -> StoredRecords {
        let mut stored = StoredRecords::default();
        let directory = self.directory.join("records");
        let entries = match fs::read_dir(&directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return stored,
            Err(e) => {
                stored.skip(&directory, &e);
                return stored;
            }
            Ok(entries) => entries,
        };
        for entry in entries {
            let path = match entry {
                Ok(entry) => entry.path(),
                Err(e) => {
                    stored.skip(&directory, &e);
                    continue;
                }
            };
            // Other files are temporary files of interrupted commits.
            if path.extension() != Some(OsStr::new("json")) {
                continue;
            }
            match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
                Ok(record) => stored.records.push(record),
                // The file was removed meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => stored.skip(&path, &e),
            }
        }
        stored
    }

    fn record_path(&self, name: &str) -> PathBuf {
        self.directory.join("records").join(format!("{name}.json"))
    }

    /// Writes a record atomically: the previous record remains until the new record is synced to
    /// disk.
    pub(crate) fn commit(&self, record: &FunctionRecord) -> Result<(), FunctionError> {
        let path = self.record_path(&record.name);
        let write = || {
            let directory = self.directory.join("records");
            reached(DeployStep::WriteRecord);
            let mut file = NamedTempFile::new_in(&directory)?;
            file.write_all(&serde_json::to_vec(record)?)?;
            reached(DeployStep::SyncRecord);
            file.as_file().sync_all()?;
            reached(DeployStep::ReplaceRecord);
            file.persist(&path)?;
            reached(DeployStep::SyncDirectory);
            sync_directory_of(&path)
        };
        write().map_err(FunctionError::file(&path))
    }

    /// Removes a record.
    pub(crate) fn remove(&self, name: &str) -> Result<(), FunctionError> {
        let path = self.record_path(name);
        let result = match fs::remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            // The removal must be durable before garbage collection removes modules of the record.
            result => result.and_then(|()| sync_directory_of(&path)),
        };
        result.map_err(FunctionError::file(&path))
    }

    /// Moves a received module to its final path. The module is durable before a record references
    /// it.
    pub(crate) fn store_module(
        &self,
        file: NamedTempFile,
        digest: &str,
    ) -> Result<(), FunctionError> {
        let path = self.module(digest);
        let persist = || {
            file.as_file().sync_all()?;
            reached(DeployStep::StoreModule);
            file.persist(&path)?;
            sync_directory_of(&path)
        };
        persist().map_err(FunctionError::file(&path))
    }

    /// Renames a complete compiled module to its final path. Returns its size in bytes.
    pub(crate) fn store_artifact(unfinished: &Path, path: &Path) -> Result<u64, FunctionError> {
        let persist = || -> io::Result<u64> {
            let file = File::open(unfinished)?;
            file.sync_all()?;
            reached(DeployStep::StoreArtifact);
            // The renamed file is complete and synced. Only the rename itself must still be synced.
            fs::rename(unfinished, path)?;
            sync_directory_of(path)?;
            Ok(file.metadata()?.len())
        };
        persist().map_err(FunctionError::file(path))
    }

    /// Returns the path of a module.
    pub(crate) fn module(&self, digest: &str) -> PathBuf {
        let name = format!("{digest}.wasm");
        self.directory.join("modules").join(name)
    }

    /// Returns the path of a compiled module.
    pub(crate) fn artifact(&self, engine: &str, module: &str) -> PathBuf {
        let name = format!("{module}.cwasm");
        self.directory.join("compiled").join(engine).join(name)
    }

    /// Creates the directory for modules compiled for `engine`, and removes the directories of
    /// other engines.
    pub(crate) fn prepare_engine(&self, engine: &str) -> Result<(), FunctionError> {
        let compiled = self.directory.join("compiled");
        for entry in fs::read_dir(&compiled).into_iter().flatten().flatten() {
            if entry.file_name() != OsStr::new(engine) {
                // A failure only leaves unused files. Modules of another engine are compiled again
                // on demand.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let path = compiled.join(engine);
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        created.map_err(FunctionError::file(&path))
    }

    /// Removes files that no record references: files of old versions and of interrupted
    /// deployments. Compilers may be writing files, unless the daemon is starting. Removes nothing
    /// if a record cannot be read. No deployment or commit of this owner may run at the same time.
    /// `is_start` states that no compiler runs, because the daemon is starting.
    pub(crate) fn gc<'a>(&self, records: impl Iterator<Item = &'a FunctionRecord>, is_start: bool) {
        // A commit that failed after its rename has left a record that `records` does not contain.
        let stored = self.records();
        if !stored.is_complete {
            return;
        }
        let mut modules: HashSet<&str> = HashSet::new();
        for version in records.flat_map(|record| &record.versions) {
            modules.insert(&version.module);
        }
        for version in stored.records.iter().flat_map(|record| &record.versions) {
            modules.insert(&version.module);
        }
        // A file that is being written has no record yet. At the start, no compiler runs.
        let needed = |path: &Path| {
            let stem = path.file_stem().and_then(OsStr::to_str);
            let known = ["wasm", "cwasm"].map(|kind| Some(OsStr::new(kind)));
            let is_being_written = path.extension() == Some(OsStr::new(UNFINISHED)) && !is_start;
            is_being_written
                || known.contains(&path.extension())
                    && stem.is_some_and(|stem| modules.contains(stem))
        };
        let compiled = fs::read_dir(self.directory.join("compiled"));
        let engines = compiled.into_iter().flatten().flatten().map(|e| e.path());
        for directory in engines.chain([self.directory.join("modules")]) {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                if !needed(&entry.path()) {
                    reached(DeployStep::RemoveFile);
                    // The next garbage collection retries.
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
        // Temporary files of interrupted commits.
        let records = fs::read_dir(self.directory.join("records"));
        for entry in records.into_iter().flatten().flatten() {
            if entry.path().extension() != Some(OsStr::new("json")) {
                // The next garbage collection retries.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Removes all files of an owner without functions. Removes nothing if a record cannot be read.
    pub(crate) fn remove_all(&self) {
        if !self.records().is_complete {
            return;
        }
        if let Err(e) = fs::remove_dir_all(&self.directory)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(directory = %self.directory.display(), error = %e, "cannot remove an owner's files");
        }
    }
}

/// Syncs the directory of a file to storage.
fn sync_directory_of(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_protects_all_files_of_its_owner() {
        let place = tempfile::tempdir().unwrap();
        let store = FunctionStore::new(place.path().join("owner"));
        store.create().unwrap();
        let (module, record) = (store.module("abc"), store.record_path("f"));
        fs::write(&module, "code").unwrap();
        fs::write(&record, "{ damaged").unwrap();
        let stored = store.records();
        assert!(stored.records.is_empty() && !stored.is_complete);
        store.gc(std::iter::empty(), true);
        store.remove_all();
        assert!(module.exists() && record.exists());
        fs::remove_file(&record).unwrap();
        assert!(store.records().is_complete);
        store.gc(std::iter::empty(), true);
        assert!(!module.exists());
        store.remove_all();
        assert!(!store.directory().exists());
    }
}

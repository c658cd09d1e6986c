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
    pub(crate) fn records(&self) -> Vec<FunctionRecord> {
        let entries = fs::read_dir(self.directory.join("records"));
        let entries = entries.into_iter().flatten().flatten();
        let records = entries.filter_map(|entry| {
            let path = entry.path();
            // Other files are temporary files of interrupted commits.
            if path.extension() != Some(OsStr::new("json")) {
                return None;
            }
            let record = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
            if let Err(e) = &record {
                tracing::error!(
                    path = %path.display(), error = %e, "cannot read the record of a function"
                );
            }
            record.ok()
        });
        records.collect()
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
    /// deployments. Compilers may be writing files, unless the daemon is starting.
    pub(crate) fn gc<'a>(&self, records: impl Iterator<Item = &'a FunctionRecord>, is_start: bool) {
        let versions = records.flat_map(|record| &record.versions);
        let modules: HashSet<&str> = versions.map(|version| version.module.as_str()).collect();
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

    /// Removes all files of the owner.
    pub(crate) fn remove_all(&self) {
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

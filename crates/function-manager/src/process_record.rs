//! Record of an owner's process on disk (`process.json`), by which the next daemon finds and
//! identifies the process.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request.

use crate::deploy_step::{DeployStep, reached};
use jiffy_engine_api::ProcessInstance;
use jiffy_proto::function::SlotReset;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Name of the file in a tenant's directory.
const PROCESS_FILE: &str = "process.json";
/// Name of the temporary file while it is written.
const UNFINISHED_FILE: &str = "process.new";

/// Contents of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    #[serde(flatten)]
    pub instance: ProcessInstance,
    /// Reset of the process's slots. Absent in files of versions with a single reset.
    #[serde(default)]
    pub reset: SlotReset,
}

impl ProcessRecord {
    /// Reads the record in `directory`. `None` if no readable record exists.
    pub(crate) fn read(directory: &Path) -> Option<Self> {
        let text = fs::read(directory.join(PROCESS_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes the record atomically. The record is not synced, because a power failure also ends
    /// the process.
    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let unfinished = directory.join(UNFINISHED_FILE);
        serde_json::to_writer(File::create(&unfinished)?, self)?;
        reached(DeployStep::RecordProcess);
        // A reader sees either no record or a complete one.
        fs::rename(unfinished, directory.join(PROCESS_FILE))
    }

    /// Removes the record and an unfinished record.
    pub(crate) fn remove(directory: &Path) {
        for name in [PROCESS_FILE, UNFINISHED_FILE] {
            // The file is absent, or the next start replaces it.
            let _ = fs::remove_file(directory.join(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written_and_defaults_to_the_reset_strict() {
        let directory = tempfile::tempdir().unwrap();
        let record = ProcessRecord {
            instance: ProcessInstance::of(std::process::id()).unwrap(),
            reset: SlotReset::Fast,
        };
        record.write(directory.path()).unwrap();
        assert_eq!(ProcessRecord::read(directory.path()), Some(record.clone()));
        let former = serde_json::to_vec(&record.instance).unwrap();
        fs::write(directory.path().join(PROCESS_FILE), former).unwrap();
        let read = ProcessRecord::read(directory.path()).unwrap();
        assert_eq!(
            (read.instance, read.reset),
            (record.instance, SlotReset::Strict)
        );
        ProcessRecord::remove(directory.path());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

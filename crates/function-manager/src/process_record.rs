//! File that identifies a tenant's process to the next daemon.

use crate::deploy_step::{DeployStep, reached};
use jiffy_engine_api::ProcessInstance;
use jiffy_proto::function::SlotReset;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Name of the file in a tenant's directory.
const PROCESS_FILE: &str = "process.json";
/// The same while it is written.
const UNFINISHED_FILE: &str = "process.new";

/// Process as the file has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecord {
    #[serde(flatten)]
    pub instance: ProcessInstance,
    /// Reset of its slots; absent in files of versions that had one for all.
    #[serde(default)]
    pub reset: SlotReset,
}

impl ProcessRecord {
    /// Record in `directory`; none if there is none that can be read.
    pub(crate) fn read(directory: &Path) -> Option<Self> {
        let text = fs::read(directory.join(PROCESS_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes it at once. A power failure ends the process as well, so nothing is synced.
    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        let unfinished = directory.join(UNFINISHED_FILE);
        serde_json::to_writer(File::create(&unfinished)?, self)?;
        reached(DeployStep::NoteProcess);
        fs::rename(unfinished, directory.join(PROCESS_FILE))
    }

    /// Removes it, also one that was not finished.
    pub(crate) fn remove(directory: &Path) {
        for name in [PROCESS_FILE, UNFINISHED_FILE] {
            // Absent, or replaced by the next start.
            let _ = fs::remove_file(directory.join(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_former_versions_had_the_strict_reset() {
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

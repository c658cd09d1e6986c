//! Files of a test VM: snapshots, files for new snapshots, and lists of descriptors for requests.

use jiffy_proto::snapshot::{LayerFiles, SnapshotReport};
use jiffy_proto::vm::FdIndex;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Returns an empty temporary file.
pub fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// Open files of a snapshot, oldest layer first.
#[derive(Default)]
pub struct OpenSnapshot {
    pub state: Option<File>,
    /// Layers of memory, each with its content and its index.
    pub memory: Vec<(File, File)>,
    /// Layers of the disk, each with its content and its index.
    pub disk: Vec<(File, File)>,
    pub report: SnapshotReport,
}

impl OpenSnapshot {
    /// Duplicates all descriptors.
    pub fn share(&self) -> Self {
        let copy = |list: &[(File, File)]| {
            let copy = |f: &File| f.try_clone().unwrap();
            list.iter().map(|(a, b)| (copy(a), copy(b))).collect()
        };
        Self {
            state: self.state.as_ref().map(|f| f.try_clone().unwrap()),
            memory: copy(&self.memory),
            disk: copy(&self.disk),
            report: self.report.clone(),
        }
    }
}

/// Files to which a snapshot is written.
pub struct SnapshotTarget {
    pub state: File,
    pub memory: File,
    /// `memory` opened with `O_DIRECT`.
    pub direct: Option<File>,
    pub index: File,
    pub overlay: File,
    pub disk_index: File,
    pub working_set: Option<File>,
}

impl SnapshotTarget {
    /// Creates all files.
    pub fn new() -> Self {
        Self::to(file())
    }

    /// Creates all files except `memory`.
    pub fn to(memory: File) -> Self {
        let mut direct = File::options();
        direct.write(true).custom_flags(libc::O_DIRECT);
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        Self {
            state: file(),
            direct: direct.open(path).ok(),
            memory,
            index: file(),
            overlay: file(),
            disk_index: file(),
            working_set: None,
        }
    }
}

/// Descriptors of a request. Adding a descriptor returns its index.
pub struct FdList<'a>(pub Vec<BorrowedFd<'a>>);

impl<'a> FdList<'a> {
    pub fn add(&mut self, fd: &'a impl AsFd) -> FdIndex {
        self.0.push(fd.as_fd());
        FdIndex(u8::try_from(self.0.len() - 1).unwrap())
    }

    /// Adds the files of all layers.
    pub fn layers(&mut self, list: &'a [(File, File)]) -> Vec<LayerFiles> {
        list.iter()
            .map(|(file, index)| LayerFiles {
                file: self.add(file),
                index: self.add(index),
            })
            .collect()
    }
}

//! Tests with archives that are built byte by byte, since no tool creates invalid archives.

use super::*;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use tar::{EntryType, Header};

mod faithful;
mod hostile;

/// Returns the records of an extended header.
pub(super) fn pax(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut text = Vec::new();
    for (key, value) in pairs {
        let rest = format!(" {key}={value}\n");
        let mut length = rest.len() + 1;
        // The length includes its own digits, so it is found by trial.
        while length.to_string().len() + rest.len() != length {
            length += 1;
        }
        text.extend(format!("{length}{rest}").as_bytes());
    }
    text
}

/// Builder of an archive.
#[derive(Default)]
pub(crate) struct Tar(Vec<u8>);

impl Tar {
    /// Returns the header of an entry, whose name may be invalid.
    fn header(name: &str, kind: EntryType, size: u64) -> Header {
        let mut header = Header::new_gnu();
        // The `tar` crate rejects invalid names, so the field is written directly.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_700_000_000);
        header
    }

    fn add(mut self, mut header: Header, content: &[u8]) -> Self {
        header.set_cksum();
        self.0.extend(header.as_bytes());
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn file(self, name: &str, content: &[u8]) -> Self {
        let header = Self::header(name, EntryType::Regular, content.len() as u64);
        self.add(header, content)
    }

    pub(crate) fn directory(self, name: &str, mode: u32) -> Self {
        let mut header = Self::header(name, EntryType::Directory, 0);
        header.set_mode(mode);
        self.add(header, b"")
    }

    pub(crate) fn link(self, kind: EntryType, name: &str, target: &str) -> Self {
        let mut header = Self::header(name, kind, 0);
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        self.add(header, b"")
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.link(EntryType::Symlink, name, target)
    }

    fn hard_link(self, name: &str, target: &str) -> Self {
        self.link(EntryType::Link, name, target)
    }

    fn node(self, kind: EntryType, name: &str) -> Self {
        self.add(Self::header(name, kind, 0), b"")
    }

    fn pax(self, pairs: &[(&str, &str)]) -> Self {
        let text = pax(pairs);
        let header = Self::header("pax", EntryType::XHeader, text.len() as u64);
        self.add(header, &text)
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        // The end mark: two blocks of zeros.
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// State of a file: number of links, mode, size, change time (seconds, nanoseconds) and content.
type FileState = (u64, u32, u64, i64, i64, Vec<u8>);

/// A directory to unpack into, and a directory next to it that must not change.
struct TestDirs {
    dir: tempfile::TempDir,
}

impl TestDirs {
    /// Returns `None` and records that the test is skipped if this user cannot set owners and
    /// marks.
    fn new(test: &str) -> Option<Self> {
        if !nix::unistd::Uid::effective().is_root() {
            crate::skipped(test, "needs root to change the owners of files");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("in")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/secret"), "untouched").unwrap();
        Some(Self { dir })
    }

    fn inside(&self, path: &str) -> PathBuf {
        self.dir.path().join("in").join(path)
    }

    fn unpack(&self, archive: &[u8]) -> Result<UnpackedLayer, LayerError> {
        self.unpack_within(archive, UnpackLimits::default())
    }

    /// Unpacks an archive with limits.
    fn unpack_within(
        &self,
        archive: &[u8],
        limits: UnpackLimits,
    ) -> Result<UnpackedLayer, LayerError> {
        // Every test also checks that no file outside was touched.
        let before = self.outside();
        let unpacked = unpack(archive, &self.inside(""), limits, &mut |_| ());
        assert_eq!(
            self.outside(),
            before,
            "a file outside of the directory changed"
        );
        unpacked
    }

    /// Returns the error message for an archive.
    fn refused(&self, archive: &[u8]) -> String {
        self.unpack(archive).unwrap_err().to_string()
    }

    /// Returns the state of all files outside of the directory.
    fn outside(&self) -> BTreeMap<PathBuf, FileState> {
        let mut found = BTreeMap::new();
        for path in ["outside", "outside/secret"] {
            let path = self.dir.path().join(path);
            let m = fs::symlink_metadata(&path).unwrap();
            let content = fs::read(&path).unwrap_or_default();
            let entry = (
                m.nlink(),
                m.mode(),
                m.size(),
                m.ctime(),
                m.ctime_nsec(),
                content,
            );
            found.insert(path, entry);
        }
        // No further directory was created next to the two.
        let beside = fs::read_dir(self.dir.path()).unwrap().count();
        assert_eq!(beside, 2);
        found
    }
}

macro_rules! test_dirs {
    ($name:ident) => {
        match TestDirs::new(concat!("layer::tests::", stringify!($name))) {
            Some(dirs) => dirs,
            None => return,
        }
    };
}
use test_dirs;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Sorted names in a directory.
fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

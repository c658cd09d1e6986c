//! Verifies the content of a file once in full, and recognises the unchanged file cheaply
//! afterwards.
//!
//! After a full check, a stamp (`FILE.stamp`) records the checksum, size, inode and time stamps of
//! the file. Every change of the content also changes the time stamps. While they match the stamp,
//! the file is unchanged. Otherwise the file is checked again.

use crate::Home;
use crate::file::{FileError, OnPath, write};
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

/// An open file with verified content.
#[derive(Debug)]
pub struct VerifiedFile {
    /// Descriptor of the verified file, opened for reading. Valid even if the name of the file
    /// changes.
    pub file: File,
    pub path: PathBuf,
    /// Checksum of the content in lower-case hexadecimal. For blank disks, the checksum of the
    /// non-zero blocks.
    pub sha256: String,
    /// Size in bytes.
    pub size: u64,
}

/// Error of a verification.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("{what} {} is corrupted: expected sha256 {expected}, found {found}; {remedy}", path.display())]
    Corrupted {
        what: &'static str,
        path: PathBuf,
        expected: String,
        found: String,
        remedy: String,
    },
    #[error("{what} {} is corrupted: expected {expected} bytes, found {found}; {remedy}", path.display())]
    Size {
        what: &'static str,
        path: PathBuf,
        expected: u64,
        found: u64,
        remedy: String,
    },
    #[error("{what} {} changed while it was being verified; make sure nothing writes to it and run again", path.display())]
    Unstable { what: &'static str, path: PathBuf },
    #[error("the {what} is unusable")]
    File {
        what: &'static str,
        source: FileError,
    },
}

/// Expected properties of a file, and texts for messages.
pub(crate) struct FileCheck<'a> {
    /// Kind of file in messages, such as "kernel image".
    pub what: &'static str,
    /// Expected checksum. If `None`, the recorded checksum.
    pub sha256: Option<&'a str>,
    /// Expected size in bytes.
    pub size: Option<u64>,
    /// Only non-zero blocks are hashed, and holes are skipped. Used for large sparse files.
    pub sparse: bool,
    /// Remedy for a corrupted file, in messages.
    pub remedy: &'a str,
}

/// A file whose checksum was computed before the file was renamed to its final name.
pub(crate) struct MeasuredFile {
    file: File,
    stamp: FileStamp,
}

impl MeasuredFile {
    /// SHA-256 in lower-case hexadecimal.
    pub(crate) fn sha256(&self) -> &str {
        &self.stamp.sha256
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.stamp.size
    }
}

/// Recorded identity of a verified file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileStamp {
    sha256: String,
    size: u64,
    device: u64,
    inode: u64,
    /// Modification time in nanoseconds since 1970.
    modified_ns: i128,
    /// Change time in nanoseconds since 1970. Unlike the modification time, programs cannot set it.
    changed_ns: i128,
}

impl FileStamp {
    fn of(metadata: &fs::Metadata, sha256: String) -> Self {
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            sha256,
            size: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }
}

/// Returns the path of the stamp of `path`.
pub(crate) fn stamp_path(path: &Path) -> PathBuf {
    // The extension is appended, so that files that differ only in the extension have different
    // stamps.
    let mut name = path.as_os_str().to_owned();
    name.push(".stamp");
    name.into()
}

impl FileCheck<'_> {
    /// Opens and verifies `path`. If the file is missing or has no checksum, `make` creates it
    /// first. Concurrent callers with the same lock create it only once.
    pub(crate) fn open_or_make<E: From<VerifyError> + From<FileError>>(
        &self,
        path: &Path,
        home: &Home,
        lock: &str,
        make: impl FnOnce() -> Result<(), E>,
    ) -> Result<VerifiedFile, E> {
        if let Some(verified) = self.open(path)? {
            return Ok(verified);
        }
        let _lock = home.lock(lock, || ())?;
        // Another process may have created the file while this process waited for the lock.
        if let Some(verified) = self.open(path)? {
            return Ok(verified);
        }
        make()?;
        Ok(self.record(path)?)
    }

    /// Opens and verifies `path`. Returns `None` if the file is missing or has no known checksum.
    pub(crate) fn open(&self, path: &Path) -> Result<Option<VerifiedFile>, VerifyError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).on("open", path).map_err(|e| self.failed(e)),
        };
        let metadata = file
            .metadata()
            .on("examine", path)
            .map_err(|e| self.failed(e))?;
        if let Some(expected) = self.size.filter(|s| *s != metadata.len()) {
            // The size is compared first, since this needs no reading of the file.
            let (path, found, remedy) = (path.to_owned(), metadata.len(), self.remedy.to_owned());
            return Err(VerifyError::Size {
                what: self.what,
                path,
                expected,
                found,
                remedy,
            });
        }
        let stamp = FileStamp::load(&stamp_path(path));
        let Some(expected) = self
            .sha256
            .map(str::to_owned)
            .or_else(|| stamp.as_ref().map(|s| s.sha256.clone()))
        else {
            return Ok(None);
        };
        // The comparison includes the checksum: a stamp with another checksum does not match.
        if stamp == Some(FileStamp::of(&metadata, expected.clone())) {
            return Ok(Some(VerifiedFile {
                file,
                path: path.to_owned(),
                sha256: expected,
                size: metadata.len(),
            }));
        }
        self.verify_fully(file, path, Some(expected)).map(Some)
    }

    /// Computes the checksum of a file before it is renamed to its final name. Always hashes the
    /// whole content, even if `sparse` is set.
    pub(crate) fn measure(&self, path: &Path) -> Result<MeasuredFile, VerifyError> {
        let measured = || {
            let file = File::open(path).on("open", path)?;
            let before = file.metadata().on("examine", path)?;
            wait_for_next_tick(&before);
            let sha256 = sum(&file).on("read", path)?;
            let stamp = FileStamp::of(&before, sha256);
            Ok(MeasuredFile { file, stamp })
        };
        measured().map_err(|e| self.failed(e))
    }

    /// Records the stamp of a measured file after its rename, which changes only the change time.
    pub(crate) fn record_measured(
        &self,
        path: &Path,
        measured: MeasuredFile,
    ) -> Result<(), VerifyError> {
        let metadata = measured
            .file
            .metadata()
            .on("examine", path)
            .map_err(|e| self.failed(e))?;
        let stamp = FileStamp::of(&metadata, measured.stamp.sha256.clone());
        let as_measured = FileStamp {
            changed_ns: stamp.changed_ns,
            ..measured.stamp
        };
        // Any other difference means that the file was changed between the checksum and the rename.
        if stamp != as_measured {
            return Err(VerifyError::Unstable {
                what: self.what,
                path: path.to_owned(),
            });
        }
        self.write_stamp(path, &stamp).map_err(|e| self.failed(e))
    }

    /// Computes and records the checksum of a new file, which is the expected checksum from now on.
    pub(crate) fn record(&self, path: &Path) -> Result<VerifiedFile, VerifyError> {
        let file = File::open(path)
            .on("open", path)
            .map_err(|e| self.failed(e))?;
        self.verify_fully(file, path, self.sha256.map(str::to_owned))
    }

    /// Computes the checksum, compares it with `expected` if given, and records the stamp.
    fn verify_fully(
        &self,
        file: File,
        path: &Path,
        expected: Option<String>,
    ) -> Result<VerifiedFile, VerifyError> {
        let before = file
            .metadata()
            .on("examine", path)
            .map_err(|e| self.failed(e))?;
        wait_for_next_tick(&before);
        let found = if self.sparse {
            sparse_sum(&file)
        } else {
            sum(&file)
        };
        let found = found.on("read", path).map_err(|e| self.failed(e))?;
        if let Some(expected) = expected.filter(|e| *e != found) {
            let (path, remedy) = (path.to_owned(), self.remedy.to_owned());
            return Err(VerifyError::Corrupted {
                what: self.what,
                path,
                expected,
                found,
                remedy,
            });
        }
        let after = file
            .metadata()
            .on("examine", path)
            .map_err(|e| self.failed(e))?;
        let stamp = FileStamp::of(&after, found);
        // A difference means a change during the read: the checksum may belong to neither content.
        if stamp != FileStamp::of(&before, stamp.sha256.clone()) {
            return Err(VerifyError::Unstable {
                what: self.what,
                path: path.to_owned(),
            });
        }
        self.write_stamp(path, &stamp).map_err(|e| self.failed(e))?;
        Ok(VerifiedFile {
            file,
            path: path.to_owned(),
            sha256: stamp.sha256,
            size: stamp.size,
        })
    }

    /// Records that the file was verified, so that the next use needs no checksum.
    fn write_stamp(&self, path: &Path, stamp: &FileStamp) -> Result<(), FileError> {
        let path = stamp_path(path);
        let text = serde_json::to_vec(stamp)
            .map_err(io::Error::other)
            .on("write", &path)?;
        let directory = path.parent().unwrap_or(Path::new("."));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        write(directory, &name, &text).map(drop)
    }

    fn failed(&self, source: FileError) -> VerifyError {
        VerifyError::File {
            what: self.what,
            source,
        }
    }
}

/// Waits until the clock has left the tick of the file's last change. A later change in the same
/// tick would have equal time stamps, and the stamp would be valid for unverified content.
fn wait_for_next_tick(metadata: &fs::Metadata) {
    // At least the longest tick of the kernel's coarse clock (10 ms at HZ=100).
    const TICK: Duration = Duration::from_millis(20);
    let age = metadata
        .modified()
        .ok()
        .and_then(|m| SystemTime::now().duration_since(m).ok());
    let changed =
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(metadata.ctime()).unwrap_or(0));
    let changed = changed + Duration::from_nanos(u64::try_from(metadata.ctime_nsec()).unwrap_or(0));
    // The later of modification and change time counts. A time in the future has the age 0.
    let age = age.unwrap_or_default().min(
        SystemTime::now()
            .duration_since(changed)
            .unwrap_or_default(),
    );
    thread::sleep(TICK.saturating_sub(age));
}

/// Returns the SHA-256 of `bytes` in lower-case hexadecimal.
pub(crate) fn sum_of(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

/// Returns the SHA-256 of the hashed bytes in lower-case hexadecimal.
pub(crate) fn hex(hasher: Sha256) -> String {
    HEXLOWER.encode(&hasher.finalize())
}

/// Computes the checksum of the whole content. Uses positional reads, so that the file offset is
/// unchanged.
pub(crate) fn sum(file: &File) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut offset = 0;
    loop {
        match file.read_at(&mut buffer, offset)? {
            0 => return Ok(hex(hasher)),
            n => {
                hasher.update(&buffer[..n]);
                offset += n as u64;
            }
        }
    }
}

/// Computes the checksum of the size and of the non-zero 4 KiB blocks with their offsets. The
/// result is independent of holes.
fn sparse_sum(file: &File) -> io::Result<String> {
    const BLOCK: usize = 4096;
    let size = file.metadata()?.len();
    let mut hasher = Sha256::new_with_prefix(size.to_le_bytes());
    let mut buffer = vec![0; 256 * BLOCK];
    let mut offset = 0;
    // Holes can be found only by seeking. The file offset is reset to 0 afterwards.
    while let Some(data) = next_data(file, offset)? {
        // Data regions start at blocks of the file system, which may be smaller than `BLOCK`.
        offset = data - data % BLOCK as u64;
        // The buffer may extend into a following hole, whose zeros are ignored below.
        let n = file.read_at(&mut buffer, offset)?;
        for (i, block) in buffer[..n].chunks(BLOCK).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                hasher.update((offset + (i * BLOCK) as u64).to_le_bytes());
                hasher.update(block);
            }
        }
        // A concurrent truncation can end the file early.
        if n == 0 {
            break;
        }
        offset += n as u64;
    }
    (&mut &*file).rewind()?;
    Ok(hex(hasher))
}

/// Returns the offset of the first data at or after `offset`. Returns `None` if only a hole
/// follows.
fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    use nix::unistd::{Whence, lseek};
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    match lseek(file, offset, Whence::SeekData) {
        Ok(data) => u64::try_from(data).map(Some).map_err(io::Error::other),
        Err(nix::Error::ENXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECK: FileCheck<'static> = FileCheck {
        what: "test image",
        sha256: None,
        size: None,
        sparse: false,
        remedy: "remove it and run again",
    };

    fn flip(path: &Path, offset: u64) {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    }

    #[test]
    fn a_change_right_after_recording_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        for _ in 0..5 {
            fs::write(&path, vec![7; 5000]).unwrap();
            CHECK.record(&path).unwrap();
            assert!(CHECK.open(&path).unwrap().is_some());
            flip(&path, 4321);
            let error = CHECK.open(&path).unwrap_err();
            assert!(matches!(error, VerifyError::Corrupted { .. }));
            let message = error.to_string();
            assert!(message.starts_with(&format!(
                "test image {} is corrupted: expected sha256",
                path.display()
            )));
            assert!(message.ends_with("; remove it and run again"));
        }
    }

    #[test]
    fn a_truncated_file_is_refused_by_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, b"short").unwrap();
        let error = FileCheck {
            size: Some(9),
            ..CHECK
        }
        .open(&path)
        .unwrap_err();
        assert!(error.to_string().contains("expected 9 bytes, found 5"));
    }

    #[test]
    fn an_untouched_copy_is_verified_again_and_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        fs::write(&path, b"content").unwrap();
        CHECK.record(&path).unwrap();
        fs::copy(&path, dir.path().join("copy")).unwrap();
        fs::rename(dir.path().join("copy"), &path).unwrap();
        assert_eq!(
            CHECK.open(&path).unwrap().unwrap().sha256,
            sum_of(b"content")
        );
    }

    #[test]
    fn an_unrecorded_file_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        assert!(CHECK.open(&path).unwrap().is_none());
        fs::write(&path, b"content").unwrap();
        assert!(CHECK.open(&path).unwrap().is_none());
    }

    #[test]
    fn the_sum_of_a_sparse_file_does_not_depend_on_its_holes() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, punched: bool| {
            let file = File::create_new(dir.path().join(name)).unwrap();
            file.set_len(64 << 20).unwrap();
            file.write_all_at(b"head", 0).unwrap();
            file.write_all_at(b"middle", 33 << 20).unwrap();
            if !punched {
                file.write_all_at(&[0; 8192], 16 << 20).unwrap();
            }
            File::open(dir.path().join(name)).unwrap()
        };
        let (holes, zeroes) = (make("holes", true), make("zeroes", false));
        assert_eq!(sparse_sum(&holes).unwrap(), sparse_sum(&zeroes).unwrap());
        assert_ne!(sparse_sum(&holes).unwrap(), sum(&holes).unwrap());
    }
}

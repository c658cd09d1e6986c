//! Store of images, `<home>/images`. Each image is stored once, under its digest, and shared by all
//! templates that refer to it. The *stamp* of an image is a file that records its verified
//! checksum.
//!
//! Three rules prevent the removal of an image that is in use:
//! - Every user of an image holds a shared lock on its open file. Child processes inherit the lock.
//!   The lock is released when the last process closes the file, for example a VMM that outlives
//!   the daemon.
//! - The garbage collector removes only images that it can lock exclusively.
//! - A process that adds an image holds [`ImageStore::share`] until a manifest refers to the image.

use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::lock::Lock;
use crate::template_model::{ImageSum, TemplateError};
use crate::verified::{FileCheck, MeasuredFile, VerifiedFile, stamp_path};
use crate::work_dir::remove_tree;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// Lock on the directory: shared to open and add images, exclusive to remove images.
const LOCK: &str = "images";
/// Parts of a file name before and after the checksum of the image.
const PREFIX: &str = "sha256-";
const SUFFIX: &str = ".erofs";
const REMEDY: &str = "run `jiffy template rm` for the template and build it again";

/// `<home>/images`.
pub(crate) struct ImageStore {
    home: Home,
}

/// An unused image. While this value exists, no process can open the image.
pub(crate) struct UnusedImage {
    pub sum: ImageSum,
    path: PathBuf,
    /// Disk space in bytes that the removal frees.
    pub bytes: u64,
    /// Exclusive lock on the file of the image.
    _lock: File,
}

/// Returns the check of an image with this checksum and size.
fn check<'a>(sha256: Option<&'a str>, size: Option<u64>) -> FileCheck<'a> {
    FileCheck {
        what: "template image",
        sha256,
        size,
        sparse: false,
        remedy: REMEDY,
    }
}

impl ImageStore {
    pub(crate) fn new(home: &Home) -> Self {
        Self { home: home.clone() }
    }

    /// Acquires the shared lock. No image is removed while it is held.
    pub(crate) fn share(&self) -> Result<Lock, FileError> {
        self.home.share(LOCK)
    }

    /// Acquires the exclusive lock. No image is opened or added while it is held. Returns `None` if
    /// another process holds the lock and `wait` is false.
    pub(crate) fn exclusive(&self, wait: bool) -> Result<Option<Lock>, FileError> {
        if wait {
            self.home.lock(LOCK, || ()).map(Some)
        } else {
            self.home.try_lock(LOCK)
        }
    }

    pub(crate) fn path(&self, sha256: &str) -> PathBuf {
        self.home.images().join(format!("{PREFIX}{sha256}{SUFFIX}"))
    }

    /// Opens and verifies an image. The image is not removed while any process has the file open.
    pub(crate) fn open(&self, sum: &ImageSum) -> Result<VerifiedFile, TemplateError> {
        let path = self.path(&sum.sha256);
        let opened = check(Some(&sum.sha256), Some(sum.size)).open(&path)?;
        let image = opened.ok_or_else(|| TemplateError::Image { path: path.clone() })?;
        // This call waits while the image is locked exclusively. Another data directory can borrow
        // this store by a symbolic link, and its garbage collector may hold such a lock for a
        // moment.
        image.file.lock_shared().on("lock", &path)?;
        Ok(image)
    }

    /// Adds a finished file, unless an image with this content exists.
    pub(crate) fn add(&self, file: &Path) -> Result<ImageSum, TemplateError> {
        self.publish(file, check(None, None).measure(file)?)
    }

    /// Adds a finished file if it has the expected digest. Otherwise returns the actual digest.
    pub(crate) fn add_expected(
        &self,
        file: &Path,
        expected: &ImageSum,
    ) -> Result<Result<(), String>, TemplateError> {
        let measured = check(None, None).measure(file)?;
        if measured.sha256() != expected.sha256 {
            return Ok(Err(measured.sha256().to_owned()));
        }
        self.publish(file, measured).map(drop).map(Ok)
    }

    /// Moves a measured image into the store, named by its digest.
    fn publish(&self, file: &Path, measured: MeasuredFile) -> Result<ImageSum, TemplateError> {
        let sum = ImageSum {
            sha256: measured.sha256().to_owned(),
            size: measured.size(),
        };
        let path = self.path(&sum.sha256);
        let existing = check(Some(&sum.sha256), Some(sum.size)).open(&path);
        // A damaged image is replaced.
        if !matches!(existing, Ok(Some(_))) {
            // The stamp belongs to the damaged image. Ignore the error: usually there is no stamp.
            let _ = fs::remove_file(stamp_path(&path));
            fs::rename(file, &path).on("create", &path)?;
            file::sync_dir(&self.home.images())?;
            // The stamp is written last: a crash before only means that the image is verified
            // again.
            check(None, None).record_measured(&path, measured)?;
        }
        Ok(sum)
    }

    /// Adds a link to an image of manifest format 1, the format of earlier versions of Jiffy. In
    /// this format, the image is in the directory of its manifest.
    pub(crate) fn adopt(&self, sum: &ImageSum, old: &Path) -> Result<(), FileError> {
        let path = self.path(&sum.sha256);
        if path.exists() || !old.exists() {
            return Ok(());
        }
        // Resolves symbolic links into a borrowed data directory.
        let old = old.canonicalize().on("find", old)?;
        // The link to the stamp is created first, because later calls return early once the link to
        // the image exists.
        for (from, to) in [(stamp_path(&old), stamp_path(&path)), (old, path)] {
            // Ignore the error: usually there is no link yet. A dangling link is replaced.
            let _ = fs::remove_file(&to);
            match symlink(&from, &to) {
                // Another process created the link first.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                result => result.on("create", &to)?,
            }
        }
        Ok(())
    }

    /// Moves an image of manifest format 1 into the store before its directory is removed.
    pub(crate) fn move_format_1(&self, sum: &ImageSum, old: &Path) -> Result<(), FileError> {
        let path = self.path(&sum.sha256);
        // Images of another data directory are not moved. Both paths are resolved, since both may
        // contain symbolic links.
        let home = self.home.path().canonicalize();
        let found = old.canonicalize();
        let ours = matches!((found, home), (Ok(found), Ok(home)) if found.starts_with(&home));
        if !ours || fs::symlink_metadata(&path).is_ok_and(|m| m.is_file()) {
            return Ok(());
        }
        // Ignore the error: there may be no stamp, or it is a link of `adopt`.
        let _ = fs::remove_file(stamp_path(&path));
        fs::rename(old, &path).on("move", &path)?;
        file::sync_dir(&self.home.images())
    }

    /// Returns the unused images, and the digests of the images in use. The caller must hold the
    /// lock of [`Self::exclusive`].
    pub(crate) fn classify(&self) -> Result<(Vec<UnusedImage>, Vec<String>), FileError> {
        let (mut unused, mut in_use) = (Vec::new(), Vec::new());
        let directory = self.home.images();
        for entry in fs::read_dir(&directory).on("list", &directory)? {
            let path = entry.on("list", &directory)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // The exclusive lock ensures that no build is running, so the file was left by a crash.
            if name.starts_with(file::UNFINISHED) {
                remove_tree(&path)?;
                continue;
            }
            let sum = name
                .strip_prefix(PREFIX)
                .and_then(|n| n.strip_suffix(SUFFIX));
            let Some(sha256) = sum.map(str::to_owned) else {
                continue;
            };
            // A symbolic link refers to an image of another data directory, or to nothing.
            let metadata = fs::symlink_metadata(&path).on("examine", &path)?;
            let is_file = metadata.is_file();
            let opened = match File::open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    fs::remove_file(&path).on("remove", &path)?;
                    continue;
                }
                opened => opened.on("open", &path)?,
            };
            match opened.try_lock() {
                Ok(()) => unused.push(UnusedImage {
                    sum: ImageSum {
                        sha256,
                        size: metadata.len(),
                    },
                    // The removal of a link frees no space.
                    bytes: if is_file { metadata.blocks() * 512 } else { 0 },
                    path,
                    _lock: opened,
                }),
                // Another descriptor, possibly of this process, holds a shared lock: the image is
                // in use. After any other error, the image counts as in use as well.
                Err(_) => in_use.push(sha256),
            }
        }
        Ok((unused, in_use))
    }
}

impl UnusedImage {
    /// Removes the image and its stamp.
    pub(crate) fn remove(&self) -> Result<(), FileError> {
        // Ignore the error: the image may have no stamp. The stamp is removed first, since an image
        // without a stamp is only verified again.
        let _ = fs::remove_file(stamp_path(&self.path));
        fs::remove_file(&self.path).on("remove", &self.path)
    }
}

//! Store of images, each once, by content.
//!
//! Every user of an image holds a shared lock on its open file, which is inherited and ends with
//! the last process that has the file open, such as a VMM that outlives the daemon. Locked images
//! are not removed. A process that adds an image holds [`ImageStore::share`] until the image is
//! referenced.

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

/// Lock on the directory: shared to open and add images, exclusive to remove them.
const LOCK: &str = "images";
const PREFIX: &str = "sha256-";
const SUFFIX: &str = ".erofs";
const REMEDY: &str = "run `jiffy template rm` for the template and build it again";

/// `<home>/images`.
pub(crate) struct ImageStore {
    home: Home,
}

/// An unused image; while this exists, no process opens it.
pub(crate) struct UnusedImage {
    pub sum: ImageSum,
    path: PathBuf,
    /// Disk space in bytes that its removal frees.
    pub bytes: u64,
    /// Exclusive lock.
    _lock: File,
}

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

    /// Takes the shared lock, under which no image is removed.
    pub(crate) fn share(&self) -> Result<Lock, FileError> {
        self.home.share(LOCK)
    }

    /// Takes the exclusive lock, under which no image is opened or added. None if it is held and
    /// `wait` is false.
    pub(crate) fn alone(&self, wait: bool) -> Result<Option<Lock>, FileError> {
        match wait {
            true => self.home.lock(LOCK, || ()).map(Some),
            false => self.home.try_lock(LOCK),
        }
    }

    pub(crate) fn path(&self, sha256: &str) -> PathBuf {
        self.home.images().join(format!("{PREFIX}{sha256}{SUFFIX}"))
    }

    /// Opens and verifies an image. It is not removed while the file is open in any process.
    pub(crate) fn open(&self, sum: &ImageSum) -> Result<VerifiedFile, TemplateError> {
        let path = self.path(&sum.sha256);
        let opened = check(Some(&sum.sha256), Some(sum.size)).open(&path)?;
        let image = opened.ok_or_else(|| TemplateError::Image { path: path.clone() })?;
        // A gc in a data directory that borrows this one may hold it briefly.
        image.file.lock_shared().on("lock", &path)?;
        Ok(image)
    }

    /// Adds a finished file, unless its content exists.
    pub(crate) fn add(&self, made: &Path) -> Result<ImageSum, TemplateError> {
        self.take_over(made, check(None, None).measure(made)?)
    }

    /// Adds a finished file if it has the expected digest; otherwise returns its digest.
    pub(crate) fn add_expected(
        &self,
        made: &Path,
        expected: &ImageSum,
    ) -> Result<Result<(), String>, TemplateError> {
        let measured = check(None, None).measure(made)?;
        if measured.sha256() != expected.sha256 {
            return Ok(Err(measured.sha256().to_owned()));
        }
        self.take_over(made, measured).map(drop).map(Ok)
    }

    fn take_over(&self, made: &Path, measured: MeasuredFile) -> Result<ImageSum, TemplateError> {
        let sum = ImageSum {
            sha256: measured.sha256().to_owned(),
            size: measured.size(),
        };
        let path = self.path(&sum.sha256);
        let known = check(Some(&sum.sha256), Some(sum.size)).open(&path);
        // A damaged image is replaced.
        if !matches!(known, Ok(Some(_))) {
            let _ = fs::remove_file(stamp_path(&path));
            fs::rename(made, &path).on("create", &path)?;
            file::sync_dir(&self.home.images())?;
            check(None, None).vouch(&path, measured)?;
        }
        Ok(sum)
    }

    /// Links an image of manifest format 1, which lies beside its manifest, into the store.
    pub(crate) fn adopt(&self, sum: &ImageSum, old: &Path) -> Result<(), FileError> {
        let path = self.path(&sum.sha256);
        if path.exists() || !old.exists() {
            return Ok(());
        }
        // Resolves links of a borrowed data directory.
        let old = old.canonicalize().on("find", old)?;
        // A dangling link is replaced.
        for (from, to) in [(stamp_path(&old), stamp_path(&path)), (old, path)] {
            let _ = fs::remove_file(&to);
            match symlink(&from, &to) {
                // Another process was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.on("create", &to)?,
            }
        }
        Ok(())
    }

    /// Moves an image of manifest format 1 into the store before its directory is removed.
    pub(crate) fn rescue(&self, sum: &ImageSum, old: &Path) -> Result<(), FileError> {
        let path = self.path(&sum.sha256);
        // Images of another data directory stay there.
        let home = self.home.path().canonicalize();
        let found = old.canonicalize();
        let ours = matches!((found, home), (Ok(found), Ok(home)) if found.starts_with(&home));
        if !ours || fs::symlink_metadata(&path).is_ok_and(|m| m.is_file()) {
            return Ok(());
        }
        let _ = fs::remove_file(stamp_path(&path));
        fs::rename(old, &path).on("keep", &path)?;
        file::sync_dir(&self.home.images())
    }

    /// Unused images, and the digests of those in use. The caller holds [`Self::alone`].
    pub(crate) fn classify(&self) -> Result<(Vec<UnusedImage>, Vec<String>), FileError> {
        let (mut unused, mut in_use) = (Vec::new(), Vec::new());
        let directory = self.home.images();
        for entry in fs::read_dir(&directory).on("list", &directory)? {
            let path = entry.on("list", &directory)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
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
            // A link leads to an image of another data directory, or dangles.
            let metadata = fs::symlink_metadata(&path).on("examine", &path)?;
            let own = metadata.is_file();
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
                    bytes: if own { metadata.blocks() * 512 } else { 0 },
                    path,
                    _lock: opened,
                }),
                Err(_) => in_use.push(sha256),
            }
        }
        Ok((unused, in_use))
    }
}

impl UnusedImage {
    /// Removes the image and its stamp.
    pub(crate) fn remove(&self) -> Result<(), FileError> {
        let _ = fs::remove_file(stamp_path(&self.path));
        fs::remove_file(&self.path).on("remove", &self.path)
    }
}

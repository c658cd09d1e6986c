//! Images of root file systems, each once, by content.
//!
//! Whoever uses one holds a shared lock on the open file: it goes with the last process that has it open, which may be a virtual
//! machine that outlives everybody else. What is locked is not removed. Whoever adds images to name them later holds
//! [`Images::share`] until that has happened.

use crate::builder;
use crate::file::{self, FileError, OnPath};
use crate::home::Home;
use crate::lock::Lock;
use crate::manifest::ImageSum;
use crate::template::TemplateError;
use crate::verified::{Check, Measured, VerifiedFile, stamp_path};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// Lock on the directory: shared by those who open and add, held alone by whoever removes.
const LOCK: &str = "images";
const PREFIX: &str = "sha256-";
const SUFFIX: &str = ".erofs";
const REMEDY: &str = "run `jiffy template rm` for the template and build it again";

/// `<home>/images`.
pub(crate) struct Images {
    home: Home,
}

/// An image that nobody uses; while this lives nobody begins to.
pub(crate) struct Unused {
    pub sum: ImageSum,
    path: PathBuf,
    /// Bytes that are free once it is gone.
    pub bytes: u64,
    /// Locked, by nobody else.
    _lock: File,
}

fn check<'a>(sha256: Option<&'a str>, size: Option<u64>) -> Check<'a> {
    Check {
        what: "template image",
        sha256,
        size,
        sparse: false,
        remedy: REMEDY,
    }
}

impl Images {
    pub(crate) fn new(home: &Home) -> Self {
        Self { home: home.clone() }
    }

    /// As long as it is held nothing is removed.
    pub(crate) fn share(&self) -> Result<Lock, FileError> {
        self.home.share(LOCK)
    }

    /// Held by whoever removes; nobody opens or adds meanwhile. None while somebody does, unless that is to be waited for.
    pub(crate) fn alone(&self, wait: bool) -> Result<Option<Lock>, FileError> {
        match wait {
            true => self.home.lock(LOCK, || ()).map(Some),
            false => self.home.try_lock(LOCK),
        }
    }

    pub(crate) fn path(&self, sha256: &str) -> PathBuf {
        self.home.images().join(format!("{PREFIX}{sha256}{SUFFIX}"))
    }

    /// Opens an image, verified, and keeps it from being removed for as long as the file is open anywhere.
    pub(crate) fn open(&self, sum: &ImageSum) -> Result<VerifiedFile, TemplateError> {
        let path = self.path(&sum.sha256);
        let opened = check(Some(&sum.sha256), Some(sum.size)).open(&path)?;
        let image = opened.ok_or_else(|| TemplateError::Image { path: path.clone() })?;
        // Whoever removes images of a data directory that this one is borrowed by may look at it just now.
        image.file.lock_shared().on("lock", &path)?;
        Ok(image)
    }

    /// Takes over a finished file, unless its content is here already.
    pub(crate) fn add(&self, made: &Path) -> Result<ImageSum, TemplateError> {
        self.take_over(made, check(None, None).measure(made)?)
    }

    /// The same if its content is what it should be; otherwise, what its content is.
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

    fn take_over(&self, made: &Path, measured: Measured) -> Result<ImageSum, TemplateError> {
        let sum = ImageSum {
            sha256: measured.sha256().to_owned(),
            size: measured.size(),
        };
        let path = self.path(&sum.sha256);
        let known = check(Some(&sum.sha256), Some(sum.size)).open(&path);
        // One that is damaged makes room for this.
        if !matches!(known, Ok(Some(_))) {
            let _ = fs::remove_file(stamp_path(&path));
            fs::rename(made, &path).on("create", &path)?;
            file::sync_dir(&self.home.images())?;
            check(None, None).vouch(&path, measured)?;
        }
        Ok(sum)
    }

    /// Makes an image that lies beside its manifest, as the first format had it, one of these.
    pub(crate) fn adopt(&self, sum: &ImageSum, old: &Path) -> Result<(), FileError> {
        let path = self.path(&sum.sha256);
        if path.exists() || !old.exists() {
            return Ok(());
        }
        // Whatever links lead there now.
        let old = old.canonicalize().on("find", old)?;
        // A link that leads nowhere is in the way.
        for (from, to) in [(stamp_path(&old), stamp_path(&path)), (old, path)] {
            let _ = fs::remove_file(&to);
            match symlink(&from, &to) {
                // Somebody else was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.on("create", &to)?,
            }
        }
        Ok(())
    }

    /// The same for one whose place is about to go.
    pub(crate) fn rescue(&self, sum: &ImageSum, old: &Path) -> Result<(), FileError> {
        let path = self.path(&sum.sha256);
        // What is borrowed from another data directory is needed there.
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

    /// Those that no open file keeps, and the sums of those that one does. Needs [`Self::alone`].
    pub(crate) fn sort_out(&self) -> Result<(Vec<Unused>, Vec<String>), FileError> {
        let (mut unused, mut in_use) = (Vec::new(), Vec::new());
        let directory = self.home.images();
        for entry in fs::read_dir(&directory).on("list", &directory)? {
            let path = entry.on("list", &directory)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(file::UNFINISHED) {
                builder::clear(&path)?;
                continue;
            }
            let sum = name
                .strip_prefix(PREFIX)
                .and_then(|n| n.strip_suffix(SUFFIX));
            let Some(sha256) = sum.map(str::to_owned) else {
                continue;
            };
            // A link leads to an image of somebody else's, or nowhere.
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
                Ok(()) => unused.push(Unused {
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

impl Unused {
    /// Removes it.
    pub(crate) fn remove(&self) -> Result<(), FileError> {
        let _ = fs::remove_file(stamp_path(&self.path));
        fs::remove_file(&self.path).on("remove", &self.path)
    }
}

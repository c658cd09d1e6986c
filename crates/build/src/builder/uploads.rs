//! Files that clients send for a build, kept until they are not used any more.

use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::fs::File;
use tokio::io::AsyncWriteExt;

/// How long a place to upload to is open.
const OPEN_FOR: Duration = Duration::from_secs(3600);
/// Most places that are open at once.
const MAX_OPEN: usize = 10_000;
/// Largest upload, in bytes.
pub const MAX_UPLOAD: u64 = 8 << 30;
/// Beginning of the name of what is being written.
const UNFINISHED: &str = ".new-";

/// Why an upload is not taken.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// Not such a name.
    #[error("`{0}` is not the hash of files: send the SHA-256 in hexadecimal")]
    Name(String),
    /// No such place, or not any more.
    #[error("this link to upload to is not known any more: ask for another")]
    Closed,
    /// Too many places.
    #[error("{MAX_OPEN} uploads are open already: finish some, or wait an hour")]
    TooMany,
    /// Too large.
    #[error("the upload is larger than {} GiB: leave out what is not needed with a .dockerignore", MAX_UPLOAD >> 30)]
    TooLarge,
    /// The file system says no.
    #[error("cannot keep the upload: {0}; look for room on the disk of the data directory")]
    File(#[from] io::Error),
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] jiffy_host::IdentityError),
}

/// Uploads, by owner and name.
pub struct Uploads {
    directory: PathBuf,
    open: Mutex<HashMap<String, (PathBuf, Instant)>>,
}

/// An upload that is coming in. Nothing is kept unless it is finished.
pub struct Upload {
    file: File,
    hash: Sha256,
    bytes: u64,
    /// Gone with whoever gives up.
    unfinished: Unfinished,
    target: PathBuf,
}

struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Uploads {
    /// Those in `directory`. What nobody finished is removed.
    pub fn open(directory: PathBuf) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)?;
        let this = Self {
            directory,
            open: Mutex::default(),
        };
        for file in this.files()? {
            let name = file.file_name().map(|n| n.to_string_lossy().into_owned());
            if name.is_some_and(|n| n.starts_with(UNFINISHED)) {
                fs::remove_file(file)?;
            }
        }
        Ok(this)
    }

    fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for owner in fs::read_dir(&self.directory)? {
            for file in fs::read_dir(owner?.path())? {
                files.push(file?.path());
            }
        }
        Ok(files)
    }

    /// Where the upload of that name is, or would be.
    fn path(&self, owner: Option<&str>, name: &str) -> Result<PathBuf, UploadError> {
        let hexadecimal = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if !hexadecimal {
            let shown = name.chars().filter(|c| !c.is_control()).take(80).collect();
            return Err(UploadError::Name(shown));
        }
        // Ids of keys are letters and digits.
        let owner = owner.map_or_else(|| "host".to_owned(), |id| format!("key-{id}"));
        Ok(self.directory.join(owner).join(name.to_ascii_lowercase()))
    }

    /// The upload of that name and the SHA-256 of its bytes, if it is there.
    pub fn find(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<(PathBuf, String)>, UploadError> {
        let path = self.path(owner, name)?;
        let sum = match fs::read_to_string(path.with_extension("sum")) {
            Ok(sum) => sum,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        if !path.is_file() {
            return Ok(None);
        }
        // Used: it is not old yet.
        let now = fs::FileTimes::new().set_modified(SystemTime::now());
        if let Ok(file) = fs::File::options().append(true).open(&path) {
            let _ = file.set_times(now);
        }
        Ok(Some((path, sum)))
    }

    /// Opens a place for an upload; whoever knows its word may fill it for an hour.
    pub fn place(&self, owner: Option<&str>, name: &str) -> Result<String, UploadError> {
        let path = self.path(owner, name)?;
        let word = jiffy_host::new_token()?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, (_, since)| since.elapsed() < OPEN_FOR);
        if open.len() >= MAX_OPEN {
            return Err(UploadError::TooMany);
        }
        open.insert(word.clone(), (path, Instant::now()));
        Ok(word)
    }

    /// Begins to fill a place.
    pub async fn begin(&self, word: &str) -> Result<Upload, UploadError> {
        let target = {
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            let place = open
                .get(word)
                .filter(|(_, since)| since.elapsed() < OPEN_FOR);
            place
                .map(|(path, _)| path.clone())
                .ok_or(UploadError::Closed)?
        };
        let owner = target.parent().unwrap_or(&self.directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(owner)?;
        let new = owner.join(format!("{UNFINISHED}{}", jiffy_host::new_id()?));
        let file = File::options()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&new)
            .await?;
        Ok(Upload {
            file,
            hash: Sha256::new(),
            bytes: 0,
            unfinished: Unfinished(new),
            target,
        })
    }

    /// Removes uploads that were not used for so long; returns how many bytes they had.
    pub fn prune(&self, unused_for: Duration) -> io::Result<u64> {
        let mut freed = 0;
        for path in self.files()? {
            // Sums go with what they are of, so they may be gone by now.
            if path.extension().is_some() || starts(&path, UNFINISHED) {
                continue;
            }
            let metadata = match fs::metadata(&path) {
                // Somebody else was faster.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            let age = metadata.modified()?.elapsed().unwrap_or_default();
            if age >= unused_for {
                // Without its sum it is not there.
                let _ = fs::remove_file(path.with_extension("sum"));
                fs::remove_file(&path)?;
                freed += metadata.len();
            }
        }
        Ok(freed)
    }
}

fn starts(path: &Path, beginning: &str) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy());
    name.is_some_and(|n| n.starts_with(beginning))
}

impl Upload {
    /// Takes the next bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), UploadError> {
        self.bytes += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.bytes > MAX_UPLOAD {
            return Err(UploadError::TooLarge);
        }
        self.hash.update(bytes);
        Ok(self.file.write_all(bytes).await?)
    }

    /// Keeps what was written.
    pub async fn finish(mut self) -> Result<(), UploadError> {
        self.file.flush().await?;
        self.file.sync_data().await?;
        let sum: String = (self.hash.finalize().iter())
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let sums = self.target.with_extension("sum");
        // Never the sum of other bytes than those there are: gone while they change.
        let _ = fs::remove_file(&sums);
        fs::rename(&self.unfinished.0, &self.target)?;
        let new = self.unfinished.0.with_extension("sum");
        fs::write(&new, sum)?;
        Ok(fs::rename(&new, &sums)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> String {
        "ab".repeat(32)
    }

    async fn upload(uploads: &Uploads, owner: Option<&str>, bytes: &[u8]) {
        let word = uploads.place(owner, &name()).unwrap();
        let mut upload = uploads.begin(&word).await.unwrap();
        upload.write(bytes).await.unwrap();
        upload.finish().await.unwrap();
    }

    #[tokio::test]
    async fn an_upload_is_there_when_it_is_whole_and_for_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = Uploads::open(dir.path().join("uploads")).unwrap();
        let word = uploads.place(Some("k1"), &name()).unwrap();
        let mut half = uploads.begin(&word).await.unwrap();
        half.write(b"ha").await.unwrap();
        assert!(uploads.find(Some("k1"), &name()).unwrap().is_none());
        drop(half);
        upload(&uploads, Some("k1"), b"abc").await;
        let (path, sum) = uploads.find(Some("k1"), &name()).unwrap().unwrap();
        assert_eq!(fs::read(path).unwrap(), b"abc");
        assert!(sum.starts_with("ba7816bf"), "{sum}");
        assert!(uploads.find(None, &name()).unwrap().is_none());
        assert_eq!(uploads.files().unwrap().len(), 2, "nothing half is left");
        assert_eq!(uploads.prune(Duration::from_secs(60)).unwrap(), 0);
        assert_eq!(uploads.prune(Duration::ZERO).unwrap(), 3);
        assert!(uploads.files().unwrap().is_empty());
    }

    #[tokio::test]
    async fn nobody_uploads_without_a_word_or_to_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = Uploads::open(dir.path().join("uploads")).unwrap();
        assert!(matches!(uploads.begin("x").await, Err(UploadError::Closed)));
        for bad in [
            "",
            "..",
            "../../etc/passwd",
            &"g".repeat(64),
            &"a".repeat(63),
        ] {
            assert!(
                matches!(uploads.place(None, bad), Err(UploadError::Name(_))),
                "{bad}"
            );
        }
    }
}

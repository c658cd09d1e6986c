//! Store of files that clients upload for builds, until they are pruned.

use data_encoding::HEXLOWER;
use jiffy_host::{OwnerQuota, QuotaPermit, QuotaRefusal, QuotaRequest};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::fs::File;
use tokio::io::AsyncWriteExt;

/// Lifetime of an upload ticket.
const TICKET_LIFETIME: Duration = Duration::from_secs(3600);
/// Maximum number of tickets, of all owners and of one key.
const MAX_TICKETS: usize = 10_000;
const MAX_TICKETS_PER_KEY: usize = 1_000;
/// Maximum number of concurrent uploads of one key.
const MAX_INCOMING_PER_KEY: usize = 16;
/// Quota in bytes that is reserved at a time during an upload.
const RESERVATION_BYTES: u64 = 4 << 20;
/// Block size of the file system in bytes, which is what a small file is charged for.
const BLOCK_BYTES: u64 = 4096;
/// Maximum size of an upload in bytes.
pub const MAX_UPLOAD_BYTES: u64 = 8 << 30;
/// Prefix of the name of a key's directory.
const KEY_DIRECTORY_PREFIX: &str = "key-";
/// Prefix of the names of unfinished files.
const UNFINISHED_PREFIX: &str = ".new-";

/// Error of an upload.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// Invalid name.
    #[error("`{0}` is not the hash of files: send the SHA-256 in hexadecimal")]
    Name(String),
    /// Unknown or expired ticket.
    #[error("this upload link does not exist any more: request another")]
    Closed,
    /// Too many tickets.
    #[error("{0} uploads are open already: finish some, or wait an hour")]
    TooMany(usize),
    /// Too many concurrent uploads.
    #[error("{MAX_INCOMING_PER_KEY} uploads of this key come in already: wait for one to end")]
    TooManyAtOnce,
    /// The owner's quota is exhausted.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// Upload too large.
    #[error("the upload is larger than {} GiB: leave out what is not needed with a .dockerignore", MAX_UPLOAD_BYTES >> 30)]
    TooLarge,
    /// Error of the file system.
    #[error("cannot keep the upload: {0}; look for room on the disk of the data directory")]
    File(#[from] io::Error),
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] jiffy_engine::IdentityError),
}

/// Uploads by owner and name.
pub struct UploadStore {
    directory: PathBuf,
    open: Mutex<HashMap<String, UploadTicket>>,
    /// Number and bytes of uploads by owner; updated together with the files.
    kept: Arc<Mutex<HashMap<Owner, (u64, u64)>>>,
    /// Number of running uploads by owner.
    incoming: Arc<Mutex<HashMap<Owner, usize>>>,
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
}

/// API key; none: the host's owner.
type Owner = Option<String>;

/// Permission to upload one file.
#[derive(Clone)]
struct UploadTicket {
    path: PathBuf,
    owner: Owner,
    since: Instant,
}

/// Permit for a running upload, released on drop.
struct UploadPermit {
    owner: Owner,
    incoming: Arc<Mutex<HashMap<Owner, usize>>>,
}

impl Drop for UploadPermit {
    fn drop(&mut self) {
        let mut incoming = self.incoming.lock();
        if let Some(count) = incoming.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                incoming.remove(&self.owner);
            }
        }
    }
}

/// Bytes that a file is charged for: whole blocks, at least one.
fn charged(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(BLOCK_BYTES)
}

/// A running upload. Dropped before it is finished, it leaves nothing.
pub struct IncomingUpload {
    file: File,
    hash: Sha256,
    bytes: u64,
    /// Bytes reserved in the owner's quota.
    reserved: u64,
    permit: QuotaPermit,
    kept: Arc<Mutex<HashMap<Owner, (u64, u64)>>>,
    incoming: UploadPermit,
    /// Removed on drop.
    unfinished: TemporaryFile,
    target: PathBuf,
}

struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl IncomingUpload {
    /// Key that owns the upload; none: the host's owner.
    pub fn owner(&self) -> Option<&str> {
        let directory = self.target.parent()?.file_name()?;
        directory.to_str()?.strip_prefix("key-")
    }
}

impl UploadStore {
    /// Opens the store in `directory` and removes unfinished files.
    pub fn open(directory: PathBuf) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)?;
        let this = Self {
            directory,
            open: Mutex::default(),
            kept: Arc::default(),
            incoming: Arc::default(),
            quota: Mutex::default(),
        };
        for file in this.files()? {
            if name_starts_with(&file, UNFINISHED_PREFIX) {
                fs::remove_file(file)?;
            } else if file.extension().is_none() {
                let bytes = charged(fs::metadata(&file)?.len());
                let mut kept = this.kept.lock();
                let of_owner = kept.entry(owner_of(&file)).or_default();
                *of_owner = (of_owner.0 + 1, of_owner.1 + bytes);
            }
        }
        Ok(this)
    }

    /// Applies quotas of owners from now on.
    pub(super) fn limit_owners(&self, quota: Arc<dyn OwnerQuota>) {
        *self.quota.lock() = Some(quota);
    }

    /// Number and bytes of the uploads of a key.
    pub(super) fn usage_of(&self, owner: &str) -> (u64, u64) {
        let kept = self.kept.lock();
        kept.get(&Some(owner.to_owned()))
            .copied()
            .unwrap_or_default()
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

    /// Path of the upload with this name.
    fn path(&self, owner: Option<&str>, name: &str) -> Result<PathBuf, UploadError> {
        let hexadecimal = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if !hexadecimal {
            let shown = name.chars().filter(|c| !c.is_control()).take(80).collect();
            return Err(UploadError::Name(shown));
        }
        // Ids of keys are letters and digits.
        let owner = owner.map_or_else(
            || "host".to_owned(),
            |id| format!("{KEY_DIRECTORY_PREFIX}{id}"),
        );
        Ok(self.directory.join(owner).join(name.to_ascii_lowercase()))
    }

    /// Path of an upload and the SHA-256 of its bytes; none if it does not exist. Counts as a use.
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
        // The modification time is that of the last use.
        let now = fs::FileTimes::new().set_modified(SystemTime::now());
        if let Ok(file) = fs::File::options().append(true).open(&path) {
            let _ = file.set_times(now);
        }
        Ok(Some((path, sum)))
    }

    /// Creates a ticket for an upload and returns its token, which is valid for an hour.
    pub fn create_ticket(&self, owner: Option<&str>, name: &str) -> Result<String, UploadError> {
        let path = self.path(owner, name)?;
        let token = jiffy_engine::new_token()?;
        let owner: Owner = owner.map(str::to_owned);
        let mut open = self.open.lock();
        open.retain(|_, ticket| ticket.since.elapsed() < TICKET_LIFETIME);
        if open.len() >= MAX_TICKETS {
            return Err(UploadError::TooMany(MAX_TICKETS));
        }
        let own = open.values().filter(|ticket| ticket.owner == owner);
        if owner.is_some() && own.count() >= MAX_TICKETS_PER_KEY {
            return Err(UploadError::TooMany(MAX_TICKETS_PER_KEY));
        }
        let since = Instant::now();
        open.insert(token.clone(), UploadTicket { path, owner, since });
        Ok(token)
    }

    /// Starts the upload of a ticket.
    pub async fn begin(&self, token: &str) -> Result<IncomingUpload, UploadError> {
        let ticket = {
            let open = self.open.lock();
            let ticket = open.get(token);
            let ticket = ticket.filter(|ticket| ticket.since.elapsed() < TICKET_LIFETIME);
            ticket.cloned().ok_or(UploadError::Closed)?
        };
        let incoming = self.acquire_permit(&ticket.owner)?;
        let quota = self.quota.lock().clone();
        let permit = match (&ticket.owner, quota) {
            (Some(owner), Some(quota)) => quota.try_reserve(owner, QuotaRequest::default())?,
            _ => QuotaPermit::unlimited(),
        };
        let target = ticket.path;
        let owner = target.parent().unwrap_or(&self.directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(owner)?;
        let new = owner.join(format!("{UNFINISHED_PREFIX}{}", jiffy_engine::new_id()?));
        let file = File::options()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&new)
            .await?;
        Ok(IncomingUpload {
            file,
            hash: Sha256::new(),
            bytes: 0,
            reserved: 0,
            permit,
            kept: self.kept.clone(),
            incoming,
            unfinished: TemporaryFile(new),
            target,
        })
    }

    fn acquire_permit(&self, owner: &Owner) -> Result<UploadPermit, UploadError> {
        let mut incoming = self.incoming.lock();
        let count = incoming.entry(owner.clone()).or_default();
        if owner.is_some() && *count >= MAX_INCOMING_PER_KEY {
            return Err(UploadError::TooManyAtOnce);
        }
        *count += 1;
        Ok(UploadPermit {
            owner: owner.clone(),
            incoming: self.incoming.clone(),
        })
    }

    /// Removes uploads of one owner, or of all, that were not used for this long; returns their
    /// bytes.
    pub fn prune(&self, unused_for: Duration, of: Option<&str>) -> io::Result<u64> {
        self.prune_or_count(unused_for, of, true)
    }

    /// Bytes that [`Self::prune`] would free.
    pub fn prunable(&self, unused_for: Duration, of: Option<&str>) -> io::Result<u64> {
        self.prune_or_count(unused_for, of, false)
    }

    fn prune_or_count(
        &self,
        unused_for: Duration,
        of: Option<&str>,
        remove: bool,
    ) -> io::Result<u64> {
        let mut freed = 0;
        for path in self.files()? {
            let owner = owner_of(&path);
            if of.is_some() && owner.as_deref() != of {
                continue;
            }
            // Checksum files are removed with their uploads, so they may be missing.
            if path.extension().is_some() || name_starts_with(&path, UNFINISHED_PREFIX) {
                continue;
            }
            let metadata = match fs::metadata(&path) {
                // Removed meanwhile by another call.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            let age = metadata.modified()?.elapsed().unwrap_or_default();
            if age >= unused_for && !remove {
                freed += metadata.len();
            } else if age >= unused_for {
                // An upload without its checksum file does not exist.
                let mut kept = self.kept.lock();
                let _ = fs::remove_file(path.with_extension("sum"));
                fs::remove_file(&path)?;
                uncount(&mut kept, &owner, metadata.len());
                freed += metadata.len();
            }
        }
        Ok(freed)
    }
}

/// Owner of a file, from its directory.
fn owner_of(path: &Path) -> Owner {
    let directory = path.parent()?.file_name()?.to_str()?;
    directory
        .strip_prefix(KEY_DIRECTORY_PREFIX)
        .map(str::to_owned)
}

/// Subtracts a removed upload from its owner's usage.
fn uncount(kept: &mut HashMap<Owner, (u64, u64)>, owner: &Owner, bytes: u64) {
    if let Some((count, sum)) = kept.get_mut(owner) {
        *count = count.saturating_sub(1);
        *sum = sum.saturating_sub(charged(bytes));
        if *count == 0 {
            kept.remove(owner);
        }
    }
}

fn name_starts_with(path: &Path, beginning: &str) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy());
    name.is_some_and(|n| n.starts_with(beginning))
}

impl IncomingUpload {
    /// Appends bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), UploadError> {
        self.bytes += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if self.bytes > MAX_UPLOAD_BYTES {
            return Err(UploadError::TooLarge);
        }
        self.reserve()?;
        self.hash.update(bytes);
        Ok(self.file.write_all(bytes).await?)
    }

    /// Reserves quota for the received bytes, in larger amounts while the quota allows it.
    fn reserve(&mut self) -> Result<(), UploadError> {
        let needed = charged(self.bytes);
        if needed <= self.reserved {
            return Ok(());
        }
        let more = needed - self.reserved;
        let ahead = more.max(RESERVATION_BYTES);
        let reserved = match self.permit.grow(ahead) {
            Ok(()) => ahead,
            // The rest of a quota can be used up.
            Err(_) => self.permit.grow(more).map(|()| more)?,
        };
        self.reserved += reserved;
        Ok(())
    }

    /// Completes the upload.
    pub async fn finish(mut self) -> Result<(), UploadError> {
        self.reserve()?;
        self.file.flush().await?;
        self.file.sync_data().await?;
        let sum = HEXLOWER.encode(&self.hash.finalize());
        let sums = self.target.with_extension("sum");
        {
            // The permit is released after the upload is counted.
            let mut kept = self.kept.lock();
            let before = fs::metadata(&self.target).map(|m| m.len());
            // Removed while the bytes change, so that a checksum never belongs to other bytes.
            let _ = fs::remove_file(&sums);
            fs::rename(&self.unfinished.0, &self.target)?;
            let owner = &self.incoming.owner;
            if let Ok(bytes) = before {
                uncount(&mut kept, owner, bytes);
            }
            let of_owner = kept.entry(owner.clone()).or_default();
            *of_owner = (of_owner.0 + 1, of_owner.1 + charged(self.bytes));
        }
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

    async fn upload(uploads: &UploadStore, owner: Option<&str>, bytes: &[u8]) {
        let token = uploads.create_ticket(owner, &name()).unwrap();
        let mut upload = uploads.begin(&token).await.unwrap();
        upload.write(bytes).await.unwrap();
        upload.finish().await.unwrap();
    }

    #[tokio::test]
    async fn an_upload_is_visible_when_complete_and_to_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = UploadStore::open(dir.path().join("uploads")).unwrap();
        let token = uploads.create_ticket(Some("k1"), &name()).unwrap();
        let mut half = uploads.begin(&token).await.unwrap();
        half.write(b"ha").await.unwrap();
        assert!(uploads.find(Some("k1"), &name()).unwrap().is_none());
        drop(half);
        upload(&uploads, Some("k1"), b"abc").await;
        let (path, sum) = uploads.find(Some("k1"), &name()).unwrap().unwrap();
        assert_eq!(fs::read(path).unwrap(), b"abc");
        assert!(sum.starts_with("ba7816bf"), "{sum}");
        assert!(uploads.find(None, &name()).unwrap().is_none());
        assert_eq!(uploads.files().unwrap().len(), 2, "nothing half is left");
        assert_eq!(uploads.prune(Duration::from_secs(60), None).unwrap(), 0);
        assert_eq!(uploads.prune(Duration::ZERO, None).unwrap(), 3);
        assert!(uploads.files().unwrap().is_empty());
    }

    #[tokio::test]
    async fn an_upload_needs_a_ticket_and_a_digest_as_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let uploads = UploadStore::open(dir.path().join("uploads")).unwrap();
        assert!(matches!(uploads.begin("x").await, Err(UploadError::Closed)));
        for bad in [
            "",
            "..",
            "../../etc/passwd",
            &"g".repeat(64),
            &"a".repeat(63),
        ] {
            assert!(
                matches!(uploads.create_ticket(None, bad), Err(UploadError::Name(_))),
                "{bad}"
            );
        }
    }
}

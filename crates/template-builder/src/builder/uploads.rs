//! Store of the files that clients upload for builds, by owner and name. A file consists of the
//! upload and of a checksum file. The files remain until they are pruned.
//!
//! A *ticket* is the permission to upload one file. Its *token* is part of the link of the upload.
//! A *permit* counts towards a limit until it is dropped.

mod incoming_upload;

pub use incoming_upload::IncomingUpload;

use incoming_upload::TemporaryFile;
use jiffy_sandbox_manager::{OwnerQuota, QuotaPermit, QuotaRefusal, QuotaRequest};
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

/// Lifetime of an upload ticket.
const TICKET_LIFETIME: Duration = Duration::from_secs(3600);
/// Maximum number of tickets in total.
const MAX_TICKETS: usize = 10_000;
/// Maximum number of tickets per key.
const MAX_TICKETS_PER_KEY: usize = 1_000;
/// Maximum number of concurrent uploads of one key.
const MAX_INCOMING_PER_KEY: usize = 16;
/// Number of bytes of quota that an upload reserves at a time.
const RESERVATION_BYTES: u64 = 4 << 20;
/// Block size of the file system in bytes: the minimum charge for a file.
const BLOCK_BYTES: u64 = 4096;
/// Maximum size of an upload in bytes.
pub const MAX_UPLOAD_BYTES: u64 = 8 << 30;
/// Prefix of the name of a key's directory.
const KEY_DIRECTORY_PREFIX: &str = "key-";
/// Prefix of the names of unfinished files.
const UNFINISHED_PREFIX: &str = ".new-";
/// Maximum number of characters of an invalid name in an error.
const MAX_SHOWN_CHARS: usize = 80;

/// Error of an upload.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// Invalid name.
    #[error("`{0}` is not a valid hash of files: use the SHA-256 in hexadecimal")]
    Name(String),
    /// Unknown or expired ticket.
    #[error("the upload link does not exist or has expired: request a new link")]
    Closed,
    /// Too many tickets.
    #[error(
        "too many open upload links (at most {0}): use them, or wait an hour until they expire"
    )]
    TooMany(usize),
    /// Too many concurrent uploads.
    #[error(
        "too many concurrent uploads of this key (at most {MAX_INCOMING_PER_KEY}): retry when one has finished"
    )]
    TooManyAtOnce,
    /// The owner's quota is exhausted.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// Upload too large.
    #[error("the upload is larger than {} GiB: exclude unnecessary files with .dockerignore", MAX_UPLOAD_BYTES >> 30)]
    TooLarge,
    /// The hash of the files differs from the announced one.
    #[error("the uploaded files do not have the hash `{0}`: upload the announced files")]
    Content(String),
    /// An earlier upload of this name has different content.
    #[error(
        "different files were uploaded as `{0}` after this link was created: request a new link to \
         replace them"
    )]
    Differs(String),
    /// Error of the file system.
    #[error("cannot store the upload: {0}; check the free space of the data directory")]
    File(#[from] io::Error),
    /// No random bytes.
    #[error(transparent)]
    Entropy(#[from] jiffy_engine_api::IdentityError),
}

/// Uploads by owner and name.
pub struct UploadStore {
    directory: PathBuf,
    /// Tickets by token.
    tickets: Arc<Mutex<HashMap<String, UploadTicket>>>,
    /// Number of stored uploads and their charged bytes, by owner. The lock is also held while an
    /// upload is added, replaced or removed.
    stored: Arc<Mutex<HashMap<Owner, (u64, u64)>>>,
    /// Number of uploads in flight by owner.
    incoming: Arc<Mutex<HashMap<Owner, usize>>>,
    quota: Mutex<Option<Arc<dyn OwnerQuota>>>,
}

/// API key. `None` for the host's owner.
type Owner = Option<String>;

/// Permission to upload one file.
#[derive(Clone)]
struct UploadTicket {
    path: PathBuf,
    owner: Owner,
    /// Time of the creation. The ticket expires after [`TICKET_LIFETIME`].
    since: Instant,
    naming: UploadNaming,
    /// True if the upload may replace an upload with different content. Set if an upload existed
    /// when the ticket was created. Cleared by the first such replacement.
    replaces: bool,
}

/// Relation between the name of an upload and its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadNaming {
    /// The client computed the name by a method of its own, as E2B's clients do.
    OfClient,
    /// The name is the archive's name ([`jiffy_build_spec::context::archive_name`]), which the
    /// server verifies against the content.
    OfArchive,
}

/// Suffix in the checksum file of an upload whose name was verified.
const VERIFIED_MARK: &str = " verified";

/// A stored upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundUpload {
    /// Path of the file.
    pub path: PathBuf,
    /// SHA-256 of its bytes.
    pub sum: String,
    /// True if the name was verified against the content.
    pub is_verified: bool,
}

/// Permit for an upload in flight, released on drop.
struct UploadPermit {
    owner: Owner,
    /// Number of uploads in flight, by owner.
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

/// Returns the bytes that a file is charged for: whole blocks, at least one.
fn charged_bytes(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(BLOCK_BYTES)
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
            tickets: Arc::default(),
            stored: Arc::default(),
            incoming: Arc::default(),
            quota: Mutex::default(),
        };
        // Uploads have no extension; checksum files have the extension `sum`.
        for file in this.files()? {
            if name_starts_with(&file, UNFINISHED_PREFIX) {
                fs::remove_file(file)?;
            } else if file.extension().is_none() {
                let bytes = charged_bytes(fs::metadata(&file)?.len());
                let mut stored = this.stored.lock();
                let of_owner = stored.entry(owner_of(&file)).or_default();
                *of_owner = (of_owner.0 + 1, of_owner.1 + bytes);
            }
        }
        Ok(this)
    }

    /// Applies quotas of owners from now on.
    pub(super) fn limit_owners(&self, quota: Arc<dyn OwnerQuota>) {
        *self.quota.lock() = Some(quota);
    }

    /// Returns the number and bytes of the uploads of a key.
    pub(super) fn usage_of(&self, owner: &str) -> (u64, u64) {
        let stored = self.stored.lock();
        stored
            .get(&Some(owner.to_owned()))
            .copied()
            .unwrap_or_default()
    }

    /// Returns the files of all owners, including checksum files and unfinished files.
    fn files(&self) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for owner in fs::read_dir(&self.directory)? {
            for file in fs::read_dir(owner?.path())? {
                files.push(file?.path());
            }
        }
        Ok(files)
    }

    /// Returns the path of the upload with this name.
    fn path(&self, owner: Option<&str>, name: &str) -> Result<PathBuf, UploadError> {
        let hexadecimal = name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit());
        if !hexadecimal {
            let shown = name
                .chars()
                .filter(|c| !c.is_control())
                .take(MAX_SHOWN_CHARS)
                .collect();
            return Err(UploadError::Name(shown));
        }
        // Ids of keys consist of letters and digits, so that a directory name cannot escape.
        let owner = owner.map_or_else(
            || "host".to_owned(),
            |id| format!("{KEY_DIRECTORY_PREFIX}{id}"),
        );
        Ok(self.directory.join(owner).join(name.to_ascii_lowercase()))
    }

    /// Returns an upload, or `None` if it does not exist. Counts as a use.
    pub fn find(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<FoundUpload>, UploadError> {
        let path = self.path(owner, name)?;
        let sum = match fs::read_to_string(path.with_extension("sum")) {
            Ok(sum) => sum,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let verified = sum.strip_suffix(VERIFIED_MARK);
        let digits = verified.unwrap_or(&sum);
        // Earlier versions did not sync the checksum: after a power failure, it may be empty.
        let is_sum = digits.len() == SUM_DIGITS && digits.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_sum || !path.is_file() {
            return Ok(None);
        }
        // The modification time is the time of the last use.
        let now = fs::FileTimes::new().set_modified(SystemTime::now());
        if let Ok(file) = fs::File::options().append(true).open(&path) {
            // A failure only lets the upload expire earlier.
            let _ = file.set_times(now);
        }
        Ok(Some(FoundUpload {
            path,
            is_verified: verified.is_some(),
            sum: digits.to_owned(),
        }))
    }

    /// Creates a ticket for an upload and returns its token, which is valid for an hour. If the
    /// upload exists already, the ticket permits one replacement with different content.
    pub fn create_ticket(
        &self,
        owner: Option<&str>,
        name: &str,
        naming: UploadNaming,
    ) -> Result<String, UploadError> {
        let path = self.path(owner, name)?;
        let replaces = path.exists();
        let token = jiffy_engine_api::new_token()?;
        let owner: Owner = owner.map(str::to_owned);
        let mut tickets = self.tickets.lock();
        tickets.retain(|_, ticket| ticket.since.elapsed() < TICKET_LIFETIME);
        if tickets.len() >= MAX_TICKETS {
            return Err(UploadError::TooMany(MAX_TICKETS));
        }
        let own = tickets.values().filter(|ticket| ticket.owner == owner);
        if owner.is_some() && own.count() >= MAX_TICKETS_PER_KEY {
            return Err(UploadError::TooMany(MAX_TICKETS_PER_KEY));
        }
        let since = Instant::now();
        let ticket = UploadTicket {
            path,
            owner,
            since,
            naming,
            replaces,
        };
        tickets.insert(token.clone(), ticket);
        Ok(token)
    }

    /// Starts the upload of a ticket. The ticket remains valid until it expires, so that a failed
    /// upload can be repeated.
    pub async fn begin(&self, token: &str) -> Result<IncomingUpload, UploadError> {
        let ticket = {
            let tickets = self.tickets.lock();
            let ticket = tickets.get(token);
            let ticket = ticket.filter(|ticket| ticket.since.elapsed() < TICKET_LIFETIME);
            ticket.cloned().ok_or(UploadError::Closed)?
        };
        let incoming = self.acquire_permit(&ticket.owner)?;
        // The reservation grows with the received bytes, because a client may announce any length.
        let quota = self.quota.lock().clone();
        let permit = match (&ticket.owner, quota) {
            (Some(owner), Some(quota)) => quota.try_reserve(owner, QuotaRequest::default())?,
            _ => QuotaPermit::unlimited(),
        };
        let target = ticket.path;
        let directory = target.parent().unwrap_or(&self.directory);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        // Temporary name. The file is renamed to `target` when the upload is complete.
        let new = directory.join(format!(
            "{UNFINISHED_PREFIX}{}",
            jiffy_engine_api::new_id()?
        ));
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
            stored: self.stored.clone(),
            incoming,
            unfinished: TemporaryFile(new),
            target,
            token: token.to_owned(),
            tickets: self.tickets.clone(),
            naming: ticket.naming,
        })
    }

    /// Counts an upload in flight. Fails if a key has too many. The host's owner is not limited.
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

    /// Removes uploads of one owner, or of all owners, that were unused for `unused_for`. Returns
    /// their bytes.
    pub fn prune(&self, unused_for: Duration, of: Option<&str>) -> io::Result<u64> {
        self.prune_or_count(unused_for, of, true)
    }

    /// Returns the bytes that [`Self::prune`] would free.
    pub fn prunable(&self, unused_for: Duration, of: Option<&str>) -> io::Result<u64> {
        self.prune_or_count(unused_for, of, false)
    }

    /// Removes the uploads that were not used for `unused_for`. `of` restricts the call to one
    /// owner. Returns the number of bytes. Without `remove`, only counts them.
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
            // Count uploads only: a checksum file is removed together with its upload, and an
            // unfinished file by the upload in flight.
            if path.extension().is_some() || name_starts_with(&path, UNFINISHED_PREFIX) {
                continue;
            }
            // The lock ensures that an upload that completes now is not removed because of the age
            // of the upload that it replaces.
            let mut stored = self.stored.lock();
            let metadata = match fs::metadata(&path) {
                // The list of files is stale: another call has removed the upload.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            // A modification time in the future counts as a recent use.
            let age = metadata.modified()?.elapsed().unwrap_or_default();
            if age >= unused_for && !remove {
                freed += metadata.len();
            } else if age >= unused_for {
                // The checksum file is removed first: an upload without it does not exist.
                let _ = fs::remove_file(path.with_extension("sum"));
                fs::remove_file(&path)?;
                uncount(&mut stored, &owner, metadata.len());
                freed += metadata.len();
            }
        }
        Ok(freed)
    }
}

/// Number of hexadecimal digits of a checksum.
const SUM_DIGITS: usize = 64;

/// Returns the owner of a file, from its directory.
fn owner_of(path: &Path) -> Owner {
    let directory = path.parent()?.file_name()?.to_str()?;
    directory
        .strip_prefix(KEY_DIRECTORY_PREFIX)
        .map(str::to_owned)
}

/// Subtracts a removed upload from its owner's usage.
fn uncount(stored: &mut HashMap<Owner, (u64, u64)>, owner: &Owner, bytes: u64) {
    if let Some((count, sum)) = stored.get_mut(owner) {
        *count = count.saturating_sub(1);
        *sum = sum.saturating_sub(charged_bytes(bytes));
        if *count == 0 {
            stored.remove(owner);
        }
    }
}

fn name_starts_with(path: &Path, beginning: &str) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy());
    name.is_some_and(|n| n.starts_with(beginning))
}

#[cfg(test)]
mod tests;

//! Upload in flight: receives the bytes of one file, reserves quota for them, and moves the
//! complete file into the store.
//!
//! A *ticket* is the permission to upload one file. The *charged* bytes of an upload are its bytes
//! in whole blocks, by which it counts towards the quota. A *permit* counts towards a limit until
//! it is dropped.

use super::{KEY_DIRECTORY_PREFIX, MAX_UPLOAD_BYTES};
use super::{
    Owner, RESERVATION_BYTES, UploadError, UploadNaming, UploadPermit, UploadTicket, VERIFIED_MARK,
    charged_bytes, uncount,
};
use data_encoding::HEXLOWER;
use jiffy_build_spec::context::archive_name;
use jiffy_sandbox_manager::QuotaPermit;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::fs::File;
use tokio::io::AsyncWriteExt;

/// An upload in flight. If it is dropped before it is finished, its file is removed.
pub struct IncomingUpload {
    pub(super) file: File,
    pub(super) hash: Sha256,
    pub(super) bytes: u64,
    /// Bytes reserved in the owner's quota.
    pub(super) reserved: u64,
    /// Reservation in the owner's quota, which grows with the received bytes.
    pub(super) permit: QuotaPermit,
    /// Number of stored uploads and their charged bytes, by owner. Shared with the
    /// [`super::UploadStore`].
    pub(super) stored: Arc<Mutex<HashMap<Owner, (u64, u64)>>>,
    /// Permit that limits the concurrent uploads of the owner.
    pub(super) incoming: UploadPermit,
    /// Removed on drop.
    pub(super) unfinished: TemporaryFile,
    /// Path of the complete upload.
    pub(super) target: PathBuf,
    /// Token of the ticket in the link of the upload.
    pub(super) token: String,
    pub(super) tickets: Arc<Mutex<HashMap<String, UploadTicket>>>,
    pub(super) naming: UploadNaming,
}

/// File that is removed when this value is dropped.
pub(super) struct TemporaryFile(pub(super) PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // The file does not exist any longer if the upload was completed.
        let _ = fs::remove_file(&self.0);
    }
}

impl IncomingUpload {
    /// Returns the key that owns the upload. `None` for the host's owner.
    pub fn owner(&self) -> Option<&str> {
        let directory = self.target.parent()?.file_name()?;
        directory.to_str()?.strip_prefix(KEY_DIRECTORY_PREFIX)
    }
}

impl IncomingUpload {
    /// Appends bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), UploadError> {
        // Check the size before the write, so that the file never exceeds the limit.
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
        let needed = charged_bytes(self.bytes);
        if needed <= self.reserved {
            return Ok(());
        }
        let more = needed - self.reserved;
        let ahead = more.max(RESERVATION_BYTES);
        let reserved = match self.permit.grow(ahead) {
            Ok(()) => ahead,
            // The exact amount still fits when the larger reservation exceeds the quota.
            Err(_) => self.permit.grow(more).map(|()| more)?,
        };
        self.reserved += reserved;
        Ok(())
    }

    /// Returns the name of the upload.
    fn name(&self) -> String {
        let name = self.target.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Checks the name of an upload with [`UploadNaming::OfArchive`]. The name is the SHA-256 of
    /// the unpacked archive with all times set to 0. This function unpacks the received file,
    /// computes the hash ([`archive_name`]) and compares it with the name.
    ///
    /// Other names are not checked, because the server does not know how the client computes them.
    async fn check_name(&self) -> Result<(), UploadError> {
        if self.naming == UploadNaming::OfClient {
            return Ok(());
        }
        // Reading an archive of several GiB would block the runtime.
        let path = self.unfinished.0.clone();
        let computed = tokio::task::spawn_blocking(move || {
            let file = fs::File::open(path)?;
            archive_name(io::BufReader::new(file))
        });
        match computed.await.map_err(io::Error::other)? {
            Ok(computed) if computed == self.name() => Ok(()),
            _ => Err(UploadError::Content(self.name())),
        }
    }

    /// Checks whether the upload may replace an existing upload. The caller must hold the lock of
    /// `stored`.
    fn check_replacement(&self, sums: &Path, sum: &str) -> Result<(), UploadError> {
        let before = match fs::read_to_string(sums) {
            // A power failure has emptied the checksum file, so the upload counts as missing.
            Ok(before) if before.is_empty() => return Ok(()),
            Ok(before) => before,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let verified = before.strip_suffix(VERIFIED_MARK);
        // Equal content needs no permission. A content that matches its archive name may replace
        // any content.
        if verified.unwrap_or(&before) == sum || self.naming == UploadNaming::OfArchive {
            return Ok(());
        }
        let mut tickets = self.tickets.lock();
        match tickets.get_mut(&self.token) {
            // Once per ticket, so that concurrent uploads do not replace each other repeatedly. Not
            // permitted if the name of the existing upload was verified.
            Some(ticket) if ticket.replaces && verified.is_none() => {
                ticket.replaces = false;
                Ok(())
            }
            _ => Err(UploadError::Differs(self.name())),
        }
    }

    /// Completes the upload.
    ///
    /// Fails if the content does not match the name, or differs from an earlier upload that the
    /// ticket may not replace.
    pub async fn finish(mut self) -> Result<(), UploadError> {
        // An empty upload is charged one block, which no `write` has reserved.
        self.reserve()?;
        self.file.flush().await?;
        // The content is on storage before the rename: a crash leaves no incomplete upload under
        // its name.
        self.file.sync_data().await?;
        self.check_name().await?;
        let mut sum = HEXLOWER.encode(&std::mem::take(&mut self.hash).finalize());
        let sums = self.target.with_extension("sum");
        {
            let stored = self.stored.clone();
            let mut stored = stored.lock();
            self.check_replacement(&sums, &sum)?;
            let before = fs::metadata(&self.target).map(|m| m.len());
            // Remove the checksum file while the upload changes, so that a checksum never belongs
            // to different content.
            let _ = fs::remove_file(&sums);
            fs::rename(&self.unfinished.0, &self.target)?;
            let owner = &self.incoming.owner;
            if let Ok(bytes) = before {
                uncount(&mut stored, owner, bytes);
            }
            // Count the upload before `self.permit` is dropped at the end of this function, so
            // that the owner's usage always includes the bytes.
            let of_owner = stored.entry(owner.clone()).or_default();
            *of_owner = (of_owner.0 + 1, of_owner.1 + charged_bytes(self.bytes));
        }
        if self.naming == UploadNaming::OfArchive {
            sum += VERIFIED_MARK;
        }
        // Write the checksum file last and atomically: an upload without one does not exist.
        let new = self.unfinished.0.with_extension("sum");
        let mut file = File::create(&new).await?;
        file.write_all(sum.as_bytes()).await?;
        // The checksum is on storage before the rename, like the upload.
        file.sync_data().await?;
        Ok(fs::rename(&new, &sums)?)
    }
}

//! Module that a client is uploading for a deployment. Its size is checked while it is received.
//!
//! A *permit* counts towards a limit until it is dropped. The *world* of a module is the interface
//! between the module and its host.

use crate::deploy_step::{DeployStep, reached};
use crate::disk_quota::DeployQuota;
use crate::function_error::FunctionError;
use crate::module_digest::ModuleDigest;
use jiffy_proto::function::MAX_MODULE_BYTES;
use std::io::Write;
use std::path::Path;
use tempfile::NamedTempFile;
use tokio::sync::OwnedSemaphorePermit;

/// Module that is being received. Its file is removed when this value is dropped.
#[derive(Debug)]
pub struct ModuleUpload {
    pub(crate) file: NamedTempFile,
    hasher: blake3::Hasher,
    bytes: u64,
    /// First bytes, from which the world is detected.
    pub(crate) head: Vec<u8>,
    /// Quota from which space is reserved before each write.
    pub(crate) quota: DeployQuota,
    /// Permit for one of the owner's uploads.
    _permit: Option<OwnedSemaphorePermit>,
}

impl ModuleUpload {
    /// Creates an empty file in `directory`. `permit` is a permit for one of the owner's uploads.
    pub(crate) fn new(
        directory: &Path,
        quota: DeployQuota,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<Self, FunctionError> {
        let file = NamedTempFile::new_in(directory).map_err(FunctionError::file(directory))?;
        Ok(Self {
            file,
            hasher: blake3::Hasher::new(),
            bytes: 0,
            head: Vec::new(),
            quota,
            _permit: permit,
        })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FunctionError> {
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.bytes = self.bytes.saturating_add(length);
        if self.bytes > MAX_MODULE_BYTES {
            return Err(FunctionError::TooLarge);
        }
        self.quota
            .grow(length)
            .map_err(FunctionError::QuotaExceeded)?;
        // `World::detect` needs the first 8 bytes.
        if self.head.len() < 8 {
            self.head.extend(bytes.iter().take(8 - self.head.len()));
        }
        self.hasher.update(bytes);
        let path = self.file.path().to_owned();
        self.file
            .write_all(bytes)
            .map_err(FunctionError::file(&path))?;
        reached(DeployStep::Receive);
        Ok(())
    }

    /// Returns the number of bytes so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the digest of the bytes so far.
    pub(crate) fn digest(&self) -> ModuleDigest {
        self.hasher.finalize().into()
    }
}

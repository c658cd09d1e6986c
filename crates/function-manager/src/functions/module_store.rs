//! Modules in the shared store: uploaded after deployments, and fetched by digest for deployments.

use super::{Functions, Owner, Shared};
use crate::blocking::blocking;
use crate::disk_quota::DeployQuota;
use crate::function_error::FunctionError;
use crate::module_digest::ModuleDigest;
use crate::module_queue::ModuleQueue;
use crate::module_upload::ModuleUpload;
use jiffy_proto::function::MAX_MODULE_BYTES;
use jiffy_store::host::{RemoteError, RemoteStore, StoredModules};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Weak};
use tokio::task::JoinSet;

/// Number of bytes copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Shared store of a host's modules, and the queue of owners to synchronise.
#[derive(Debug)]
pub(super) struct ModuleStore {
    modules: StoredModules,
    queue: Arc<ModuleQueue>,
}

/// Module of an owner, opened by its digest.
#[derive(Debug)]
pub struct LocatedModule {
    digest: ModuleDigest,
    file: File,
    bytes: u64,
}

impl LocatedModule {
    /// Creates the value for an open module file with this digest.
    fn new(digest: ModuleDigest, file: File) -> Result<Self, FunctionError> {
        let metadata = file
            .metadata()
            .map_err(FunctionError::file(Path::new("a module")))?;
        Ok(Self {
            digest,
            file,
            bytes: metadata.len(),
        })
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for ModuleStore {
    fn drop(&mut self) {
        // This call wakes the synchronisation task, which then exits.
        self.queue.changed.notify_one();
    }
}

impl Owner {
    /// Returns the digests of the modules of all versions.
    fn needed_modules(&self) -> HashSet<String> {
        let records = self.states().into_iter().map(|state| state.record());
        let digests = records.flat_map(|record| {
            let versions = record.versions.iter();
            versions.map(|v| v.module.clone()).collect::<Vec<_>>()
        });
        digests.collect()
    }
}

impl Functions {
    /// Starts to synchronise modules with a store, including existing modules. Must be called once,
    /// inside a tokio runtime. Blocks.
    pub fn share_modules(&self, remote: Arc<RemoteStore>) -> Result<(), RemoteError> {
        let modules = StoredModules::open(remote)?;
        let store = self.0.store.get_or_init(|| ModuleStore {
            modules,
            queue: Arc::default(),
        });
        let keys = self.owners().into_iter().map(|owner| owner.key.clone());
        for key in keys.chain(store.modules.owners()) {
            store.queue.add(key);
        }
        tokio::spawn(run_sync(Arc::downgrade(&self.0)));
        Ok(())
    }

    /// Returns whether the store has a module of an owner. `None` if this host has no shared store.
    #[must_use]
    pub fn is_stored(&self, key: Option<&str>, digest: &str) -> Option<bool> {
        let store = self.0.store.get()?;
        Some(store.modules.is_stored(key, digest))
    }

    /// Queues an owner's modules for synchronisation after a change of its functions. A deployed
    /// module is uploaded again, which repairs a damaged copy in the store.
    pub(super) fn enqueue_sync(&self, key: Option<&str>, deployed: Option<&str>) {
        if let Some(store) = self.0.store.get() {
            if let Some(digest) = deployed {
                // The module is marked as missing, so that the next synchronisation uploads the
                // module again.
                store.modules.doubt(key, digest);
            }
            store.queue.add(key.map(str::to_owned));
        }
    }

    /// Finds a module of an owner for a deployment, on this host or in the store. Modules of other
    /// owners are not returned. A fetched module occupies the host's cache, not the owner's quota.
    pub async fn find_module(
        &self,
        key: Option<&str>,
        digest: ModuleDigest,
    ) -> Result<LocatedModule, FunctionError> {
        if !self.is_installed() {
            return Err(FunctionError::NotInstalled);
        }
        let digits = digest.digits();
        // The empty name is never shown: it only belongs to the error, which is discarded.
        if let Ok(owner) = self.existing_owner(key, "") {
            let (path, expected) = (owner.store.module(&digits), digits.clone());
            match tokio::task::spawn_blocking(move || open(&path, &expected)).await {
                Ok(Ok(file)) => return LocatedModule::new(digest, file),
                Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => {}
                // A file that is damaged or cannot be read is fetched from the store instead.
                Ok(Err(e)) => tracing::error!(%digest, error = %e, "cannot read a module"),
                Err(e) => tracing::error!(%digest, error = %e, "cannot read a module"),
            }
        }
        let unknown = || FunctionError::NoModule(digest);
        let store = self.0.store.get().ok_or_else(unknown)?;
        let fetching = store.modules.fetch(key, &digits, MAX_MODULE_BYTES);
        let file = fetching.await.map_err(|e| fetch_error(digest, e))?;
        LocatedModule::new(digest, file.ok_or_else(unknown)?)
    }

    /// Copies a module for a deployment. Reserves its bytes and machine code in `quota`.
    pub async fn copy_module(
        &self,
        key: Option<&str>,
        module: LocatedModule,
        quota: DeployQuota,
    ) -> Result<ModuleUpload, FunctionError> {
        let upload = self.upload_of(key, quota).await?;
        let LocatedModule { digest, file, .. } = module;
        // The digest of the copy is checked, because the located file may change meanwhile.
        let upload = blocking(move || copy(&file, upload)).await?;
        if upload.digest() == digest {
            Ok(upload)
        } else {
            tracing::error!(%digest, "the content of a module in the store does not match its digest");
            Err(FunctionError::ModuleDamaged(digest))
        }
    }

    /// Uploads the modules that an owner's functions reference, and releases all others.
    async fn sync_owner(&self, store: &ModuleStore, key: Option<&str>) -> Result<(), RemoteError> {
        // The name only belongs to the error, which is discarded.
        let owner = self.existing_owner(key, "").ok();
        let needed = || owner.as_ref().map(|owner| owner.needed_modules());
        let mut failure = None;
        // Release first, which frees space for the uploads.
        let mut unneeded = store.modules.digests(key);
        if let Some(needed) = needed() {
            unneeded.retain(|digest| !needed.contains(digest));
        }
        for digest in unneeded {
            // Mark the module as missing before it is released: if a deployment needs the module
            // again, the loop below or the next synchronisation uploads it.
            store.modules.doubt(key, &digest);
            // The need is checked again after the mark: a deployment may have added the module
            // since.
            if needed().is_none_or(|needed| !needed.contains(&digest)) {
                retain_first(&mut failure, store.modules.release(key, &digest).await)?;
            }
        }
        let Some(owner) = &owner else {
            return failure.map_or(Ok(()), Err);
        };
        for digest in owner.needed_modules() {
            if store.modules.is_stored(key, &digest) {
                continue;
            }
            let path = owner.store.module(&digest);
            let expected = digest.clone();
            let opening = tokio::task::spawn_blocking(move || open(&path, &expected));
            let opened = opening.await.map_err(io::Error::other);
            let file = match opened.and_then(|opened| opened) {
                Ok(file) => file,
                // The function was removed meanwhile.
                Err(_) if !owner.needed_modules().contains(&digest) => continue,
                Err(source) => {
                    let path = owner.store.module(&digest);
                    retain_first(&mut failure, Err(RemoteError::Io { path, source }))?;
                    continue;
                }
            };
            let result = store.modules.store(key, &digest, file).await;
            retain_first(&mut failure, result.map(drop))?;
        }
        failure.map_or(Ok(()), Err)
    }
}

/// Retains the first failure, so that the remaining modules of the owner are still processed.
/// Returns a failure of the whole store at once, because the remaining modules would fail as well.
fn retain_first(
    failure: &mut Option<RemoteError>,
    result: Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    match result {
        // The error has a retry delay if the whole store is unavailable.
        Err(e) if e.retry_after().is_some() => return Err(e),
        Err(e) => drop(failure.get_or_insert(e)),
        Ok(()) => {}
    }
    Ok(())
}

/// Opens the file of a module, and verifies its digest. The position of the returned file is at its
/// end: callers must read at explicit offsets.
fn open(path: &Path, digest: &str) -> io::Result<File> {
    let file = File::open(path)?;
    // The file may be damaged on disk: it must not replace a correct copy in the store.
    let hash = blake3::Hasher::new().update_reader(&file)?.finalize();
    if *hash.to_hex() == *digest {
        Ok(file)
    } else {
        Err(io::Error::other("the module is damaged; deploy it again"))
    }
}

/// Copies a file, limited by the maximum size of a module.
fn copy(file: &File, mut to: ModuleUpload) -> Result<ModuleUpload, FunctionError> {
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let read = file.read_at(&mut buffer, to.bytes());
        match read.map_err(FunctionError::file(Path::new("a module")))? {
            0 => return Ok(to),
            count => to.write(buffer.get(..count).unwrap_or_default())?,
        }
    }
}

/// Maps a failure of the store to the error for the owner. The details are only logged.
fn fetch_error(digest: ModuleDigest, error: RemoteError) -> FunctionError {
    tracing::warn!(%digest, %error, "cannot fetch a module");
    match error.retry_after() {
        Some(after) => FunctionError::StoreUnavailable(after),
        None if error.is_damage() => FunctionError::ModuleDamaged(digest),
        None => FunctionError::Store,
    }
}

/// Synchronises the queued owners until the functions are dropped.
async fn run_sync(shared: Weak<Shared>) {
    let mut running = JoinSet::new();
    loop {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let functions = Functions(shared);
        let Some(queue) = functions.0.store.get().map(|store| store.queue.clone()) else {
            return;
        };
        for key in queue.start_due() {
            let functions = functions.clone();
            running.spawn(async move {
                if let Some(store) = functions.0.store.get() {
                    let synced = functions.sync_owner(store, key.as_deref()).await;
                    let is_first = store.queue.complete(&key, synced.is_ok());
                    if let Err(e) = synced.as_ref()
                        && is_first
                    {
                        tracing::warn!(
                            error = %e, "cannot synchronise function modules with the store; retrying"
                        );
                    }
                }
            });
        }
        // Reap completed attempts, so that the set does not grow.
        while running.try_join_next().is_some() {}
        // Do not keep the functions alive while waiting.
        drop(functions);
        queue.wait().await;
    }
}

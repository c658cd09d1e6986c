//! Modules in the store that hosts share: put there behind deployments, and fetched for deployments
//! by digest.

use super::{Functions, Owner, Shared};
use crate::blocking::blocking;
use crate::disk_room::DeployRoom;
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

/// Bytes that are copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Store of a host's modules.
#[derive(Debug)]
pub(super) struct ModuleStore {
    modules: StoredModules,
    queue: Arc<ModuleQueue>,
}

/// Module that was found by its digest.
#[derive(Debug)]
pub struct FoundModule {
    digest: ModuleDigest,
    file: File,
    bytes: u64,
}

impl FoundModule {
    fn new(digest: ModuleDigest, file: File) -> Result<Self, FunctionError> {
        let metadata = file.metadata();
        let bytes = metadata.map_err(FunctionError::file(Path::new("a module")))?;
        Ok(Self {
            digest,
            file,
            bytes: bytes.len(),
        })
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for ModuleStore {
    fn drop(&mut self) {
        // For the task that waits for changes, which finds that there are no functions any more.
        self.queue.changed.notify_one();
    }
}

impl Owner {
    /// Digests of modules that functions have.
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
    /// Keeps modules in a store from now on, those that are here already among them. Once, inside a
    /// tokio runtime. Blocks.
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
        tokio::spawn(keep(Arc::downgrade(&self.0)));
        Ok(())
    }

    /// True if the store has a module of an owner, for as long as it is needed here. None if this
    /// host shares none.
    #[must_use]
    pub fn is_stored(&self, key: Option<&str>, digest: &str) -> Option<bool> {
        let store = self.0.store.get()?;
        Some(store.modules.is_stored(key, digest))
    }

    /// Has the store looked at after a change of an owner's functions. A module that was deployed
    /// is put there again, which mends it if it was found damaged.
    pub(super) fn keep_stored(&self, key: Option<&str>, deployed: Option<&str>) {
        if let Some(store) = self.0.store.get() {
            if let Some(digest) = deployed {
                store.modules.doubt(key, digest);
            }
            store.queue.add(key.map(str::to_owned));
        }
    }

    /// Finds a module of an owner for a deployment, on this host or in the store. Modules of other
    /// owners are not found. Writes nothing for the owner: the store's cache is the host's.
    pub async fn find_module(
        &self,
        key: Option<&str>,
        digest: ModuleDigest,
    ) -> Result<FoundModule, FunctionError> {
        if !self.is_installed() {
            return Err(FunctionError::NotInstalled);
        }
        let digits = digest.digits();
        if let Ok(owner) = self.existing_owner(key, "") {
            let (path, expected) = (owner.store.module(&digits), digits.clone());
            match tokio::task::spawn_blocking(move || open(&path, &expected)).await {
                Ok(Ok(file)) => return FoundModule::new(digest, file),
                Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => {}
                Ok(Err(e)) => tracing::error!(%digest, error = %e, "cannot read a module"),
                Err(e) => tracing::error!(%digest, error = %e, "cannot read a module"),
            }
        }
        let unknown = || FunctionError::NoModule(digest);
        let store = self.0.store.get().ok_or_else(unknown)?;
        let fetching = store.modules.fetch(key, &digits, MAX_MODULE_BYTES);
        let file = fetching.await.map_err(|e| refusal(digest, e))?;
        FoundModule::new(digest, file.ok_or_else(unknown)?)
    }

    /// Copies a module for a deployment. Its bytes and machine code are reserved in `room`.
    pub async fn copy_module(
        &self,
        key: Option<&str>,
        found: FoundModule,
        room: DeployRoom,
    ) -> Result<ModuleUpload, FunctionError> {
        let upload = self.upload_of(key, room).await?;
        let FoundModule { digest, file, .. } = found;
        let upload = blocking(move || copy(&file, upload)).await?;
        match upload.digest() == digest {
            true => Ok(upload),
            false => {
                tracing::error!("the store has other content under the module {digest}");
                Err(FunctionError::ModuleDamaged(digest))
            }
        }
    }

    /// Lets the store have what an owner's functions need, and no more.
    async fn keep_owner(&self, store: &ModuleStore, key: Option<&str>) -> Result<(), RemoteError> {
        let owner = self.existing_owner(key, "").ok();
        let needed = || owner.as_ref().map(|owner| owner.needed_modules());
        let mut failure = None;
        let mut held = store.modules.digests(key);
        if let Some(needed) = needed() {
            held.retain(|digest| !needed.contains(digest));
        }
        for digest in held {
            // Before another look: a function that is deployed meanwhile does not count on it.
            store.modules.doubt(key, &digest);
            if needed().is_none_or(|needed| !needed.contains(&digest)) {
                keep_first(&mut failure, store.modules.release(key, &digest).await)?;
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
                // Removed meanwhile.
                Err(_) if !owner.needed_modules().contains(&digest) => continue,
                Err(source) => {
                    let path = owner.store.module(&digest);
                    keep_first(&mut failure, Err(RemoteError::Io { path, source }))?;
                    continue;
                }
            };
            let stored = store.modules.store(key, &digest, file).await;
            keep_first(&mut failure, stored.map(drop))?;
        }
        failure.map_or(Ok(()), Err)
    }
}

/// Keeps the first failure, with which the others of an owner go on. One of the store as a whole
/// is returned: they would wait for it, too.
fn keep_first(
    failure: &mut Option<RemoteError>,
    done: Result<(), RemoteError>,
) -> Result<(), RemoteError> {
    match done {
        Err(e) if e.retry_after().is_some() => return Err(e),
        Err(e) => drop(failure.get_or_insert(e)),
        Ok(()) => {}
    }
    Ok(())
}

/// Opens the file of a module, which must be the one that its name says.
fn open(path: &Path, digest: &str) -> io::Result<File> {
    let file = File::open(path)?;
    let hash = blake3::Hasher::new().update_reader(&file)?.finalize();
    match *hash.to_hex() == *digest {
        true => Ok(file),
        false => Err(io::Error::other("the module is damaged; deploy it again")),
    }
}

/// Copies a file of bounded length.
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

/// As much as the owner needs to know of a failure of the store.
fn refusal(digest: ModuleDigest, error: RemoteError) -> FunctionError {
    tracing::warn!("the module {digest} cannot be fetched: {error}");
    match error.retry_after() {
        Some(after) => FunctionError::StoreUnavailable(after),
        None if error.is_damage() => FunctionError::ModuleDamaged(digest),
        None => FunctionError::Store,
    }
}

/// Works off the queue until the functions are dropped.
async fn keep(shared: Weak<Shared>) {
    let mut running = JoinSet::new();
    loop {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let functions = Functions(shared);
        let Some(queue) = functions.0.store.get().map(|store| store.queue.clone()) else {
            return;
        };
        for key in queue.begin() {
            let functions = functions.clone();
            running.spawn(async move {
                if let Some(store) = functions.0.store.get() {
                    let kept = functions.keep_owner(store, key.as_deref()).await;
                    let is_first = store.queue.end(&key, kept.is_ok());
                    if let Err(e) = kept.as_ref()
                        && is_first
                    {
                        tracing::warn!("modules of functions wait for the store: {e}");
                    }
                }
            });
        }
        while running.try_join_next().is_some() {}
        drop(functions);
        queue.wait().await;
    }
}

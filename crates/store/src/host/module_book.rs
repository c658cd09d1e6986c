//! Local record of the modules that this host holds in the store: `<home>/store/modules`.
//!
//! A *module* is the WebAssembly program of a function. A host *holds* a module while a function of
//! this host needs it. Garbage collection removes modules that no host holds. A *tenant* is an
//! owner of snapshots in the store, usually an API key. The objects of a tenant are encrypted with
//! its keys. The *root* of a snapshot is the hash that identifies it in the store.
//!
//! ```text
//! host                        random id of this data directory
//! <tenant>/<digest>.json      a module; written before the module is pushed
//! ```

use crate::Hash;
use crate::host::fetch_grants::hash;
use crate::host::{RemoteError, RemoteStore};
use data_encoding::HEXLOWER;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Module that is in the store or being pushed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeldModule {
    /// URL of the store.
    pub store: String,
    /// Tenant.
    pub tenant: String,
    /// BLAKE3 hash of its content in hexadecimal.
    pub digest: String,
    /// Root of its snapshot in the store.
    #[serde(with = "hash")]
    pub root: Hash,
    /// Creation time in its manifest. A different time results in a different root.
    pub created_ms: u64,
    /// True if the module is complete in the store and held by this host.
    pub stored: bool,
}

/// Modules by tenant and digest.
type Held = BTreeMap<String, BTreeMap<String, HeldModule>>;

/// Local record of the modules that this host holds in the store.
#[derive(Debug)]
pub(crate) struct ModuleBook {
    directory: PathBuf,
    /// Id of this data directory.
    pub host: String,
    held: Mutex<Held>,
}

impl ModuleBook {
    /// Reads the record. Discards modules that were held in another store. Blocks.
    pub(crate) fn open(remote: &RemoteStore) -> Result<Self, RemoteError> {
        let directory = remote.module_book_path().to_owned();
        fs::create_dir_all(&directory).map_err(RemoteError::io(&directory))?;
        let host = host_id(&directory.join("host"))?;
        let mut held = Held::new();
        for tenant in fs::read_dir(&directory).into_iter().flatten().flatten() {
            // Skips the file `host`, which is not a directory.
            for entry in fs::read_dir(tenant.path()).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.extension() != Some("json".as_ref()) {
                    // Incomplete file of an interrupted write.
                    let _ = fs::remove_file(&path);
                    continue;
                }
                let read = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
                let module: HeldModule = match read {
                    Ok(module) => module,
                    Err(e) => {
                        // The module is stored again when it is needed.
                        tracing::warn!(path = %path.display(), error = %e, "discarded the record of a stored module");
                        let _ = fs::remove_file(&path);
                        continue;
                    }
                };
                if module.store == remote.url() {
                    insert(&mut held, module)
                } else {
                    drop(fs::remove_file(&path))
                }
            }
        }
        Ok(Self {
            directory,
            host,
            held: Mutex::new(held),
        })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock()
    }

    fn path(&self, tenant: &str, digest: &str) -> PathBuf {
        let tenant = HEXLOWER.encode(tenant.as_bytes());
        self.directory.join(tenant).join(format!("{digest}.json"))
    }

    pub(crate) fn find(&self, tenant: &str, digest: &str) -> Option<HeldModule> {
        self.held().get(tenant)?.get(digest).cloned()
    }

    /// Returns the tenants that have modules.
    pub(crate) fn tenants(&self) -> Vec<String> {
        self.held().keys().cloned().collect()
    }

    /// Returns the digests of a tenant's modules.
    pub(crate) fn digests(&self, tenant: &str) -> Vec<String> {
        let held = self.held();
        let modules = held.get(tenant).into_iter().flatten();
        modules.map(|(digest, _)| digest.clone()).collect()
    }

    /// Marks a module as not stored until [`Self::write`]. Changes only the memory of this process:
    /// a restarted daemon counts the module as stored again.
    pub(crate) fn doubt(&self, tenant: &str, digest: &str) {
        let mut held = self.held();
        let module = held.get_mut(tenant).and_then(|all| all.get_mut(digest));
        if let Some(module) = module {
            module.stored = false;
        }
    }

    /// Writes the record of a module. Blocks briefly.
    pub(crate) fn write(&self, module: HeldModule) -> Result<(), RemoteError> {
        let path = self.path(&module.tenant, &module.digest);
        let new = path.with_extension("new");
        let write = || -> io::Result<()> {
            fs::create_dir_all(path.parent().unwrap_or(&path))?;
            fs::write(&new, serde_json::to_vec(&module)?)?;
            fs::rename(&new, &path)
        };
        write().map_err(RemoteError::io(&path))?;
        // Update the map after the file, so that a failed write changes neither.
        insert(&mut self.held(), module);
        Ok(())
    }

    /// Removes the record of a module after its removal from the store.
    pub(crate) fn forget(&self, tenant: &str, digest: &str) -> Result<(), RemoteError> {
        let path = self.path(tenant, digest);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(RemoteError::io(&path)(e)),
            _ => {}
        }
        let mut held = self.held();
        if let Some(modules) = held.get_mut(tenant) {
            modules.remove(digest);
            if modules.is_empty() {
                held.remove(tenant);
                // The removal fails, as intended, if the record of another module was written
                // concurrently.
                let _ = fs::remove_dir(path.parent().unwrap_or(&path));
            }
        }
        Ok(())
    }
}

fn insert(held: &mut Held, module: HeldModule) {
    let modules = held.entry(module.tenant.clone()).or_default();
    modules.insert(module.digest.clone(), module);
}

/// Returns the id of this data directory, creating it on first use.
fn host_id(path: &Path) -> Result<String, RemoteError> {
    let failed = RemoteError::io(path);
    match fs::read_to_string(path) {
        Ok(id) if id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()) => return Ok(id),
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    let mut id = [0; 16];
    let random = getrandom::fill(&mut id).map_err(io::Error::other);
    let id = HEXLOWER.encode(&id);
    let new = path.with_extension("new");
    let written = random
        .and_then(|()| fs::write(&new, &id))
        .and_then(|()| fs::rename(&new, path));
    written.map_err(failed)?;
    Ok(id)
}

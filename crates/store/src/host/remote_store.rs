//! The shared store as this host uses it.

use crate::host::{LastStore, RemoteError, RemoteSettings, key_file};
use crate::{
    BackendSettings, DirectoryCheck, Keyring, LayerCache, SharedStore, Tenant, Traffic,
    VersionMemory,
};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tenant of what belongs to the owner of a host rather than to an API key.
pub const LOCAL_TENANT: &str = "host";

/// Time for which a tenant's keys are used before its record is read again.
const TENANT_TIME: Duration = Duration::from_secs(300);

/// The shared store as this host uses it.
#[derive(Debug)]
pub struct RemoteStore {
    /// Requests and keys.
    pub shared: SharedStore,
    /// Layers that were fetched: `<home>/store/layers`.
    pub cache: Arc<LayerCache>,
    url: String,
    index_cache: PathBuf,
    reader_book: PathBuf,
    module_book: PathBuf,
    made_keys: Option<PathBuf>,
    tenants: Mutex<HashMap<String, OpenTenant>>,
}

/// Tenant whose secrets were unwrapped, which may take a program.
#[derive(Debug)]
struct OpenTenant {
    tenant: Arc<Tenant>,
    opened: Instant,
}

impl RemoteStore {
    /// Opens the store. Makes no request: it may be out of reach for now ([`Self::probe`]).
    pub fn open(settings: &RemoteSettings) -> Result<Arc<Self>, RemoteError> {
        Self::open_for(settings, None, |_, keyring| Ok(keyring))
    }

    /// As [`Self::open`], with a further check that the directory of a store is there, and with the
    /// master keys of a file as `keyring` changes them.
    pub(crate) fn open_for(
        settings: &RemoteSettings,
        check: Option<DirectoryCheck>,
        keyring: impl FnOnce(&Path, Keyring) -> Result<Keyring, RemoteError>,
    ) -> Result<Arc<Self>, RemoteError> {
        let dir = settings.home.join("store");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(RemoteError::io(&dir))?;
        let (keys, made) = match &settings.keyring {
            Some(path) if !path.exists() => {
                return Err(RemoteError::NoKeys { path: path.clone() });
            }
            Some(path) => (path.clone(), false),
            None => {
                let path = dir.join("keys.toml");
                let made = key_file::make(&path)?;
                (path, made)
            }
        };
        let keyring = keyring(&keys, Keyring::load(&keys)?)?;
        let limits = BackendSettings {
            deadline: settings.timeout,
            upload_bytes_per_second: settings.upload_bytes_per_second,
            ..BackendSettings::default()
        };
        let last = LastStore::read(&settings.home).ok().flatten();
        let was_opened = last.is_some_and(|last| last.url == settings.url.to_string());
        let backend = match was_opened || check.is_some() {
            true => settings.url.open_checked(limits, check),
            false => settings.url.open(limits),
        }?;
        let cache = LayerCache::open(dir.join("layers"), settings.cache_bytes)?;
        let versions = VersionMemory::open(&dir.join("versions.json"), &settings.url.to_string())?;
        Ok(Arc::new(Self {
            shared: SharedStore::new(backend, keyring).with_versions(versions),
            cache: Arc::new(cache),
            url: settings.url.to_string(),
            index_cache: dir.join("indexes"),
            reader_book: dir.join("readers.json"),
            module_book: dir.join("modules"),
            made_keys: made.then_some(keys),
            tenants: Mutex::default(),
        }))
    }

    /// Address of the store.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// File of what the store was told of this host's needs.
    pub(crate) fn reader_book_path(&self) -> &Path {
        &self.reader_book
    }

    /// Directory of the modules that this host holds in the store.
    pub(crate) fn module_book_path(&self) -> &Path {
        &self.module_book
    }

    /// File of master keys, if this start made it: other hosts need a copy.
    pub fn made_keys(&self) -> Option<&Path> {
        self.made_keys.as_deref()
    }

    /// Directory of the indexes of packs that were read.
    pub fn index_cache(&self) -> &Path {
        &self.index_cache
    }

    /// Tenant of `owner`, the id of an API key; none: [`LOCAL_TENANT`]. A new one is made.
    pub async fn tenant(&self, owner: Option<&str>) -> Result<Arc<Tenant>, RemoteError> {
        let name = owner.unwrap_or(LOCAL_TENANT);
        if let Some(open) = self.open_tenant(name) {
            return Ok(open);
        }
        let tenant = self.shared.tenant(name).await?;
        self.keep_tenant(name, &tenant);
        Ok(tenant)
    }

    /// Tenant `name`, if the store knows it.
    pub(crate) async fn find_tenant(&self, name: &str) -> Result<Option<Arc<Tenant>>, RemoteError> {
        if let Some(open) = self.open_tenant(name) {
            return Ok(Some(open));
        }
        let found = self.shared.find_tenant(name).await?;
        if let Some(tenant) = &found {
            self.keep_tenant(name, tenant);
        }
        Ok(found)
    }

    /// Tenant `name`, if its secrets were unwrapped not long ago.
    fn open_tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        let tenants = self.tenants();
        let open = tenants.get(name)?;
        (open.opened.elapsed() < TENANT_TIME).then(|| open.tenant.clone())
    }

    /// Forgets the secrets of tenant `name`, to which another host may have added.
    pub(crate) fn forget_tenant(&self, name: &str) {
        self.tenants().remove(name);
    }

    fn keep_tenant(&self, name: &str, tenant: &Arc<Tenant>) {
        let open = OpenTenant {
            tenant: tenant.clone(),
            opened: Instant::now(),
        };
        self.tenants().insert(name.to_owned(), open);
    }

    fn tenants(&self) -> MutexGuard<'_, HashMap<String, OpenTenant>> {
        self.tenants.lock()
    }

    /// Requests and bytes since the start.
    pub fn traffic(&self) -> Traffic {
        self.shared.backend().traffic()
    }

    /// Asks the store for something, to learn early that it does not answer or refuses.
    pub async fn probe(&self) -> Result<(), RemoteError> {
        Ok(self.shared.backend().probe("tenants").await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(dir: &Path) -> RemoteSettings {
        RemoteSettings {
            url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
            keyring: None,
            home: dir.join("home"),
            cache_bytes: 1 << 20,
            upload_bytes_per_second: None,
            timeout: crate::host::STORE_TIMEOUT,
        }
    }

    #[test]
    fn a_store_is_opened_with_keys_that_stay() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let made = RemoteStore::open(&settings).unwrap();
        let keys = made.made_keys().unwrap().to_owned();
        assert!(RemoteStore::open(&settings).unwrap().made_keys().is_none());
        let other = RemoteSettings {
            keyring: Some(keys),
            ..settings.clone()
        };
        assert!(RemoteStore::open(&other).unwrap().made_keys().is_none());
        let missing = RemoteSettings {
            keyring: Some(dir.path().join("none.toml")),
            ..settings
        };
        let refused = RemoteStore::open(&missing).unwrap_err();
        assert!(matches!(refused, RemoteError::NoKeys { .. }), "{refused}");
    }

    #[tokio::test]
    async fn a_directory_that_went_away_is_no_empty_store_and_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let settings = RemoteSettings {
            timeout: Duration::from_millis(100),
            ..settings(dir.path())
        };
        let (bucket, away) = (dir.path().join("bucket"), dir.path().join("away"));
        let remote = RemoteStore::open(&settings).unwrap();
        LastStore::write(&settings).unwrap();
        remote.tenant(None).await.unwrap();
        std::fs::rename(&bucket, &away).unwrap();
        // Not mounted: the mount point is there, and empty.
        for empty in [false, true] {
            if empty {
                std::fs::create_dir(&bucket).unwrap();
            }
            // As before, and as a daemon that starts now.
            for remote in [&remote, &RemoteStore::open(&settings).unwrap()] {
                let failed = remote.find(None, "id").await.unwrap_err();
                assert!(failed.retry_after().is_some(), "{failed}");
                let failed = remote.tenant(Some("another")).await.unwrap_err();
                let text = failed.to_string();
                assert!(text.contains("mount") && text.contains("bucket"), "{text}");
            }
            assert!(!bucket.join("tenants").exists());
        }
        std::fs::remove_dir(&bucket).unwrap();
        std::fs::rename(&away, &bucket).unwrap();
        assert!(remote.find(None, "id").await.unwrap().is_none());
    }

    #[tokio::test]
    async fn secrets_are_unwrapped_once_for_many_snapshots_that_are_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let keys = dir.path().join("keys.toml");
        let locator = "a".repeat(64);
        let script = format!("echo $0 >> {}; cat", log.display());
        let text = format!(
            "locator = \"{locator}\"\ncurrent = \"k1\"\ncommand = [\"sh\", \"-c\", \"{script}\"]\n"
        );
        std::fs::write(&keys, text).unwrap();
        std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let settings = RemoteSettings {
            keyring: Some(keys),
            ..settings(dir.path())
        };
        let maker = RemoteStore::open(&settings).unwrap();
        maker.tenant(None).await.unwrap();
        let unwraps = || {
            let calls = std::fs::read_to_string(&log).unwrap();
            calls.lines().filter(|call| *call == "unwrap").count()
        };
        let before = unwraps();
        let remote = RemoteStore::open(&settings).unwrap();
        assert!(remote.find(Some("stranger"), "id").await.unwrap().is_none());
        for id in ["one", "two", "three"] {
            assert!(remote.find(None, id).await.unwrap().is_none());
        }
        assert_eq!(unwraps(), before + 1);
    }
}

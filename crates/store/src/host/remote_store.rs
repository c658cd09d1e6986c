//! [`RemoteStore`]: this host's view of the shared store: client, keys, cache, fetcher and local
//! records. The sandbox manager and the engines use it.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *layer* is the part of a memory
//! or disk that one snapshot stores: the content that differs from its ancestors.

mod images;
mod layers;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod readers;
mod recent_finds;
#[cfg(test)]
mod resume_tests;
mod retract;
pub(crate) mod template_files;

use crate::host::{LastStore, RemoteError, RemoteSettings, key_file};
use crate::{
    BackendSettings, DirectoryCheck, Keyring, LayerCache, SHARED_TENANT, SharedStore, Tenant,
    Traffic, VersionMemory,
};
use parking_lot::{Mutex, MutexGuard};
use recent_finds::RecentFinds;
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;

/// Name of the tenant for objects of the host's owner, which belong to no API key.
pub const LOCAL_TENANT: &str = "host";

/// Time after which the record of a tenant is read again.
const TENANT_TIME: Duration = Duration::from_secs(300);

/// This host's view of the shared store.
#[derive(Debug)]
pub struct RemoteStore {
    /// Client of the store with its keyring.
    pub shared: SharedStore,
    /// Cache of fetched layers: `<home>/store/layers`.
    pub cache: Arc<LayerCache>,
    url: String,
    index_cache: PathBuf,
    reader_book: PathBuf,
    module_book: PathBuf,
    /// Key file that was created when the store was opened. `None` if the file existed.
    made_keys: Option<PathBuf>,
    /// Opened tenants by name.
    tenants: Mutex<HashMap<String, OpenTenant>>,
    /// Set when the store has passed the check of conditional writes.
    checked: OnceCell<()>,
    recent_finds: RecentFinds,
}

/// Tenant with unwrapped secrets. Unwrapping may run a command, so tenants are cached.
#[derive(Debug)]
struct OpenTenant {
    tenant: Arc<Tenant>,
    /// Time at which the secrets were unwrapped.
    opened: Instant,
}

impl RemoteStore {
    /// Opens the store. Creates the directory of a new store and, if the settings name no key file,
    /// the key file in the data directory. Sends no request: the store may be unreachable
    /// ([`Self::check`]).
    pub fn open(settings: &RemoteSettings) -> Result<Arc<Self>, RemoteError> {
        Self::open_for(settings, None, |_, keyring| Ok(keyring))
    }

    /// Like [`Self::open`], with an additional check that the store's directory exists. `keyring`
    /// may replace the keyring that was loaded from the key file.
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
        let (keys, is_new) = match &settings.keyring {
            Some(path) if !path.exists() => {
                return Err(RemoteError::NoKeys { path: path.clone() });
            }
            Some(path) => (path.clone(), false),
            None => {
                let path = dir.join("keys.toml");
                let is_new = key_file::make(&path)?;
                (path, is_new)
            }
        };
        let keyring = keyring(&keys, Keyring::load(&keys)?)?;
        let limits = BackendSettings {
            deadline: settings.timeout,
            upload_bytes_per_second: settings.upload_bytes_per_second,
            ..BackendSettings::default()
        };
        let was_opened = match LastStore::read(&settings.home) {
            Ok(last) => last.is_some_and(|last| last.url == settings.url.to_string()),
            // The store may have been opened: do not create its directory.
            Err(e) => {
                tracing::warn!(error = %e, "cannot read the record of the last opened store");
                true
            }
        };
        // `open` creates the directory of a new store; `open_checked` never does. If this host has
        // used the store before, a missing directory means that its file system is not mounted. The
        // fetcher process, which passes `check`, only serves stores that the daemon has opened.
        let backend = if was_opened || check.is_some() {
            settings.url.open_checked(limits, check)?
        } else {
            settings.url.open(limits)?
        };
        let cache = LayerCache::open(dir.join("layers"), settings.cache_bytes)?;
        let versions = VersionMemory::open(&dir.join("versions.json"), &settings.url.to_string())?;
        Ok(Arc::new(Self {
            shared: SharedStore::new(backend, keyring).with_versions(versions),
            cache: Arc::new(cache),
            url: settings.url.to_string(),
            index_cache: dir.join("indexes"),
            reader_book: dir.join("readers.json"),
            module_book: dir.join("modules"),
            made_keys: is_new.then_some(keys),
            tenants: Mutex::default(),
            recent_finds: RecentFinds::default(),
            checked: OnceCell::new(),
        }))
    }

    /// Returns the URL of the store.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the path of the record of this host's reader registrations.
    pub(crate) fn reader_book_path(&self) -> &Path {
        &self.reader_book
    }

    /// Returns the directory with the records of modules that this host holds.
    pub(crate) fn module_book_path(&self) -> &Path {
        &self.module_book
    }

    /// Returns the key file if it was created at this start: other hosts need a copy.
    pub fn made_keys(&self) -> Option<&Path> {
        self.made_keys.as_deref()
    }

    /// Returns the directory with the indexes of the packs that this host wrote last.
    pub fn index_cache(&self) -> &Path {
        &self.index_cache
    }

    /// Returns the tenant of `owner`, the id of an API key. Defaults to [`LOCAL_TENANT`]. Creates
    /// the tenant if necessary.
    ///
    /// # Errors
    /// Fails if the store does not implement conditional writes: hosts could then overwrite each
    /// other's keys and locks.
    pub async fn tenant(&self, owner: Option<&str>) -> Result<Arc<Tenant>, RemoteError> {
        let name = owner.unwrap_or(LOCAL_TENANT);
        if let Some(open) = self.open_tenant(name) {
            return Ok(open);
        }
        self.check().await?;
        let tenant = self.shared.tenant(name).await?;
        self.cache_tenant(name, &tenant);
        Ok(tenant)
    }

    /// Returns tenant `name`, or `None` if it does not exist in the store.
    pub async fn find_tenant(&self, name: &str) -> Result<Option<Arc<Tenant>>, RemoteError> {
        if let Some(open) = self.open_tenant(name) {
            return Ok(Some(open));
        }
        let tenant = self.shared.find_tenant(name).await?;
        if let Some(tenant) = &tenant {
            self.cache_tenant(name, tenant);
        }
        Ok(tenant)
    }

    /// Like [`Self::find_tenant`], but the secrets may be old: another host may have added newer
    /// ones. The caller must handle [`StoreError::Key`](crate::StoreError::Key).
    async fn find_cached_tenant(&self, name: &str) -> Result<Option<Arc<Tenant>>, RemoteError> {
        let cached = self.tenants().get(name).map(|open| open.tenant.clone());
        match cached {
            Some(tenant) => Ok(Some(tenant)),
            None => self.find_tenant(name).await,
        }
    }

    /// Returns tenant `name` if its secrets were unwrapped recently.
    fn open_tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        let tenants = self.tenants();
        let open = tenants.get(name)?;
        (open.opened.elapsed() < TENANT_TIME).then(|| open.tenant.clone())
    }

    /// Removes the cached secrets of tenant `name`, to which another host may have added new ones.
    pub(crate) fn forget_tenant(&self, name: &str) {
        self.tenants().remove(name);
    }

    fn cache_tenant(&self, name: &str, tenant: &Arc<Tenant>) {
        let open = OpenTenant {
            tenant: tenant.clone(),
            opened: Instant::now(),
        };
        self.tenants().insert(name.to_owned(), open);
    }

    fn tenants(&self) -> MutexGuard<'_, HashMap<String, OpenTenant>> {
        self.tenants.lock()
    }

    /// Returns the numbers of requests and bytes since the start.
    pub fn traffic(&self) -> Traffic {
        self.shared.backend().traffic()
    }

    /// Opens the tenants of the host's owner and of stock templates, so that the first resume does
    /// not wait for that. Ignores errors, which the resume reports.
    pub async fn prepare(&self) {
        // Stock templates belong to `SHARED_TENANT`, whose objects all tenants may read.
        let (own, shared) = tokio::join!(
            self.find_tenant(LOCAL_TENANT),
            self.find_tenant(SHARED_TENANT)
        );
        for opened in [own, shared] {
            if let Err(e) = opened {
                tracing::debug!(error = %e, "cannot open a tenant of the store yet");
            }
        }
    }

    /// Checks early that the store is reachable, grants access and implements conditional writes.
    pub async fn check(&self) -> Result<(), RemoteError> {
        self.checked
            .get_or_try_init(|| self.shared.control().check_conditions())
            .await?;
        Ok(())
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
        let remote = RemoteStore::open(&settings).unwrap();
        let keys = remote.made_keys().unwrap().to_owned();
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
        // Simulate an unmounted file system: the mount point is missing or empty.
        for empty in [false, true] {
            if empty {
                std::fs::create_dir(&bucket).unwrap();
            }
            // Test the open store and a store that a restarted daemon opens.
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
    async fn an_unreadable_record_of_the_last_store_creates_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        drop(RemoteStore::open(&settings).unwrap());
        let bucket = dir.path().join("bucket");
        std::fs::remove_dir_all(&bucket).unwrap();
        let record = settings.home.join("store/last.json");
        std::fs::write(&record, "").unwrap();
        // Either the open or the first request may report the missing directory.
        let remote = RemoteStore::open(&settings);
        if let Ok(remote) = remote {
            remote.tenant(None).await.unwrap_err();
        }
        assert!(!bucket.exists());
        std::fs::remove_file(&record).unwrap();
        RemoteStore::open(&settings)
            .unwrap()
            .tenant(None)
            .await
            .unwrap();
        assert!(bucket.exists());
    }

    #[test]
    fn a_record_without_its_key_file_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let settings = RemoteSettings {
            keyring: Some(dir.path().join("none.toml")),
            ..settings(dir.path())
        };
        std::fs::create_dir_all(settings.home.join("store")).unwrap();
        let refused = LastStore::write(&settings).unwrap_err();
        assert!(refused.to_string().contains("none.toml"), "{refused}");
        assert_eq!(LastStore::read(&settings.home).unwrap(), None);
    }

    #[tokio::test]
    async fn secrets_are_unwrapped_once_for_many_snapshots_that_are_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let keys = dir.path().join("keys.toml");
        let locator = "a".repeat(64);
        // `$0` is `wrap` or `unwrap`, the argument after the script. `cat` returns the secret
        // unchanged.
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

//! [`TemplateCache`]: templates in use, opened and verified once for all engines.

use crate::host::{CreateError, Host, PreparedTemplate};
use jiffy_engine_api::EngineError;
use jiffy_image::TemplateError;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Stamps of a template's manifest, the VMM program and the agent: inode and change time (seconds,
/// nanoseconds). A stamp changes if its file is replaced.
pub(crate) type FileStamps = [(u64, i64, i64); 3];

/// Open templates of one host. New sandboxes use the current version of a template, by its name.
/// Snapshots use the version that they record.
pub(crate) struct TemplateCache {
    host: Host,
    /// Current versions of templates, by name.
    prepared: Mutex<HashMap<String, (FileStamps, Arc<PreparedTemplate>)>>,
    /// Versions that [`Self::prepare_version`] opened for snapshots, by
    /// [`PreparedTemplate::image_name`]. These are usually earlier versions.
    older: Mutex<HashMap<String, Arc<PreparedTemplate>>>,
}

impl TemplateCache {
    /// Creates a cache for the templates of `host`.
    pub(crate) fn new(host: Host) -> Self {
        Self {
            host,
            prepared: Mutex::default(),
            older: Mutex::default(),
        }
    }

    /// Returns the host.
    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the stamps of template, VMM and agent. They change when a file is replaced.
    pub(crate) fn stamp(&self, template: &str) -> io::Result<FileStamps> {
        let of = |path: &Path| {
            let metadata = fs::metadata(path)?;
            Ok::<_, io::Error>((metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
        };
        let manifest = self
            .host
            .templates()
            .manifest_path(template)
            .map_err(io::Error::other)?;
        let programs = self.host.programs();
        Ok([
            of(&manifest)?,
            of(programs.vmm.path())?,
            of(&programs.agent)?,
        ])
    }

    /// Returns the version of a template with which a snapshot was taken.
    pub(crate) async fn prepare_version(
        &self,
        image: &str,
    ) -> Result<Arc<PreparedTemplate>, EngineError> {
        if let Some(prepared) = self.known_version(image) {
            return Ok(prepared);
        }
        let (host, name) = (self.host.clone(), image.to_owned());
        let prepared = tokio::task::spawn_blocking(move || host.prepare_version(&name))
            .await
            .map_err(EngineError::failed)?
            .map_err(chain)?;
        let prepared = Arc::new(prepared);
        let older = || self.older.lock();
        older().insert(image.to_owned(), prepared.clone());
        Ok(prepared)
    }

    /// Returns an open version. Locks `prepared` before `older`.
    fn known_version(&self, image: &str) -> Option<Arc<PreparedTemplate>> {
        let current = self.prepared.lock();
        let mut all = current.values().map(|(_, prepared)| prepared);
        if let Some(current) = all.find(|p| p.image_name() == image) {
            return Some(current.clone());
        }
        let older = self.older.lock();
        older.get(image).cloned()
    }

    /// Drops the entries of replaced templates, and of earlier versions that no guest or caller
    /// uses. Users of a dropped entry retain their own reference.
    pub(crate) fn drop_replaced(&self) {
        let mut older = self.older.lock();
        // The map holds one reference itself.
        older.retain(|_, prepared| Arc::strong_count(prepared) > 1);
        drop(older);
        // Read the files without holding the lock: other callers wait for it.
        let cached = || self.prepared.lock();
        let entries: Vec<_> = cached().iter().map(|(n, (s, _))| (n.clone(), *s)).collect();
        let stale =
            |(name, stamp): &(String, FileStamps)| !self.stamp(name).is_ok_and(|s| s == *stamp);
        for (name, stamp) in entries.into_iter().filter(stale) {
            let mut cached = cached();
            // Another task may have opened the new version meanwhile.
            if cached.get(&name).is_some_and(|(s, _)| *s == stamp) {
                cached.remove(&name);
            }
        }
    }

    /// Returns whether `taken`, the version with which a snapshot was taken, is the current version
    /// of `template`.
    pub(crate) fn is_current(&self, template: &str, taken: Option<&str>) -> bool {
        match (self.host.templates().manifest(template), taken) {
            // Compare only the versions: a name may refer to another template now.
            (Ok(now), Some(taken)) => taken.rsplit('@').next() == Some(&*now.version()),
            (Err(TemplateError::Unknown { .. }), Some(_)) => false,
            // The manifest or the template cannot be read. The caller removes snapshots that are
            // not current, so retain this one.
            _ => true,
        }
    }

    /// Returns the current version of the template. A missing stock template is built.
    pub(crate) async fn prepare(
        &self,
        template: &str,
    ) -> Result<Arc<PreparedTemplate>, EngineError> {
        let cached = || self.prepared.lock();
        // A template that is not built yet has no stamps.
        if let Ok(stamp) = self.stamp(template)
            && let Some((cached_stamp, prepared)) = cached().get(template)
            && *cached_stamp == stamp
        {
            return Ok(prepared.clone());
        }
        let (host, name) = (self.host.clone(), template.to_owned());
        let prepared = tokio::task::spawn_blocking(move || host.prepare(&name, &mut |_| ()))
            .await
            .map_err(EngineError::failed)?
            .map_err(chain)?;
        let prepared = Arc::new(prepared);
        self.insert(template, prepared.clone())?;
        Ok(prepared)
    }

    /// Adds a template that was just opened.
    pub(crate) fn insert(
        &self,
        template: &str,
        prepared: Arc<PreparedTemplate>,
    ) -> Result<(), EngineError> {
        let stamp = self.stamp(template).map_err(EngineError::failed)?;
        let mut cached = self.prepared.lock();
        cached.insert(template.to_owned(), (stamp, prepared));
        Ok(())
    }
}

/// Converts an error and its causes to one line. A cause that the text already contains is not
/// repeated.
pub(crate) fn chain(error: CreateError) -> EngineError {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        let text = cause.to_string();
        if !reason.contains(&text) {
            reason = format!("{reason}: {text}");
        }
        source = cause.source();
    }
    EngineError::Failed { reason }
}

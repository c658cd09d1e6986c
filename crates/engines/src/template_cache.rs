//! Templates that are in use, opened and verified once for all engines.

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

/// Stamp that shows that a file was replaced: inode and change time.
pub(crate) type FileStamps = [(u64, i64, i64); 3];

/// The templates of one host, by what they are called and by what they were when snapshots were
/// taken.
pub(crate) struct TemplateCache {
    host: Host,
    /// Templates as they are now, by name.
    prepared: Mutex<HashMap<String, (FileStamps, Arc<PreparedTemplate>)>>,
    /// Versions that snapshots in use were taken of, by [`PreparedTemplate::image_name`].
    older: Mutex<HashMap<String, Arc<PreparedTemplate>>>,
}

impl TemplateCache {
    /// The templates of `host`.
    pub(crate) fn new(host: Host) -> Self {
        Self {
            host,
            prepared: Mutex::default(),
            older: Mutex::default(),
        }
    }

    /// Its host.
    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// Returns a stamp of template, VMM and agent, which changes when one is replaced.
    pub(crate) fn stamp(&self, template: &str) -> io::Result<FileStamps> {
        let of = |path: &Path| {
            let metadata = fs::metadata(path)?;
            Ok::<_, io::Error>((metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
        };
        let manifest = self.host.templates().manifest_path(template);
        let manifest = manifest.map_err(io::Error::other)?;
        let programs = self.host.programs();
        Ok([
            of(&manifest)?,
            of(programs.vmm.path())?,
            of(&programs.agent)?,
        ])
    }

    /// The very version that a snapshot was taken of, whatever the template is now.
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

    fn known_version(&self, image: &str) -> Option<Arc<PreparedTemplate>> {
        let current = self.prepared.lock();
        let mut all = current.values().map(|(_, prepared)| prepared);
        if let Some(found) = all.find(|p| p.image_name() == image) {
            return Some(found.clone());
        }
        let older = self.older.lock();
        older.get(image).cloned()
    }

    /// Lets go of the images of templates that are something else by now, unless a guest of theirs
    /// is coming up.
    pub(crate) fn forget_older(&self) {
        let mut older = self.older.lock();
        older.retain(|_, prepared| Arc::strong_count(prepared) > 1);
        drop(older);
        // Files are looked at while nobody waits for the lock.
        let cached = || self.prepared.lock();
        let known: Vec<_> = cached().iter().map(|(n, (s, _))| (n.clone(), *s)).collect();
        let stale =
            |(name, stamp): &(String, FileStamps)| !self.stamp(name).is_ok_and(|s| s == *stamp);
        for (name, stamp) in known.into_iter().filter(stale) {
            let mut cached = cached();
            // Another one may have been opened meanwhile.
            if cached.get(&name).is_some_and(|(s, _)| *s == stamp) {
                cached.remove(&name);
            }
        }
    }

    /// True if `template` is still what it was when a snapshot was taken of the version that is
    /// called `taken`.
    pub(crate) fn serves(&self, template: &str, taken: Option<&str>) -> bool {
        match (self.host.templates().manifest(template), taken) {
            // Names change hands: what it is called counts for nothing.
            (Ok(now), Some(taken)) => taken.rsplit('@').next() == Some(&*now.version()),
            (Err(TemplateError::Unknown { .. }), Some(_)) => false,
            // A snapshot stays if this cannot be told.
            _ => true,
        }
    }

    /// The template as it is now; a stock one that is missing is built.
    pub(crate) async fn prepare(
        &self,
        template: &str,
    ) -> Result<Arc<PreparedTemplate>, EngineError> {
        let cached = || self.prepared.lock();
        // A template that is not built yet has no stamp.
        if let Ok(stamp) = self.stamp(template)
            && let Some((found, prepared)) = cached().get(template)
            && *found == stamp
        {
            return Ok(prepared.clone());
        }
        let (host, name) = (self.host.clone(), template.to_owned());
        let prepared = tokio::task::spawn_blocking(move || host.prepare(&name, &mut |_| ()))
            .await
            .map_err(EngineError::failed)?
            .map_err(chain)?;
        let prepared = Arc::new(prepared);
        self.hold(template, prepared.clone())?;
        Ok(prepared)
    }

    /// Takes a template that was opened just now.
    pub(crate) fn hold(
        &self,
        template: &str,
        prepared: Arc<PreparedTemplate>,
    ) -> Result<(), EngineError> {
        let stamp = self.stamp(template).map_err(EngineError::failed)?;
        let mut held = self.prepared.lock();
        held.insert(template.to_owned(), (stamp, prepared));
        Ok(())
    }
}

/// An error with its causes, in one line.
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

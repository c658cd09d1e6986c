//! Index of templates in memory, so that listing a few templates does not read all manifests.
//!
//! The names are read again after a change of their directory. The manifest of a listed template is
//! read again if its inode or change time differs.

use crate::file::{FileError, OnPath};
use crate::template_model::{Reference, TemplateError, TemplateManifest, Visibility};
use crate::templates::Templates;
use jiffy_engine_api::{SandboxSize, TemplateNetwork};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::ops::{Bound, ControlFlow};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Assumed resolution of a directory's modification time. Changes within this time may have equal
/// modification times.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(1);

/// Part of a manifest that lists contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSummary {
    /// Name, with owner and tag.
    pub reference: Reference,
    /// Callers that may see the template.
    pub visibility: Visibility,
    /// Version of the template ([`TemplateManifest::version`]).
    pub version: String,
    /// Default size of its sandboxes.
    pub size: SandboxSize,
    /// Default idle timeout of its sandboxes in seconds.
    pub idle_timeout_s: Option<u64>,
    /// Network rules of its sandboxes.
    pub network: TemplateNetwork,
    /// Time of the build in seconds since 1970.
    pub created: u64,
}

impl TemplateSummary {
    fn of(reference: &Reference, manifest: &TemplateManifest) -> Self {
        Self {
            reference: reference.clone(),
            visibility: manifest.visibility,
            version: manifest.version(),
            size: manifest.defaults.size(),
            idle_timeout_s: manifest.idle_timeout_s,
            network: manifest.network.clone(),
            created: manifest.created,
        }
    }
}

/// Inode and change time (seconds, nanoseconds) of a manifest.
type Stamp = (u64, i64, i64);

/// Summary of a template, if its manifest has been read.
#[derive(Debug, Clone, Default)]
struct IndexEntry {
    /// Value of [`Names::reading`] when the summary was last compared with the manifest.
    reading: u64,
    summary: Option<(Stamp, Arc<TemplateSummary>)>,
}

/// Names and summaries of the templates of one data directory. The lock is never held during I/O or
/// while a callback runs.
#[derive(Debug, Default)]
pub(crate) struct TemplateIndex(Mutex<Names>);

/// Names of templates, as last read.
#[derive(Debug, Default)]
struct Names {
    /// Modification time of the directory before the names were last read, and the time of that
    /// reading.
    seen: Option<(SystemTime, SystemTime)>,
    /// Number of times that the directory was read. After an increase, each summary is compared
    /// with its manifest before the next use.
    reading: u64,
    /// Templates by name and tag.
    entries: BTreeMap<Reference, IndexEntry>,
}

impl Names {
    /// True if the directory has not changed since it was read.
    fn is_current(&self, changed: Option<SystemTime>) -> bool {
        match (self.seen, changed) {
            (Some((stamp, read)), Some(changed)) => {
                // A change just after the reading may have the same time stamp and would be missed.
                let since = read.duration_since(stamp).unwrap_or_default();
                stamp == changed && since >= TIMESTAMP_GRANULARITY
            }
            _ => false,
        }
    }
}

impl Templates {
    /// Passes templates to `each`, sorted by owner, name and tag, until `each` breaks off. Starts
    /// at `from` (`[owner/]name`), or at the first template if `from` is `None`. Once the names are
    /// read, the cost depends only on the number of passed templates.
    pub fn walk(
        &self,
        from: Option<&str>,
        each: &mut dyn FnMut(&TemplateSummary) -> ControlFlow<()>,
    ) -> Result<(), TemplateError> {
        let reading = self.refresh_names()?;
        let mut next = match from {
            Some(name) => Bound::Included(Reference::parse(name)?.before_tags()),
            None => Bound::Unbounded,
        };
        loop {
            let (reference, entry) = {
                // The lock is released for each template: `each` may take long, and other walks
                // continue.
                let names = self.index.0.lock();
                let mut from = names.entries.range((next, Bound::Unbounded));
                match from.next() {
                    Some((reference, entry)) => (reference.clone(), entry.clone()),
                    None => return Ok(()),
                }
            };
            let summary = match entry.summary {
                Some((_, summary)) if entry.reading == reading => Some(summary),
                before => self.summary(&reference, before, reading)?,
            };
            if let Some(summary) = summary
                && each(&summary).is_break()
            {
                return Ok(());
            }
            next = Bound::Excluded(reference);
        }
    }

    /// Reads the names if they may have changed. Returns the number of the last reading.
    fn refresh_names(&self) -> Result<u64, FileError> {
        // The time is read before the names, so a change during the reading is noticed later.
        let (changed, now) = (self.changed(), SystemTime::now());
        {
            let names = self.index.0.lock();
            if names.is_current(changed) {
                return Ok(names.reading);
            }
        }
        let references = self.references()?;
        let mut names = self.index.0.lock();
        // Summaries of existing templates are retained. They are verified when they are listed.
        let mut before = std::mem::take(&mut names.entries);
        let entries = references.into_iter().map(|reference| {
            let entry = before.remove(&reference).unwrap_or_default();
            (reference, entry)
        });
        names.entries = entries.collect();
        names.reading += 1;
        names.seen = changed.map(|changed| (changed, now));
        Ok(names.reading)
    }

    /// Returns the summary of one template, or `None` if it no longer exists. Returns `before` if
    /// the manifest is unchanged.
    fn summary(
        &self,
        reference: &Reference,
        before: Option<(Stamp, Arc<TemplateSummary>)>,
        reading: u64,
    ) -> Result<Option<Arc<TemplateSummary>>, TemplateError> {
        let path = self.manifest_file(reference);
        let stamp = fs::metadata(&path)
            .map(|m| (m.ino(), m.ctime(), m.ctime_nsec()))
            .on("examine", &path);
        let found = match (stamp, before) {
            (Ok(stamp), Some((of, summary))) if of == stamp => Some((stamp, summary)),
            // The stamp was read before the manifest. If the manifest was replaced in between, a
            // new summary has an old stamp, and the next call reads the manifest again. An old
            // summary never has a new stamp.
            (stamp, _) => match self.look_up(reference)? {
                Some(manifest) => {
                    let summary = TemplateSummary::of(reference, &manifest);
                    Some((stamp?, Arc::new(summary)))
                }
                None => None,
            },
        };
        let mut names = self.index.0.lock();
        // A concurrent `refresh_names` may have removed the entry; then the template no longer
        // exists.
        if let Some(entry) = names.entries.get_mut(reference) {
            let summary = found.clone();
            *entry = IndexEntry { reading, summary };
        }
        Ok(found.map(|(_, summary)| summary))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::tests::{FakeRecipe, home};

    /// Returns at most `limit` templates from `from` on.
    fn walked(templates: &Templates, from: Option<&str>, limit: usize) -> Vec<String> {
        let mut found = Vec::new();
        let walk = templates.walk(from, &mut |summary| {
            found.push(summary.reference.to_string());
            if found.len() < limit {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        walk.unwrap();
        found
    }

    fn read(templates: &Templates) -> usize {
        let names = templates.index.0.lock();
        let entries = names.entries.values().filter(|k| k.summary.is_some());
        entries.count()
    }

    #[test]
    fn a_walk_reads_only_the_listed_manifests_and_detects_changes() {
        let (_dir, home) = home();
        let templates = Templates::new(&home);
        for name in ["a", "b", "c", "d"] {
            FakeRecipe::new(name).build(&home).unwrap();
        }
        templates.tag("b", "b:old", Visibility::Private).unwrap();
        assert_eq!(walked(&templates, None, 2), ["a", "b"]);
        assert_eq!(read(&templates), 2);
        assert_eq!(walked(&templates, Some("b"), 9), ["b", "b:old", "c", "d"]);
        assert_eq!(walked(&templates, Some("bb"), 1), ["c"]);
        assert!(
            templates
                .walk(Some("../x"), &mut |_| ControlFlow::Continue(()))
                .is_err()
        );
        // The change is made through another index, as another process would.
        let other = Templates::new(&home);
        other.set_visibility("c", Visibility::Public).unwrap();
        other.remove("a").unwrap();
        let mut seen = Vec::new();
        let walk = templates.walk(None, &mut |summary| {
            seen.push((summary.reference.to_string(), summary.visibility));
            ControlFlow::Continue(())
        });
        walk.unwrap();
        let expected = other.list().unwrap();
        let expected = expected.iter().map(|m| (m.reference(), m.visibility));
        assert_eq!(seen, expected.collect::<Vec<_>>());
    }

    #[test]
    fn names_read_within_the_timestamp_granularity_are_read_again() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let names = |read| Names {
            seen: Some((at(5), at(read))),
            ..Names::default()
        };
        assert!(!names(5).is_current(Some(at(5))));
        assert!(names(7).is_current(Some(at(5))));
        assert!(!names(7).is_current(Some(at(6))));
        assert!(!names(7).is_current(None));
    }
}

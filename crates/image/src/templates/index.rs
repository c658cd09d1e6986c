//! Templates in memory, for lists of a part of them.
//!
//! Names are read again when their directory has changed. Of a template that is asked for the
//! manifest is read again if it is another file than the one that was read.

use crate::file::{FileError, OnPath};
use crate::template_model::{Reference, TemplateError, TemplateManifest, Visibility};
use crate::templates::Templates;
use jiffy_engine_api::SandboxSize;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::ops::{Bound, ControlFlow};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Resolution of a directory's time stamp: later changes may have the same one.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(1);

/// Part of a manifest that lists show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSummary {
    /// Name, with owner and tag.
    pub reference: Reference,
    /// Callers for whom it exists.
    pub visibility: Visibility,
    /// Its version ([`TemplateManifest::version`]).
    pub version: String,
    /// Size of its sandboxes unless their creator says otherwise.
    pub size: SandboxSize,
    /// When it was built, in seconds since 1970.
    pub created: u64,
}

impl TemplateSummary {
    fn of(reference: &Reference, manifest: &TemplateManifest) -> Self {
        Self {
            reference: reference.clone(),
            visibility: manifest.visibility,
            version: manifest.version(),
            size: manifest.defaults.size(),
            created: manifest.created,
        }
    }
}

/// Inode and change time of a manifest.
type Stamp = (u64, i64, i64);

/// Summary of a template, as far as it is known.
#[derive(Debug, Clone, Default)]
struct Known {
    /// Reading of the directory in which it was looked at.
    reading: u64,
    summary: Option<(Stamp, Arc<TemplateSummary>)>,
}

/// Names and summaries of the templates of one data directory.
#[derive(Debug, Default)]
pub(crate) struct TemplateIndex(Mutex<Names>);

#[derive(Debug, Default)]
struct Names {
    /// Change of the directory that was seen, and when.
    seen: Option<(SystemTime, SystemTime)>,
    /// Number of times that the directory was read.
    reading: u64,
    known: BTreeMap<Reference, Known>,
}

impl Names {
    fn is_current(&self, changed: Option<SystemTime>) -> bool {
        match (self.seen, changed) {
            (Some((stamp, read)), Some(changed)) => {
                let since = read.duration_since(stamp).unwrap_or_default();
                stamp == changed && since >= TIMESTAMP_GRANULARITY
            }
            _ => false,
        }
    }
}

impl Templates {
    /// Templates from `from` on (`[owner/]name`; none: all), by owner, name and tag, until `each`
    /// breaks off. Costs no more than those that it comes by, once the names are known.
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
            let (reference, known) = {
                let names = self.index.0.lock();
                let mut from = names.known.range((next, Bound::Unbounded));
                match from.next() {
                    Some((reference, known)) => (reference.clone(), known.clone()),
                    None => return Ok(()),
                }
            };
            let summary = match known.summary {
                Some((_, summary)) if known.reading == reading => Some(summary),
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

    /// Reads the names if they may have changed. Returns the number of that reading.
    fn refresh_names(&self) -> Result<u64, FileError> {
        let (changed, now) = (self.changed(), SystemTime::now());
        {
            let names = self.index.0.lock();
            if names.is_current(changed) {
                return Ok(names.reading);
            }
        }
        let references = self.references()?;
        let mut names = self.index.0.lock();
        let mut before = std::mem::take(&mut names.known);
        let known = references.into_iter().map(|reference| {
            let known = before.remove(&reference).unwrap_or_default();
            (reference, known)
        });
        names.known = known.collect();
        names.reading += 1;
        names.seen = changed.map(|changed| (changed, now));
        Ok(names.reading)
    }

    /// Summary of one template; none: it is gone. That of `before` if the manifest is the same.
    fn summary(
        &self,
        reference: &Reference,
        before: Option<(Stamp, Arc<TemplateSummary>)>,
        reading: u64,
    ) -> Result<Option<Arc<TemplateSummary>>, TemplateError> {
        let path = self.manifest_file(reference);
        let stamp = fs::metadata(&path).map(|m| (m.ino(), m.ctime(), m.ctime_nsec()));
        let stamp = stamp.on("examine", &path);
        let found = match (stamp, before) {
            (Ok(stamp), Some((of, summary))) if of == stamp => Some((stamp, summary)),
            (stamp, _) => match self.look_up(reference)? {
                Some(manifest) => {
                    let summary = TemplateSummary::of(reference, &manifest);
                    Some((stamp?, Arc::new(summary)))
                }
                None => None,
            },
        };
        let mut names = self.index.0.lock();
        if let Some(known) = names.known.get_mut(reference) {
            let summary = found.clone();
            *known = Known { reading, summary };
        }
        Ok(found.map(|(_, summary)| summary))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::tests::{FakeRecipe, home};

    fn walked(templates: &Templates, from: Option<&str>, limit: usize) -> Vec<String> {
        let mut found = Vec::new();
        let walk = templates.walk(from, &mut |summary| {
            found.push(summary.reference.to_string());
            match found.len() < limit {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        });
        walk.unwrap();
        found
    }

    fn read(templates: &Templates) -> usize {
        let names = templates.index.0.lock();
        let known = names.known.values().filter(|k| k.summary.is_some());
        known.count()
    }

    #[test]
    fn a_walk_reads_the_manifests_that_it_comes_by_and_sees_every_change() {
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
        // By another process, as far as this one's index knows.
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
    fn names_that_were_read_in_the_second_of_a_change_are_read_again() {
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

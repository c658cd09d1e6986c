//! Templates that this host has or builds, as hashes for its heartbeats. The coordinator of the
//! fleet places new sandboxes on hosts that have their template.

use super::Fleet;
use super::names::NamedTemplate;
use crate::app::App;
use crate::caller::Caller;
use jiffy_engine_api::{SandboxSize, is_id};
use jiffy_fleet::node::row_hash;
use jiffy_fleet_core::MAX_TEMPLATES;
use jiffy_image::{DEFAULT_TAG, Reference};
use jiffy_template_builder::{Builder, WeakBuilder};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Interval at which the templates of this host are listed.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of templates whose builds are read in one pass, to find builds in progress.
const MAX_EXAMINED: usize = 200;
/// Tags that every template has implicitly.
const OWN_TAGS: [&str; 2] = [":default", ":latest"];

/// Templates of a host, as hashes of their ids and names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TemplateHashes {
    /// Templates that are on the host.
    pub present: Vec<u64>,
    /// Templates that the host is building.
    pub builds: Vec<u64>,
    /// Name and usual size of each template on the host.
    pub sources: HashMap<u64, (String, SandboxSize)>,
}

/// Latest list of the templates of this host.
#[derive(Debug, Default)]
pub(super) struct PresentTemplates(RwLock<Arc<TemplateHashes>>);

impl PresentTemplates {
    pub fn current(&self) -> Arc<TemplateHashes> {
        self.0.read().clone()
    }
}

/// Lists the templates of this host until the control plane is dropped.
pub(super) fn watch(app: &App, fleet: &Fleet) {
    let (templates, builder) = (app.templates.clone(), app.builder.clone());
    let builder = Arc::new(builder.as_ref().map(Builder::downgrade));
    let current = Arc::downgrade(&fleet.templates);
    let secret = fleet.secret.clone();
    let node = fleet.node.clone();
    tokio::spawn(async move {
        loop {
            let (templates, builder) = (templates.clone(), builder.clone());
            let secret = secret.clone();
            let listed = tokio::task::spawn_blocking(move || {
                let hash = |name: &str| hash_of(&secret, name);
                let mut hashes = TemplateHashes::default();
                // Templates with a version are built. They are found by their name, and by their
                // version.
                let infos = templates.list().unwrap_or_default();
                let built = infos.iter().filter(|info| info.version.is_some());
                let names: Vec<_> = built.map(|info| info.reference()).collect();
                hashes.present = names.iter().map(|name| hash(name)).collect();
                for info in &infos {
                    let Some(version) = info.version.as_deref() else {
                        continue;
                    };
                    let version = hash(&version_text(&info.without_tag(), version));
                    hashes.present.push(version);
                    let source = (info.reference(), info.size);
                    let name = hash(&source.0);
                    hashes.sources.insert(name, source.clone());
                    hashes.sources.insert(version, source);
                }
                // The builder also knows their ids, and the builds that have not finished.
                if let Some(builder) = builder.as_ref().as_ref().and_then(WeakBuilder::upgrade) {
                    let records = builder.records();
                    let all = records.templates().unwrap_or_default();
                    for template in all.iter().rev().take(MAX_EXAMINED) {
                        let name = template.reference(DEFAULT_TAG);
                        let has_tag = |other: &String| {
                            let rest = other.strip_prefix(&name);
                            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
                        };
                        if names.iter().any(has_tag) {
                            let id = hash(&template.id);
                            hashes.present.push(id);
                            if let Some(source) = hashes.sources.get(&hash(&name)).cloned() {
                                hashes.sources.insert(id, source);
                            }
                        }
                        let builds = records.builds(&template.id).unwrap_or_default();
                        if builds.first().is_some_and(|build| !build.status.is_final()) {
                            hashes.builds.extend([hash(&name), hash(&template.id)]);
                        }
                    }
                }
                hashes.present.truncate(MAX_TEMPLATES);
                hashes.builds.truncate(MAX_TEMPLATES);
                hashes
            });
            let Some(current) = current.upgrade() else {
                return;
            };
            if let Ok(listed) = listed.await
                && *current.current() != listed
            {
                *current.0.write() = Arc::new(listed);
                // The next heartbeat reports the new list to the coordinator.
                node.hasten_heartbeat();
            }
            drop(current);
            tokio::time::sleep(INTERVAL).await;
        }
    });
}

/// Returns the text of a version of a template. Templates of one name may differ between hosts.
fn version_text(name: &str, version: &str) -> String {
    format!("{name}@{version}")
}

fn hash_of(secret: &[u8; 32], name: &str) -> u64 {
    let hash = row_hash(secret, "template", &[name]).0;
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    u64::from_be_bytes(first)
}

impl Fleet {
    /// Returns the hash under which hosts report a template.
    pub(super) fn template_hash(&self, name: &str) -> u64 {
        hash_of(&self.secret, name)
    }

    /// Returns the hash under which hosts report the version of a template in the table of names.
    pub(super) fn version_hash(&self, text: &str, named: &NamedTemplate) -> Option<u64> {
        let reference = Reference::parse(text).ok()?;
        let name = match &named.owner {
            Some(owner) => format!("{owner}/{}", reference.name()),
            None => reference.name().to_owned(),
        };
        Some(self.template_hash(&version_text(&name, &named.version)))
    }

    /// Returns the hashes of the templates that a caller may mean, in the order of precedence.
    pub(super) fn template_hashes(&self, caller: &Caller, id: &str) -> Vec<u64> {
        let untagged = OWN_TAGS.iter().find_map(|tag| id.strip_suffix(tag));
        let names = [Some(id), untagged].into_iter().flatten();
        let mut hashes = Vec::new();
        if let Some(key) = caller.owner_scope().filter(|_| !id.contains('/')) {
            hashes.extend(
                names
                    .clone()
                    .map(|name| self.template_hash(&format!("{key}/{name}"))),
            );
        }
        hashes.extend(names.map(|name| self.template_hash(name)));
        // An id precedes all names.
        let (word, _) = id.split_once(':').unwrap_or((id, ""));
        if is_id(word) {
            hashes.insert(0, self.template_hash(word));
        }
        hashes
    }
}

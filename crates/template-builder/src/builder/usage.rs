//! Usage of an owner (templates, builds and uploads), and reservations in the owner's quota.
//!
//! A *permit* counts towards a limit until it is dropped.

use super::{Builder, BuilderError, BuilderInner};
use jiffy_image::{DiskBudget, Templates, Visibility};
use jiffy_sandbox_manager::{OwnerQuota, QuotaAmount, QuotaPermit, QuotaRefusal, QuotaRequest};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

/// Resolution of the modification time of the templates directory: a later change within this time
/// may leave the same modification time.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(1);

/// Usage of one owner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BuildUsage {
    /// Number of template tags.
    pub templates: u64,
    /// Bytes of the templates' images, each counted once. Images shared with the host's owner are
    /// free.
    pub template_bytes: u64,
    /// Number of uploads.
    pub uploads: u64,
    /// Bytes of the uploads, in blocks of 4 KiB.
    pub upload_bytes: u64,
    /// Number of waiting and running builds.
    pub builds: u64,
}

/// Template usage of all owners at one time.
#[derive(Debug, Default)]
pub(super) struct TemplateUsage {
    /// Modification time of the templates directory, and the time at which it was read.
    read: Option<(SystemTime, SystemTime)>,
    /// Templates by owner.
    by_owner: HashMap<String, OwnerTemplates>,
    /// Digests of the images of the host's owner.
    of_host: HashSet<String>,
}

/// Tags and images of one owner.
#[derive(Debug, Default)]
struct OwnerTemplates {
    count: u64,
    /// Bytes by digest.
    images: HashMap<String, u64>,
}

impl TemplateUsage {
    /// Counts the tags and images of each owner.
    fn read(templates: &Templates) -> Result<Self, BuilderError> {
        let mut usage = Self::default();
        for manifest in templates.list()? {
            let images = manifest.images.iter();
            match &manifest.owner {
                Some(owner) => {
                    let of_owner = usage.by_owner.entry(owner.clone()).or_default();
                    let is_tag = manifest.visibility != Visibility::Internal;
                    of_owner.count += u64::from(is_tag);
                    let images = images.map(|i| (i.sha256.clone(), i.size));
                    of_owner.images.extend(images);
                }
                None => usage.of_host.extend(images.map(|i| i.sha256.clone())),
            }
        }
        Ok(usage)
    }

    /// Returns the number of tags and the bytes of images of `owner`.
    fn of(&self, owner: &str) -> (u64, u64) {
        let Some(own) = self.by_owner.get(owner) else {
            return (0, 0);
        };
        let images = own.images.iter();
        let charged = images.filter(|(sum, _)| !self.of_host.contains(*sum));
        (own.count, charged.map(|(_, bytes)| *bytes).sum())
    }
}

impl BuilderInner {
    /// Returns the number of tags and the bytes of images of `owner`. Reads the directory again if
    /// it has changed.
    fn templates_of(&self, owner: &str) -> Result<(u64, u64), BuilderError> {
        let changed = self.templates.changed();
        let mut usage = self.template_usage.lock();
        let fresh = match (usage.read, changed) {
            // The counts are current if the directory has not changed, and if the modification time
            // was old enough when the directory was read.
            (Some((stamp, read)), Some(changed)) => {
                let since = read.duration_since(stamp).unwrap_or_default();
                stamp == changed && since >= TIMESTAMP_GRANULARITY
            }
            _ => false,
        };
        if !fresh {
            // Take the time before the directory is read, so that later changes are noticed.
            let read = SystemTime::now();
            match TemplateUsage::read(&self.templates) {
                Ok(now) => {
                    *usage = now;
                    usage.read = changed.map(|stamp| (stamp, read));
                }
                // One unreadable template must not fail the requests of all owners.
                Err(e) => {
                    tracing::warn!(error = %e, "cannot count templates, using the previous counts")
                }
            }
        }
        Ok(usage.of(owner))
    }

    /// Reserves quota for an owner. Owners without quotas get an unlimited permit.
    pub(super) async fn reserve(
        &self,
        owner: Option<&str>,
        request: QuotaRequest,
    ) -> Result<QuotaPermit, QuotaRefusal> {
        let quota = self.quota.lock().clone();
        match (owner, quota) {
            (Some(owner), Some(quota)) => quota.reserve(owner, request).await,
            _ => Ok(QuotaPermit::unlimited()),
        }
    }

    /// Returns the disk budget of an image import. The reservation is released with the last clone
    /// of the budget. By then, the image itself is counted.
    pub(super) async fn image_budget(
        &self,
        owner: Option<&str>,
    ) -> Result<DiskBudget, QuotaRefusal> {
        let permit = self.reserve(owner, QuotaRequest::default()).await?;
        let permit = Mutex::new(permit);
        Ok(DiskBudget::new(move |bytes| {
            let mut permit = permit.lock();
            // `None` for an owner without quota.
            let Some(held) = permit.disk_bytes() else {
                return Ok(());
            };
            // `bytes` is the total of the import, including the bytes that are already reserved.
            let grown = permit.grow(bytes.saturating_sub(held));
            grown.map_err(|refusal| refusal.message)
        }))
    }

    /// Reserves quota for a template with `names` and at most `max_bytes` of new images.
    pub(super) async fn reserve_template(
        &self,
        owner: Option<&str>,
        names: &[String],
        max_bytes: u64,
    ) -> Result<QuotaPermit, QuotaRefusal> {
        // Existing names are already counted.
        let new = names
            .iter()
            .filter(|name| self.templates.manifest(name).is_err());
        let amount = QuotaAmount {
            templates: new.count() as u64,
            disk_bytes: max_bytes,
            ..QuotaAmount::default()
        };
        let request = QuotaRequest {
            amount,
            // If less than `max_bytes` is free, the rest of the quota is reserved: `max_bytes` is
            // an upper bound, and builds check the image's size after writing it.
            disk_floor: Some(1),
        };
        self.reserve(owner, request).await
    }
}

impl Builder {
    /// Applies quotas of owners from now on.
    pub fn limit_owners(&self, quota: Arc<dyn OwnerQuota>) {
        self.0.uploads.limit_owners(quota.clone());
        *self.0.quota.lock() = Some(quota);
    }

    /// Returns the usage of `owner`: templates, builds and uploads.
    pub fn usage_of(&self, owner: &str) -> Result<BuildUsage, BuilderError> {
        let (templates, template_bytes) = self.0.templates_of(owner)?;
        let (uploads, upload_bytes) = self.0.uploads.usage_of(owner);
        Ok(BuildUsage {
            templates,
            template_bytes,
            uploads,
            upload_bytes,
            builds: self.0.records.unfinished_builds(owner)?,
        })
    }

    /// Returns a weak reference to the builder.
    pub fn downgrade(&self) -> WeakBuilder {
        WeakBuilder(Arc::downgrade(&self.0))
    }
}

/// Weak reference to a builder.
pub struct WeakBuilder(Weak<BuilderInner>);

impl WeakBuilder {
    /// Returns the builder, if it still exists.
    pub fn upgrade(&self) -> Option<Builder> {
        self.0.upgrade().map(Builder)
    }
}

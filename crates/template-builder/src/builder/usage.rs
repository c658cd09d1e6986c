//! Shares of the host that one owner's templates, builds and uploads have.

use super::records::{BuildRecords, RecordError};
use super::{Builder, BuilderError, BuilderInner, lock};
use jiffy_engine::Engine;
use jiffy_host::{OwnerQuota, QuotaAmount, QuotaPermit, QuotaRefusal, QuotaRequest};
use jiffy_image::{DiskBudget, Templates, Visibility};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime};

/// Time after a change of the templates' directory for which another change may have the same time stamp.
const TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(1);

/// Templates, builds and uploads of one owner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BuildUsage {
    /// Tags of its templates.
    pub templates: u64,
    /// Bytes of the images they are made of, each once. Images that a template of the host's owner has, too, are nobody's.
    pub template_bytes: u64,
    /// Uploaded files.
    pub uploads: u64,
    /// Their bytes, in blocks of 4 KiB.
    pub upload_bytes: u64,
    /// Builds that wait or run.
    pub builds: u64,
}

/// Templates of all owners at one moment.
#[derive(Debug, Default)]
pub(super) struct TemplateUsage {
    /// When the directory of templates had changed last, and when it was read.
    read: Option<(SystemTime, SystemTime)>,
    by_owner: HashMap<String, OwnerTemplates>,
    /// Images of the host's owner.
    of_host: HashSet<String>,
}

#[derive(Debug, Default)]
struct OwnerTemplates {
    count: u64,
    /// Bytes by checksum.
    images: HashMap<String, u64>,
}

impl TemplateUsage {
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

    /// Number of tags and bytes of images of `owner`.
    fn of(&self, owner: &str) -> (u64, u64) {
        let Some(own) = self.by_owner.get(owner) else {
            return (0, 0);
        };
        let images = own.images.iter();
        let charged = images.filter(|(sum, _)| !self.of_host.contains(*sum));
        (own.count, charged.map(|(_, bytes)| *bytes).sum())
    }
}

impl BuildRecords {
    /// Number of builds that `caller` asked for and that wait or run.
    fn builds_under_way(&self, caller: &str) -> Result<u64, RecordError> {
        self.with(|c| {
            let query = "SELECT count(*) FROM builds
                WHERE caller = ?1 AND status NOT IN ('ready', 'error')";
            let count: i64 = c
                .prepare_cached(query)?
                .query_row([caller], |row| row.get(0))?;
            Ok(u64::try_from(count).unwrap_or(0))
        })
    }
}

impl<E: Engine> BuilderInner<E> {
    /// Number of tags and bytes of images of `owner`. Read again when the directory of templates has changed.
    fn templates_of(&self, owner: &str) -> Result<(u64, u64), BuilderError> {
        let changed = self.templates.changed();
        let mut usage = lock(&self.template_usage);
        let fresh = match (usage.read, changed) {
            (Some((stamp, read)), Some(changed)) => {
                let since = read.duration_since(stamp).unwrap_or_default();
                stamp == changed && since >= TIMESTAMP_GRANULARITY
            }
            _ => false,
        };
        if !fresh {
            let read = SystemTime::now();
            match TemplateUsage::read(&self.templates) {
                Ok(now) => {
                    *usage = now;
                    usage.read = changed.map(|stamp| (stamp, read));
                }
                // A template that cannot be read is no reason to refuse everybody everything.
                Err(e) => tracing::warn!("templates are counted as they were: {e}"),
            }
        }
        Ok(usage.of(owner))
    }

    /// Room for `request` in the budget of the owner of a template.
    pub(super) async fn reserve(
        &self,
        owner: Option<&str>,
        request: QuotaRequest,
    ) -> Result<QuotaPermit, QuotaRefusal> {
        let quota = lock(&self.quota).clone();
        match (owner, quota) {
            (Some(owner), Some(quota)) => quota.reserve(owner, request).await,
            _ => Ok(QuotaPermit::unlimited()),
        }
    }

    /// Disk space for an image that `owner` imports. What is reserved is given back with the last
    /// copy, when the image counts.
    pub(super) async fn image_budget(
        &self,
        owner: Option<&str>,
    ) -> Result<DiskBudget, QuotaRefusal> {
        let permit = self.reserve(owner, QuotaRequest::default()).await?;
        let permit = Mutex::new(permit);
        Ok(DiskBudget::new(move |bytes| {
            let mut permit = lock(&permit);
            let Some(held) = permit.disk_bytes() else {
                return Ok(());
            };
            let grown = permit.grow(bytes.saturating_sub(held));
            grown.map_err(|refusal| refusal.message)
        }))
    }

    /// Room for a template with `names` whose new images have at most `most_bytes`.
    pub(super) async fn reserve_template(
        &self,
        owner: Option<&str>,
        names: &[String],
        most_bytes: u64,
    ) -> Result<QuotaPermit, QuotaRefusal> {
        let new = names
            .iter()
            .filter(|name| self.templates.manifest(name).is_err());
        let amount = QuotaAmount {
            templates: new.count() as u64,
            disk_bytes: most_bytes,
            ..QuotaAmount::default()
        };
        let request = QuotaRequest {
            amount,
            // Images are measured when they are written, and count then.
            disk_floor: Some(1),
        };
        self.reserve(owner, request).await
    }
}

impl<E: Engine> Builder<E> {
    /// Limits what is made for owners by their budgets from now on.
    pub fn limit_owners(&self, quota: Arc<dyn OwnerQuota>) {
        self.0.uploads.limit_owners(quota.clone());
        *lock(&self.0.quota) = Some(quota);
    }

    /// What templates, builds and uploads of `owner` take.
    pub fn usage_of(&self, owner: &str) -> Result<BuildUsage, BuilderError> {
        let (templates, template_bytes) = self.0.templates_of(owner)?;
        let (uploads, upload_bytes) = self.0.uploads.usage_of(owner);
        Ok(BuildUsage {
            templates,
            template_bytes,
            uploads,
            upload_bytes,
            builds: self.0.records.builds_under_way(owner)?,
        })
    }

    /// A handle that does not keep the builder.
    pub fn downgrade(&self) -> WeakBuilder<E> {
        WeakBuilder(Arc::downgrade(&self.0))
    }
}

/// The same builder, for as long as another holds it.
pub struct WeakBuilder<E: Engine>(Weak<BuilderInner<E>>);

impl<E: Engine> WeakBuilder<E> {
    /// The builder, if it is still there.
    pub fn upgrade(&self) -> Option<Builder<E>> {
        self.0.upgrade().map(Builder)
    }
}

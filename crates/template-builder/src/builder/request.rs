//! Requests for builds, and lookup of the templates and builds that an owner may change.

use super::records::{BuildRecord, BuildStatus, TemplateRecord, WantedSize};
use super::{Builder, BuilderError, DEFAULT_TAG, MAX_TAGS, job, printable};
use jiffy_engine_api::{IdentityError, is_id, is_reserved, new_id, new_token, now_ms};
use jiffy_image::Reference;
use jiffy_sandbox_manager::{QuotaAmount, QuotaRequest};

/// Request for a build.
#[derive(Debug, Clone, Default)]
pub struct BuildRequest {
    /// `name` or `name:tag`.
    pub name: String,
    /// Further tags.
    pub tags: Vec<String>,
    /// Size of the template's sandboxes.
    pub size: WantedSize,
}

impl Builder {
    /// Returns the template with this id or name if `owner` may change it. `None` stands for the
    /// host's owner, who may change all templates.
    pub fn owned_template(
        &self,
        which: &str,
        owner: Option<&str>,
    ) -> Result<TemplateRecord, BuilderError> {
        // The tag does not matter: all builds of a template belong to its owner.
        let word = which.split(':').next().unwrap_or_default();
        let is_owned = |t: &TemplateRecord| owner.is_none() || t.owner.as_deref() == owner;
        if is_id(word)
            && let Some(found) = self.template_with_id(word)?.filter(is_owned)
        {
            return Ok(found);
        }
        let (namespace, name) = match word.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (owner, word),
        };
        let name = name.to_ascii_lowercase();
        let found = self.template_named(namespace, &name)?.filter(is_owned);
        // Templates of other keys are reported as unknown, so that their names remain secret.
        found.ok_or_else(|| BuilderError::UnknownTemplate(printable(which)))
    }

    /// Returns a build of a template that `owner` may change.
    pub fn owned_build(
        &self,
        template: &str,
        build: &str,
        owner: Option<&str>,
    ) -> Result<(TemplateRecord, BuildRecord), BuilderError> {
        let template = self.owned_template(template, owner)?;
        let found = self.0.records.build(build)?;
        match found.filter(|b| b.template == template.id) {
            Some(build) => Ok((template, build)),
            None => Err(BuilderError::UnknownBuild {
                template: template.name,
                build: printable(build),
            }),
        }
    }

    /// Creates a build of a template in the namespace of `owner`. `None` stands for the host's
    /// owner. The build waits for its files and for its start. `caller` is the requesting key,
    /// which may act for the host's owner.
    pub fn request(
        &self,
        new: &BuildRequest,
        owner: Option<&str>,
        caller: Option<&str>,
    ) -> Result<(TemplateRecord, BuildRecord), BuilderError> {
        let (name, tag) = match new.name.split_once(':') {
            Some((name, tag)) => (name, Some(tag.to_owned())),
            None => (new.name.as_str(), None),
        };
        let name = name.to_ascii_lowercase();
        // A prefix with the caller's own namespace is accepted.
        let bare = name.split_once('/').filter(|(key, _)| Some(*key) == owner);
        let name = bare.map_or(name.clone(), |(_, bare)| bare.to_owned());
        check_name(&name)?;
        let template = TemplateRecord {
            id: new_id()?,
            name,
            owner: owner.map(str::to_owned),
            public: false,
            created_ms: now_ms(),
        };
        let mut tags: Vec<String> = Vec::new();
        for tag in tag.into_iter().chain(new.tags.iter().cloned()) {
            check_name(&job::tagged(&template.name, &tag))?;
            if !tags.contains(&tag) {
                tags.push(tag);
            }
        }
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned());
        }
        if tags.len() > MAX_TAGS {
            return Err(BuilderError::Tags);
        }
        // Check the name without the owner, because a key's own template would hide the stock
        // template.
        let reference = Reference::in_namespace(None, &template.name)?;
        if reference.is_stock() {
            return Err(BuilderError::Taken(template.name));
        }
        if is_reserved(&template.name) {
            return Err(BuilderError::Reserved(template.name));
        }
        // Reserves a build of the caller's quota until the database counts the build.
        let _permit = match (caller, self.0.quota.lock().clone()) {
            (Some(caller), Some(quota)) => Some(quota.try_reserve(caller, one_build())?),
            _ => None,
        };
        // Hold the lock until the build exists: limit and name are checked for one request at a
        // time.
        let _naming = self.0.names_lock.lock();
        self.0.check_waiting(caller)?;
        // Deletes a record whose template was removed outside of the builder.
        self.reconcile(self.0.records.template_by_name(owner, &template.name)?)?;
        let template = self.0.records.insert_template(&template)?;
        let now = now_ms();
        let build = BuildRecord {
            id: uuid()?,
            template: template.id.clone(),
            caller: caller.map(str::to_owned),
            tags,
            size: new.size,
            status: BuildStatus::Waiting,
            reason: None,
            steps: Vec::new(),
            version: None,
            created_ms: now,
            changed_ms: now,
        };
        self.0.records.insert_build(&build)?;
        Ok((template, build))
    }
}

/// Returns the quota request for one build.
fn one_build() -> QuotaRequest {
    QuotaRequest {
        amount: QuotaAmount {
            builds: 1,
            ..QuotaAmount::default()
        },
        disk_floor: None,
    }
}

/// Checks the syntax of `name` or `name:tag`.
pub(super) fn check_name(reference: &str) -> Result<(), BuilderError> {
    let parsed = Reference::parse(reference);
    parsed
        .map(drop)
        .map_err(|_| BuilderError::Name(printable(reference)))
}

/// Returns a random UUID in the format of version 4: digits 12 and 16 are the version and the
/// variant.
fn uuid() -> Result<String, IdentityError> {
    let token = new_token()?;
    // A token has 40 hexadecimal digits. The filter and the padding only guard the slices below.
    let digits: String = token.chars().filter(char::is_ascii_hexdigit).collect();
    let digits = format!("{digits:0<32}");
    let part = |from: usize, to: usize| digits.get(from..to).unwrap_or_default().to_owned();
    Ok(format!(
        "{}-{}-4{}-8{}-{}",
        part(0, 8),
        part(8, 12),
        part(13, 16),
        part(17, 20),
        part(20, 32)
    ))
}

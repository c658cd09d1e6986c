//! Calls of the API for sandboxes and snapshots.

use super::{Client, Listed, has_error_code};
use anyhow::bail;
use hyper::Method;
use jiffy_api_types::{
    EngineDescription, Forked, NetworkBody, NewVolumeMount, PauseSandbox, Prefetch, Process,
    Promoted, Proxy, RequestedBuild, ResumeFrom, ResumeSandbox, RolledBack, SandboxInfo,
    SandboxSize, SandboxState, Secret, Snapshot, SnapshotInfo, VerifiedSnapshot, Waited,
};
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Length of a complete id. Shorter ids may be prefixes.
const ID_LENGTH: usize = 20;
/// Header with the token for the next page of a list.
pub(super) const NEXT_PAGE_HEADER: &str = "x-next-token";

/// Request for a new sandbox.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct NewSandbox(jiffy_api_types::NewSandbox);

/// Settings that the creator of a sandbox selects.
#[derive(Debug, Clone, Default)]
pub struct SandboxSettings {
    /// Name of the sandbox.
    pub name: Option<String>,
    /// Metadata.
    pub metadata: BTreeMap<String, String>,
    /// True to pause the sandbox at its timeout instead of killing it.
    pub auto_pause: Option<bool>,
    /// False to discard the memory if the sandbox is paused at its timeout.
    pub auto_pause_memory: Option<bool>,
    /// Time without use in seconds after which the sandbox is paused. 0 means never. Defaults to
    /// the idle timeout of the template, or of the key.
    pub idle_timeout_s: Option<u64>,
    /// Internet access. Defaults to true.
    pub internet: Option<bool>,
    /// Private network to join.
    pub join: Option<String>,
    /// Isolation engine.
    pub engine: Option<String>,
    /// Memory to fetch before the start if the snapshot is only in the store.
    pub prefetch: Option<Prefetch>,
    /// Labels that the host must have.
    pub host_labels: BTreeMap<String, String>,
    /// Volumes to mount.
    pub volumes: Vec<NewVolumeMount>,
}

impl NewSandbox {
    /// Creates the request for a sandbox without a timeout. `source` is a template or the id of a
    /// snapshot.
    pub fn of(source: impl Into<String>, env: BTreeMap<String, String>) -> Self {
        Self(jiffy_api_types::NewSandbox {
            template_id: source.into(),
            // -1 means no timeout.
            timeout: Some(-1),
            env_vars: Some(env),
            ..Default::default()
        })
    }

    /// Sets the timeout in seconds.
    pub fn with_timeout_s(mut self, seconds: u32) -> Self {
        self.0.timeout = Some(seconds.into());
        self
    }

    /// Applies settings.
    pub fn with_settings(mut self, settings: SandboxSettings) -> Self {
        self.0.name = settings.name;
        self.0.metadata = Some(settings.metadata);
        self.0.auto_pause = settings.auto_pause;
        self.0.auto_pause_memory = settings.auto_pause_memory;
        self.0.idle_timeout = settings.idle_timeout_s;
        self.0.allow_internet_access = settings.internet;
        self.0.network = settings.join.map(NetworkBody::joining);
        self.0.engine = settings.engine;
        self.0.prefetch = settings.prefetch;
        let labels = Some(settings.host_labels);
        self.0.host_labels = labels.filter(|labels| !labels.is_empty());
        let volumes = Some(settings.volumes);
        self.0.volume_mounts = volumes.filter(|volumes| !volumes.is_empty());
        self
    }

    /// Sets the timeout, rounded up to whole seconds.
    pub fn with_timeout(mut self, time: Duration) -> Self {
        let seconds = time.as_millis().div_ceil(1000);
        // The daemon rejects an excessive timeout.
        self.0.timeout = Some(i64::try_from(seconds).unwrap_or(i64::MAX));
        self
    }

    /// Sets certificate authorities and a proxy.
    pub fn with_site(mut self, site: SiteSettings) -> Self {
        let pem: String = site.authorities.into_iter().map(|a| a.pem).collect();
        self.0.ca_certificates = Some(pem).filter(|pem| !pem.is_empty());
        self.0.proxy = site.proxy.map(|proxy| Proxy {
            url: proxy.url,
            no_proxy: Some(proxy.no_proxy),
        });
        self
    }

    /// Sets the size. Missing values default to the size of the template.
    pub fn with_partial_size(
        mut self,
        vcpus: Option<u8>,
        memory_mib: Option<u32>,
        disk_mib: Option<u64>,
    ) -> Self {
        self.0.cpu_count = vcpus;
        self.0.memory_mb = memory_mib;
        self.0.disk_size_mb = disk_mib;
        self
    }

    /// Sets the complete size.
    pub fn with_size(self, size: SandboxSize) -> Self {
        self.with_partial_size(Some(size.vcpus), Some(size.memory_mib), Some(size.disk_mib))
    }
}

/// Sandbox in a response of the API.
#[derive(Debug, Clone, Deserialize)]
pub struct Sandbox {
    /// Record of the sandbox.
    #[serde(rename = "jiffy")]
    pub record: SandboxInfo,
    /// Access token of the agent. `None` if the agent requires none, or if the caller may not use
    /// it.
    #[serde(rename = "envdAccessToken", default)]
    pub token: Option<String>,
}

/// Checks that an id or a name is valid in a path.
pub(super) fn path_segment(id: &str) -> anyhow::Result<&str> {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    anyhow::ensure!(
        // Other characters would change the path.
        !id.is_empty() && id.chars().all(is_valid),
        "`{id}` is not a valid id: list ids with `jiffy ls` and `jiffy snapshots`"
    );
    Ok(id)
}

/// Returns the item whose id starts with `id`. Fails if several items match.
fn unique_by_prefix<T>(
    all: Vec<T>,
    id: &str,
    id_of: impl Fn(&T) -> &str,
) -> anyhow::Result<Option<T>> {
    let mut matches: Vec<T> = all
        .into_iter()
        .filter(|item| id_of(item).starts_with(id))
        .collect();
    if matches.len() > 1 {
        let names: Vec<&str> = matches.iter().map(&id_of).collect();
        bail!(
            "`{id}` is ambiguous, it matches {}: use a longer prefix",
            names.join(" or ")
        );
    }
    Ok(matches.pop())
}

impl From<jiffy_api_types::Sandbox> for Sandbox {
    fn from(sandbox: jiffy_api_types::Sandbox) -> Self {
        Self {
            record: sandbox.added.jiffy,
            token: sandbox.envd_access_token,
        }
    }
}

impl Client {
    /// Returns all items of a paginated list. `path` has a query.
    pub async fn all_pages<T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
    ) -> anyhow::Result<Vec<T>> {
        let mut all = Vec::new();
        let mut next = String::new();
        loop {
            // Ascending order: items that are added meanwhile appear on later pages.
            let page = format!("{path}&order=asc{next}");
            let (headers, mut items) = self
                .call_with_headers::<Vec<T>>(Method::GET, &page, &())
                .await?;
            all.append(&mut items);
            match headers
                .get(NEXT_PAGE_HEADER)
                .and_then(|token| token.to_str().ok())
            {
                // Tokens are base64 for URLs, so they need no escaping.
                Some(token) => next = format!("&nextToken={token}"),
                None => return Ok(all),
            }
        }
    }

    /// Returns the secrets of the caller, without their values.
    pub async fn secrets(&self) -> anyhow::Result<Vec<Secret>> {
        self.all_pages("/secrets?limit=100").await
    }

    /// Returns the engines of the daemon.
    pub async fn engines(&self) -> anyhow::Result<Vec<EngineDescription>> {
        self.call(Method::GET, "/engines", &()).await
    }

    /// Returns all sandboxes, including killed sandboxes if `killed` is set.
    pub async fn listed_sandboxes(&self, killed: bool) -> anyhow::Result<Vec<Listed<SandboxInfo>>> {
        let killed = if killed { ",killed" } else { "" };
        let path = format!("/v2/sandboxes?state=creating,running,paused,broken{killed}");
        self.all_pages(&path).await
    }

    /// Returns the records of all sandboxes, including killed sandboxes if `killed` is set.
    pub async fn sandboxes(&self, killed: bool) -> anyhow::Result<Vec<SandboxInfo>> {
        let all = self.listed_sandboxes(killed).await?;
        Ok(all.into_iter().map(|s| s.record).collect())
    }

    /// Returns the id of a sandbox for a prefix of the id. Names and complete ids are returned
    /// unchanged. A local daemon resolves prefixes itself.
    async fn full_id(&self, id: &str) -> anyhow::Result<String> {
        path_segment(id)?;
        // Only the host's owner may use prefixes in the API, so prefixes are resolved here for
        // other daemons.
        if !self.is_remote() || id.len() >= ID_LENGTH {
            return Ok(id.to_owned());
        }
        // Killed sandboxes cannot be the target of an operation.
        let all = self.sandboxes(false).await?;
        if all.iter().any(|s| s.name.as_deref() == Some(id)) {
            // The daemon resolves the name of the sandbox.
            return Ok(id.to_owned());
        }
        let sandbox = unique_by_prefix(all, id, |s| &s.id)?;
        // The daemon reports a missing sandbox.
        Ok(sandbox.map_or_else(|| id.to_owned(), |s| s.id))
    }

    /// Returns whether template `name` exists.
    pub async fn has_template(&self, name: &str) -> anyhow::Result<bool> {
        let path = format!("/templates/aliases/{}", path_segment(name)?);
        match self.call::<Value>(Method::GET, &path, &()).await {
            Ok(_) => Ok(true),
            Err(e) if has_error_code(&e, "template_not_found") => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Starts the import of an image of a registry as template `name`. Returns the path of the
    /// build.
    pub async fn import_image(&self, name: &str, image: &str) -> anyhow::Result<String> {
        let body = json!({ "name": name });
        let requested: RequestedBuild = self.call(Method::POST, "/v3/templates", &body).await?;
        let (template, build) = (&requested.template_id, &requested.build_id);
        let path = format!("/v2/templates/{template}/builds/{build}");
        let spec = json!({ "fromImage": image, "steps": [] });
        let () = self.call(Method::POST, &path, &spec).await?;
        Ok(format!("/templates/{template}/builds/{build}"))
    }

    /// Returns a sandbox by its id, a prefix of the id, or its name.
    pub async fn sandbox(&self, id: &str) -> anyhow::Result<Sandbox> {
        let path = format!("/sandboxes/{}", self.full_id(id).await?);
        self.call(Method::GET, &path, &()).await
    }

    /// Returns a sandbox by its complete id, in the form of a list item.
    pub async fn listed_sandbox(&self, id: &str) -> anyhow::Result<Listed<SandboxInfo>> {
        let path = format!("/sandboxes/{}", path_segment(id)?);
        self.call(Method::GET, &path, &()).await
    }

    /// Creates a sandbox.
    pub async fn create(&self, request: &NewSandbox) -> anyhow::Result<Sandbox> {
        self.call(Method::POST, "/v2/sandboxes", request).await
    }

    pub(super) async fn call_sandbox<T: serde::de::DeserializeOwned>(
        &self,
        id: &str,
        operation: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let path = format!("/sandboxes/{}/{operation}", self.full_id(id).await?);
        self.call(Method::POST, &path, body).await
    }

    /// Pauses a sandbox. If `durable` is set, waits until the store has its memory.
    pub async fn pause(&self, id: &str, durable: bool) -> anyhow::Result<()> {
        let disk_only = false;
        self.pause_with(id, durable, disk_only).await
    }

    /// Like [`Self::pause`]. If `disk_only` is set, the memory is discarded. With `durable`, the
    /// call returns when the store has the memory.
    pub async fn pause_with(&self, id: &str, durable: bool, disk_only: bool) -> anyhow::Result<()> {
        let body = PauseSandbox {
            memory: disk_only.then_some(false),
            durable: Some(durable),
            require_healthy_guest: None,
        };
        self.call_sandbox(id, "pause", &body).await
    }

    /// Resumes a sandbox.
    pub async fn resume(&self, id: &str) -> anyhow::Result<SandboxInfo> {
        let sandbox: Sandbox = self.call_sandbox(id, "resume", &Value::Null).await?;
        Ok(sandbox.record)
    }

    /// Resumes a sandbox. With `from_stored`, uses its newest stored state if its host was lost.
    /// With `reboot`, discards its memory. Returns whether the state may be older than the state on
    /// the lost host.
    pub async fn resume_with(
        &self,
        id: &str,
        from_stored: bool,
        reboot: bool,
    ) -> anyhow::Result<(SandboxInfo, bool)> {
        let path = format!("/sandboxes/{}/resume", self.full_id(id).await?);
        let body = ResumeSandbox {
            from: from_stored.then_some(ResumeFrom::Stored),
            memory: reboot.then_some(false),
            ..ResumeSandbox::default()
        };
        let (headers, sandbox): (_, Sandbox) =
            self.call_with_headers(Method::POST, &path, &body).await?;
        Ok((sandbox.record, headers.contains_key("jiffy-resumed-from")))
    }

    /// Creates `count` children of a sandbox.
    pub async fn fork(&self, id: &str, count: usize) -> anyhow::Result<Vec<Forked>> {
        self.call_sandbox(id, "fork", &json!({ "count": count }))
            .await
    }

    /// Promotes a child of a fork, which removes its siblings. Returns the removed siblings.
    pub async fn promote(&self, id: &str) -> anyhow::Result<Vec<SandboxInfo>> {
        let removed: Promoted = self.call_sandbox(id, "promote", &Value::Null).await?;
        Ok(removed.jiffy)
    }

    /// Rolls back a sandbox to a snapshot.
    pub async fn rollback(&self, id: &str, snapshot: &str) -> anyhow::Result<SandboxInfo> {
        let snapshot = if self.is_remote() && snapshot.len() < ID_LENGTH {
            self.snapshot(snapshot).await?.id
        } else {
            // The id may be the id of an ancestor, which is possibly not in the list of snapshots.
            snapshot.to_owned()
        };
        let body = json!({ "snapshotID": snapshot });
        let sandbox: RolledBack = self.call_sandbox(id, "rollback", &body).await?;
        Ok(sandbox.jiffy)
    }

    /// Renames a sandbox. `None` removes the name.
    pub async fn rename(&self, id: &str, name: Option<&str>) -> anyhow::Result<SandboxInfo> {
        let path = format!("/sandboxes/{}", self.full_id(id).await?);
        let body = json!({ "name": name });
        let sandbox: Sandbox = self.call(Method::PATCH, &path, &body).await?;
        Ok(sandbox.record)
    }

    /// Stops all processes of a sandbox and runs the start command of its template. Processes are
    /// killed after `grace`.
    pub async fn restart(&self, id: &str, grace: Duration) -> anyhow::Result<SandboxInfo> {
        let body = json!({ "graceMs": grace.as_millis() });
        let sandbox: Sandbox = self.call_sandbox(id, "restart", &body).await?;
        Ok(sandbox.record)
    }

    /// Waits at most `limit` until a sandbox is `ended`, `running` or `paused`. Returns its record
    /// at the end of the wait. This client does not resolve a prefix of the id to the complete id.
    pub async fn wait(
        &self,
        id: &str,
        state: &str,
        limit: Duration,
    ) -> anyhow::Result<SandboxInfo> {
        // Round up: 0 would not wait at all.
        let seconds = limit.as_secs_f64().ceil();
        let path = format!(
            "/sandboxes/{}/wait?for={state}&seconds={seconds}",
            path_segment(id)?
        );
        let response: Waited = self.call(Method::GET, &path, &()).await?;
        Ok(response.jiffy)
    }

    /// Kills a sandbox, and removes its record if `forget` is set. Returns the last record.
    pub async fn kill(&self, id: &str, forget: bool) -> anyhow::Result<SandboxInfo> {
        // Read the record first: it may no longer exist after the sandbox is killed.
        let mut record = match self.sandbox(id).await {
            Ok(sandbox) => sandbox.record,
            // The call for one sandbox rejects broken sandboxes, but lists have them.
            Err(e) if has_error_code(&e, "sandbox_broken") => {
                match unique_by_prefix(self.sandboxes(false).await?, id, |s| &s.id)? {
                    Some(record) => record,
                    None => return Err(e),
                }
            }
            Err(e) => return Err(e),
        };
        self.delete(&record.id, forget).await?;
        // The record was read before the sandbox was killed.
        record.state = SandboxState::Killed;
        Ok(record)
    }

    /// Kills a sandbox by its complete id, and removes its record if `forget` is set.
    pub async fn delete(&self, id: &str, forget: bool) -> anyhow::Result<()> {
        let path = format!("/sandboxes/{}?forget={forget}", path_segment(id)?);
        self.call(Method::DELETE, &path, &()).await
    }

    /// Returns the last lines of `log`, a log of a sandbox.
    pub async fn last_lines<T: serde::de::DeserializeOwned>(
        &self,
        id: &str,
        log: &str,
        lines: u16,
    ) -> anyhow::Result<T> {
        let path = format!("/sandboxes/{}/{log}?limit={lines}", self.full_id(id).await?);
        self.call(Method::GET, &path, &()).await
    }

    /// Returns the process of a sandbox. Only the owner of the host has access.
    pub async fn process(&self, id: &str) -> anyhow::Result<Process> {
        let path = format!("/sandboxes/{}/process", path_segment(id)?);
        self.call(Method::GET, &path, &()).await
    }

    /// Returns all snapshots, or the snapshots of a sandbox and its ancestors.
    pub async fn snapshots(
        &self,
        sandbox: Option<&str>,
    ) -> anyhow::Result<Vec<Listed<SnapshotInfo>>> {
        let mut path = "/snapshots?all=true".to_owned();
        if let Some(id) = sandbox {
            path += &format!("&sandboxID={}", self.sandbox(id).await?.record.id);
        }
        self.all_pages(&path).await
    }

    /// Returns a snapshot by its id, a prefix of the id, or its name.
    pub async fn snapshot(&self, id: &str) -> anyhow::Result<SnapshotInfo> {
        let path = format!("/snapshots/{}", path_segment(id)?);
        match self.call::<Snapshot>(Method::GET, &path, &()).await {
            Ok(snapshot) => Ok(snapshot.jiffy),
            // A local daemon resolves prefixes itself.
            Err(e) if self.is_remote() && has_error_code(&e, "snapshot_not_found") => {
                let snapshot = unique_by_prefix(self.snapshots(None).await?, id, |s| &s.id)?;
                snapshot.map(|snapshot| snapshot.record).ok_or(e)
            }
            Err(e) => Err(e),
        }
    }

    /// Removes a snapshot. Returns its record.
    pub async fn remove_snapshot(&self, id: &str) -> anyhow::Result<SnapshotInfo> {
        let record = self.snapshot(id).await?;
        let path = format!("/templates/{}", record.id);
        let () = self.call(Method::DELETE, &path, &()).await?;
        Ok(record)
    }

    /// Verifies the checksums of a snapshot and its ancestors.
    pub async fn verify(&self, id: &str) -> anyhow::Result<Vec<VerifiedSnapshot>> {
        let path = format!("/snapshots/{}/verify", self.snapshot(id).await?.id);
        self.call(Method::POST, &path, &()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ambiguous_id_prefix_is_rejected() {
        let all = || vec!["abc", "abd", "x"];
        let find = |id| unique_by_prefix(all(), id, |s| s);
        assert_eq!(find("abc").unwrap(), Some("abc"));
        assert_eq!(find("x").unwrap(), Some("x"));
        assert_eq!(find("q").unwrap(), None);
        assert!(find("ab").unwrap_err().to_string().contains("abc or abd"));
        assert!(path_segment("../x").is_err() && path_segment("").is_err());
    }
}

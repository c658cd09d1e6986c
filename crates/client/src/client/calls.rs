//! Calls to a control plane.

use super::{Client, Listed, is_refusal};
use anyhow::bail;
use hyper::Method;
use jiffy_api_types::{
    EngineDescription, Forked, Prefetch, Process, Promoted, Proxy, RolledBack, SandboxInfo,
    SandboxSize, SandboxState, Snapshot, SnapshotInfo, VerifiedSnapshot, Waited,
};
use jiffy_proto::agent::SiteSettings;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Letters of a whole id, which needs no search.
const ID_LENGTH: usize = 20;
/// Header with the token of a list's next page.
const NEXT_PAGE_HEADER: &str = "x-next-token";

/// Request for a new sandbox.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct NewSandbox(jiffy_api_types::NewSandbox);

/// Settings chosen by a sandbox's creator.
#[derive(Debug, Clone, Default)]
pub struct SandboxSettings {
    /// Name of the sandbox.
    pub name: Option<String>,
    /// Metadata.
    pub metadata: BTreeMap<String, String>,
    /// Pause the sandbox at its timeout instead of killing it.
    pub auto_pause: Option<bool>,
    /// Access to the internet. Defaults to true.
    pub internet: Option<bool>,
    /// Engine that isolates the sandbox.
    pub engine: Option<String>,
    /// Memory that is fetched in advance if its snapshot is in the store.
    pub prefetch: Option<Prefetch>,
}

impl NewSandbox {
    /// A sandbox of a template, or of a snapshot by its id, without a timeout.
    pub fn of(source: impl Into<String>, env: BTreeMap<String, String>) -> Self {
        Self(jiffy_api_types::NewSandbox {
            template_id: source.into(),
            timeout: Some(-1),
            env_vars: Some(env),
            ..Default::default()
        })
    }

    /// The same that is killed after this many seconds, unless its time is extended.
    pub fn with_timeout_s(mut self, seconds: u32) -> Self {
        self.0.timeout = Some(seconds.into());
        self
    }

    /// The same with these settings.
    pub fn with_settings(mut self, settings: SandboxSettings) -> Self {
        self.0.name = settings.name;
        self.0.metadata = Some(settings.metadata);
        self.0.auto_pause = settings.auto_pause;
        self.0.allow_internet_access = settings.internet;
        self.0.engine = settings.engine;
        self.0.prefetch = settings.prefetch;
        self
    }

    /// The same with a time limit, in whole seconds.
    pub fn with_timeout(mut self, time: Duration) -> Self {
        let whole = time.as_millis().div_ceil(1000);
        self.0.timeout = Some(i64::try_from(whole).unwrap_or(i64::MAX));
        self
    }

    /// The same in a network with authorities and a proxy of its own.
    pub fn with_site(mut self, site: SiteSettings) -> Self {
        let pem: String = site.authorities.into_iter().map(|a| a.pem).collect();
        self.0.ca_certificates = Some(pem).filter(|pem| !pem.is_empty());
        self.0.proxy = site.proxy.map(|proxy| Proxy {
            url: proxy.url,
            no_proxy: Some(proxy.no_proxy),
        });
        self
    }

    /// The same of this size; what is not given is the template's to say.
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

    /// The same of exactly this size.
    pub fn with_size(self, size: SandboxSize) -> Self {
        self.with_partial_size(Some(size.vcpus), Some(size.memory_mib), Some(size.disk_mib))
    }
}

/// A sandbox: what all answers about one have in common.
#[derive(Debug, Clone, Deserialize)]
pub struct Sandbox {
    /// Details.
    #[serde(rename = "jiffy")]
    pub record: SandboxInfo,
    /// Token that its agent requires. `None` if the agent requires none, or the caller may not use
    /// it.
    #[serde(rename = "envdAccessToken", default)]
    pub token: Option<String>,
}

/// An id or name as it can stand in a path.
fn path_segment(id: &str) -> anyhow::Result<&str> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    anyhow::ensure!(
        !id.is_empty() && id.chars().all(good),
        "`{id}` is not an id: `jiffy ls` and `jiffy snapshots` show those there are"
    );
    Ok(id)
}

/// The only one whose id begins with `id`.
fn unique_by_prefix<T>(
    all: Vec<T>,
    id: &str,
    id_of: impl Fn(&T) -> &str,
) -> anyhow::Result<Option<T>> {
    let mut found: Vec<T> = all
        .into_iter()
        .filter(|item| id_of(item).starts_with(id))
        .collect();
    if found.len() > 1 {
        let names: Vec<&str> = found.iter().map(&id_of).collect();
        bail!(
            "`{id}` could be {}: give more of the id",
            names.join(" or ")
        );
    }
    Ok(found.pop())
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
    /// All of a list that comes in pages.
    async fn all_pages<T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
    ) -> anyhow::Result<Vec<T>> {
        let mut all = Vec::new();
        let mut next = String::new();
        loop {
            let page = format!("{path}&order=asc{next}");
            let (headers, mut items) = self
                .call_with_headers::<Vec<T>>(Method::GET, &page, &())
                .await?;
            all.append(&mut items);
            match headers
                .get(NEXT_PAGE_HEADER)
                .and_then(|token| token.to_str().ok())
            {
                Some(token) => next = format!("&nextToken={token}"),
                None => return Ok(all),
            }
        }
    }

    /// Engines of the daemon.
    pub async fn engines(&self) -> anyhow::Result<Vec<EngineDescription>> {
        self.call(Method::GET, "/engines", &()).await
    }

    /// All sandboxes, those that were killed too if `killed`.
    pub async fn listed_sandboxes(&self, killed: bool) -> anyhow::Result<Vec<Listed<SandboxInfo>>> {
        let also = if killed { ",killed" } else { "" };
        let path = format!("/v2/sandboxes?state=creating,running,paused,broken{also}");
        self.all_pages(&path).await
    }

    /// Records of all sandboxes, those that were killed too if `killed`.
    pub async fn sandboxes(&self, killed: bool) -> anyhow::Result<Vec<SandboxInfo>> {
        let all = self.listed_sandboxes(killed).await?;
        Ok(all.into_iter().map(|s| s.record).collect())
    }

    /// The whole id of a sandbox that is named by the beginning of it, or by its name. Only the
    /// owner of a host may leave that to its daemon.
    async fn whole_id(&self, id: &str) -> anyhow::Result<String> {
        path_segment(id)?;
        if !self.is_remote() || id.len() >= ID_LENGTH {
            return Ok(id.to_owned());
        }
        let all = self.sandboxes(false).await?;
        if all.iter().any(|s| s.name.as_deref() == Some(id)) {
            // The daemon knows whose it is.
            return Ok(id.to_owned());
        }
        let found = unique_by_prefix(all, id, |s| &s.id)?;
        // A missing template is for the daemon to report.
        Ok(found.map_or_else(|| id.to_owned(), |s| s.id))
    }

    /// True if a template of this name is built.
    pub async fn has_template(&self, name: &str) -> anyhow::Result<bool> {
        let path = format!("/templates/aliases/{}", path_segment(name)?);
        match self.call::<Value>(Method::GET, &path, &()).await {
            Ok(_) => Ok(true),
            Err(e) if is_refusal(&e, "template_not_found") => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// A sandbox by its id or the beginning of it.
    pub async fn sandbox(&self, id: &str) -> anyhow::Result<Sandbox> {
        let path = format!("/sandboxes/{}", self.whole_id(id).await?);
        self.call(Method::GET, &path, &()).await
    }

    /// Makes one.
    pub async fn create(&self, wanted: &NewSandbox) -> anyhow::Result<Sandbox> {
        self.call(Method::POST, "/v2/sandboxes", wanted).await
    }

    pub(super) async fn call_sandbox<T: serde::de::DeserializeOwned>(
        &self,
        id: &str,
        operation: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let path = format!("/sandboxes/{}/{operation}", self.whole_id(id).await?);
        self.call(Method::POST, &path, body).await
    }

    /// Puts one to sleep; if `durable`, returns when the store has what it sleeps in.
    pub async fn pause(&self, id: &str, durable: bool) -> anyhow::Result<()> {
        let body = json!({ "durable": durable });
        self.call_sandbox(id, "pause", &body).await
    }

    /// Wakes one.
    pub async fn resume(&self, id: &str) -> anyhow::Result<SandboxInfo> {
        let now: Sandbox = self.call_sandbox(id, "resume", &Value::Null).await?;
        Ok(now.record)
    }

    /// Makes `count` children of one.
    pub async fn fork(&self, id: &str, count: usize) -> anyhow::Result<Vec<Forked>> {
        self.call_sandbox(id, "fork", &json!({ "count": count }))
            .await
    }

    /// Keeps a child and removes its siblings; tells which went.
    pub async fn promote(&self, id: &str) -> anyhow::Result<Vec<SandboxInfo>> {
        let gone: Promoted = self.call_sandbox(id, "promote", &Value::Null).await?;
        Ok(gone.jiffy)
    }

    /// Puts one back to a snapshot.
    pub async fn rollback(&self, id: &str, snapshot: &str) -> anyhow::Result<SandboxInfo> {
        let snapshot = match self.is_remote() && snapshot.len() < ID_LENGTH {
            true => self.snapshot(snapshot).await?.id,
            // A sandbox may go back to any it descends from, also to those that no list shows.
            false => snapshot.to_owned(),
        };
        let body = json!({ "snapshotID": snapshot });
        let now: RolledBack = self.call_sandbox(id, "rollback", &body).await?;
        Ok(now.jiffy)
    }

    /// Gives one another name, or none.
    pub async fn rename(&self, id: &str, name: Option<&str>) -> anyhow::Result<SandboxInfo> {
        let path = format!("/sandboxes/{}", self.whole_id(id).await?);
        let body = json!({ "name": name });
        let now: Sandbox = self.call(Method::PATCH, &path, &body).await?;
        Ok(now.record)
    }

    /// Ends its processes, which have `grace` to do so by themselves, and starts what its template
    /// starts.
    pub async fn restart(&self, id: &str, grace: Duration) -> anyhow::Result<SandboxInfo> {
        let body = json!({ "graceMs": grace.as_millis() });
        let now: Sandbox = self.call_sandbox(id, "restart", &body).await?;
        Ok(now.record)
    }

    /// Waits until one is `ended`, `running` or `paused`, at most so long; tells what it is then.
    pub async fn wait(
        &self,
        id: &str,
        wanted: &str,
        limit: Duration,
    ) -> anyhow::Result<SandboxInfo> {
        let seconds = limit.as_secs_f64().ceil();
        let path = format!(
            "/sandboxes/{}/wait?for={wanted}&seconds={seconds}",
            path_segment(id)?
        );
        let answer: Waited = self.call(Method::GET, &path, &()).await?;
        Ok(answer.jiffy)
    }

    /// Ends a sandbox, and forgets it if `forget`; tells what it was, as ended.
    pub async fn kill(&self, id: &str, forget: bool) -> anyhow::Result<SandboxInfo> {
        let mut record = match self.sandbox(id).await {
            Ok(sandbox) => sandbox.record,
            // Those of others that are broken are only listed.
            Err(e) if is_refusal(&e, "sandbox_broken") => {
                match unique_by_prefix(self.sandboxes(false).await?, id, |s| &s.id)? {
                    Some(record) => record,
                    None => return Err(e),
                }
            }
            Err(e) => return Err(e),
        };
        self.delete(&record.id, forget).await?;
        record.state = SandboxState::Killed;
        Ok(record)
    }

    /// The same by a whole id, without a look.
    pub async fn delete(&self, id: &str, forget: bool) -> anyhow::Result<()> {
        let path = format!("/sandboxes/{}?forget={forget}", path_segment(id)?);
        self.call(Method::DELETE, &path, &()).await
    }

    /// The last lines of what a sandbox keeps under `what`.
    pub async fn last_lines<T: serde::de::DeserializeOwned>(
        &self,
        id: &str,
        what: &str,
        lines: u16,
    ) -> anyhow::Result<T> {
        let path = format!(
            "/sandboxes/{}/{what}?limit={lines}",
            self.whole_id(id).await?
        );
        self.call(Method::GET, &path, &()).await
    }

    /// The process behind a sandbox; only the owner of a host is told.
    pub async fn process(&self, id: &str) -> anyhow::Result<Process> {
        let path = format!("/sandboxes/{}/process", path_segment(id)?);
        self.call(Method::GET, &path, &()).await
    }

    /// All snapshots that there are for us, or those of a sandbox and what it descends from.
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

    /// A snapshot by its id, the beginning of it, or its name.
    pub async fn snapshot(&self, id: &str) -> anyhow::Result<SnapshotInfo> {
        let path = format!("/snapshots/{}", path_segment(id)?);
        match self.call::<Snapshot>(Method::GET, &path, &()).await {
            Ok(found) => Ok(found.jiffy),
            Err(e) if self.is_remote() && is_refusal(&e, "snapshot_not_found") => {
                let found = unique_by_prefix(self.snapshots(None).await?, id, |s| &s.id)?;
                found.map(|found| found.record).ok_or(e)
            }
            Err(e) => Err(e),
        }
    }

    /// Removes a snapshot; tells what it was.
    pub async fn remove_snapshot(&self, id: &str) -> anyhow::Result<SnapshotInfo> {
        let record = self.snapshot(id).await?;
        let path = format!("/templates/{}", record.id);
        let () = self.call(Method::DELETE, &path, &()).await?;
        Ok(record)
    }

    /// Compares a snapshot, and all it needs, with its seal.
    pub async fn verify(&self, id: &str) -> anyhow::Result<Vec<VerifiedSnapshot>> {
        let path = format!("/snapshots/{}/verify", self.snapshot(id).await?.id);
        self.call(Method::POST, &path, &()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_prefix_names_one_sandbox_or_is_refused() {
        let all = || vec!["abc", "abd", "x"];
        let find = |id| unique_by_prefix(all(), id, |s| s);
        assert_eq!(find("abc").unwrap(), Some("abc"));
        assert_eq!(find("x").unwrap(), Some("x"));
        assert_eq!(find("q").unwrap(), None);
        assert!(find("ab").unwrap_err().to_string().contains("abc or abd"));
        assert!(path_segment("../x").is_err() && path_segment("").is_err());
    }
}

//! Record of a function on disk: settings and versions. A deployment is committed by replacing this
//! record.
//!
//! The *world* of a module is the interface between the module and its host. A *sandbox key* is a
//! credential that a deployment grants to a function, so that the function can use sandboxes. A
//! *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway.

use crate::egress::AllowList;
use crate::function_error::FunctionError;
use crate::owner::is_name;
use crate::sandbox_key::{SandboxKey, is_set_by_key};
use crate::schedule::Schedule;
use jiffy_proto::function::{ControlRequest, DirectAccess, LoadSettings, World};
use jiffy_proto::internal::{InternalOrigin, is_api_host};
use serde::{Deserialize, Serialize};

/// Maximum number of versions retained per function.
pub const MAX_VERSIONS: usize = 5;
/// Maximum size of a function's environment as JSON, in bytes. The environment is part of one
/// control message, together with the other settings.
const MAX_ENV_BYTES: usize = 32 << 10;

/// Function and its versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// Id of the API key that owns the function. `None` if the operator owns it.
    pub owner: Option<String>,
    /// Name, unique per owner.
    pub name: String,
    /// True if the function answers requests.
    pub enabled: bool,
    /// True if the function answers requests without a key.
    pub public: bool,
    /// Limits, environment, egress.
    pub settings: LoadSettings,
    /// Schedule of calls in cron notation.
    #[serde(default)]
    pub schedule: Option<String>,
    /// Sandbox key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_key: Option<SandboxKey>,
    /// Number of the active version.
    pub answering: u64,
    /// Versions, oldest first.
    pub versions: Vec<VersionRecord>,
    /// Number of the next version.
    pub next_version: u64,
    /// Number of changes by deployments and rollbacks so far. A process that has loaded another
    /// revision loads the function again.
    pub revision: u64,
    /// Time of the first deployment in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last change in milliseconds since 1970.
    pub updated_ms: u64,
}

/// Version of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRecord {
    /// Number, starting at 1.
    pub number: u64,
    /// Digest of the module (BLAKE3) in hexadecimal digits.
    pub module: String,
    /// Size of the module in bytes.
    pub bytes: u64,
    /// World of the module.
    pub world: World,
    /// Compiled file.
    pub artifact: Artifact,
    /// Time of the deployment in milliseconds since 1970.
    pub created_ms: u64,
}

/// Compiled file of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Fingerprint of the engine that the file requires.
    pub engine: String,
    /// Digest of the file in hexadecimal digits.
    pub digest: String,
    /// Size of the file in bytes.
    pub bytes: u64,
}

impl FunctionRecord {
    /// Returns the active version.
    #[must_use]
    pub fn version(&self) -> Option<&VersionRecord> {
        self.find(self.answering)
    }

    /// Returns the version with this number.
    #[must_use]
    pub fn find(&self, number: u64) -> Option<&VersionRecord> {
        self.versions.iter().find(|v| v.number == number)
    }

    /// Returns the settings for the process, including the environment variables of a sandbox key.
    pub(crate) fn load_settings(&self) -> LoadSettings {
        let mut settings = self.settings.clone();
        if let Some(key) = &self.sandbox_key {
            settings.env.extend(key.env(&self.name));
        }
        settings
    }

    /// Returns the origin of the function's connections to the control plane. `None` without a
    /// sandbox key.
    pub(crate) fn origin(&self) -> Option<InternalOrigin> {
        let key = self.sandbox_key.as_ref()?;
        Some(key.origin(self.owner.as_deref(), &self.name))
    }

    /// Returns the control request that sets whether the function answers direct requests.
    pub(crate) fn publish_request(&self) -> ControlRequest {
        ControlRequest::Publish {
            function: self.name.clone(),
            access: match (self.public, self.enabled) {
                (false, _) => DirectAccess::Hidden,
                (true, false) => DirectAccess::Disabled,
                (true, true) => DirectAccess::Public,
            },
        }
    }

    /// Adds a version, makes it active, and removes the oldest version beyond [`MAX_VERSIONS`].
    pub(crate) fn push(&mut self, mut version: VersionRecord) {
        version.number = self.next_version;
        self.answering = version.number;
        self.next_version += 1;
        self.versions.push(version);
        // The new version is the last one, so that the active version is never removed.
        let beyond = self.versions.len().saturating_sub(MAX_VERSIONS);
        self.versions.drain(..beyond);
    }

    /// Makes another version active. Defaults to the version before the active version.
    pub(crate) fn roll_back(&mut self, version: Option<u64>) -> Result<(), FunctionError> {
        let before = self.versions.iter().map(|v| v.number);
        let before = before.filter(|n| *n < self.answering).max();
        let number = version.or(before);
        // Names a version that does not exist, for the error message.
        let number = number.unwrap_or_else(|| self.answering.saturating_sub(1));
        if self.find(number).is_none() {
            let available: Vec<_> = self.versions.iter().map(|v| v.number.to_string()).collect();
            return Err(FunctionError::NoVersion {
                name: self.name.clone(),
                version: number,
                available: available.join(", "),
            });
        }
        self.answering = number;
        Ok(())
    }
}

/// Changes of settings by a deployment. An absent setting is unchanged, except for `sandbox_key`; a
/// new function uses the default.
#[derive(Debug, Clone, Default)]
pub struct DeployChanges {
    /// Maximum memory of a request in MiB.
    pub memory_mib: Option<u32>,
    /// Maximum processor time of a request in milliseconds.
    pub cpu_ms: Option<u32>,
    /// Time limit of a request in milliseconds.
    pub wall_ms: Option<u32>,
    /// Maximum number of concurrent requests.
    pub concurrency: Option<u32>,
    /// Complete new environment.
    pub env: Option<std::collections::BTreeMap<String, String>>,
    /// Complete new list of allowed hosts.
    pub allow: Option<Vec<String>>,
    /// True if the function answers requests without a key.
    pub public: Option<bool>,
    /// Schedule. An empty text removes the previous schedule.
    pub schedule: Option<String>,
    /// New sandbox key. The previous key becomes invalid. `None` removes the previous key.
    pub sandbox_key: Option<SandboxKey>,
}

impl DeployChanges {
    /// Checks and applies the changes.
    pub(crate) fn apply(&self, record: &mut FunctionRecord) -> Result<(), FunctionError> {
        let mut limits = record.settings.limits.clone();
        limits.memory_mib = self.memory_mib.unwrap_or(limits.memory_mib);
        limits.cpu_ms = self.cpu_ms.unwrap_or(limits.cpu_ms);
        limits.wall_ms = self.wall_ms.unwrap_or(limits.wall_ms);
        limits.concurrency = self.concurrency.unwrap_or(limits.concurrency);
        limits.check()?;
        record.settings.limits = limits;
        if let Some(env) = &self.env {
            check_env(env)?;
            record.settings.env.clone_from(env);
        }
        if let Some(allow) = &self.allow {
            check_hosts(allow)?;
            record.settings.allow.clone_from(allow);
        }
        record.public = self.public.unwrap_or(record.public);
        if let Some(schedule) = &self.schedule {
            // Checks the syntax, and that the schedule matches at least once.
            if !schedule.is_empty() {
                Schedule::parse(schedule, jiff::Timestamp::now())?;
            }
            record.schedule = Some(schedule.clone()).filter(|s| !s.is_empty());
        }
        if self.sandbox_key.is_some() {
            check_key_variables(&record.settings.env)?;
        }
        // Each deployment states its sandbox key: without one, the previous key is removed.
        record.sandbox_key.clone_from(&self.sandbox_key);
        Ok(())
    }
}

/// Checks names, values and total size of an environment.
fn check_env(env: &std::collections::BTreeMap<String, String>) -> Result<(), FunctionError> {
    let bad = |name: &str| name.is_empty() || name.contains(['=', '\0']);
    if let Some((name, _)) = env.iter().find(|(n, v)| bad(n) || v.contains('\0')) {
        let name = name.escape_debug();
        let message = format!(
            "`{name}` is not a valid environment variable: the name is empty, or the variable contains `=` or NUL"
        );
        return Err(FunctionError::Setting(message));
    }
    // The size in the control message is the size as JSON.
    let bytes = serde_json::to_vec(env).map_or(usize::MAX, |text| text.len());
    if bytes <= MAX_ENV_BYTES {
        Ok(())
    } else {
        Err(FunctionError::Setting(format!(
            "the environment of a function may have at most {MAX_ENV_BYTES} bytes as JSON"
        )))
    }
}

/// Rejects variables that a sandbox key sets.
fn check_key_variables(
    env: &std::collections::BTreeMap<String, String>,
) -> Result<(), FunctionError> {
    match env.keys().find(|name| is_set_by_key(name)) {
        None => Ok(()),
        Some(name) => Err(FunctionError::Setting(format!(
            "`{name}` is set by the sandbox key: remove it from the environment"
        ))),
    }
}

/// Checks a list of allowed hosts.
fn check_hosts(hosts: &[String]) -> Result<(), FunctionError> {
    let name = |host: &String| host.split(':').next().unwrap_or_default().to_owned();
    if let Some(host) = hosts.iter().find(|host| is_api_host(&name(host))) {
        let message = format!("`{host}` is reachable only with a sandbox key (`sandboxKey`)");
        return Err(FunctionError::Setting(message));
    }
    // `TenantProcess::load_as` parses the same entries when the function is loaded.
    match AllowList::parse(hosts) {
        Ok(_) => Ok(()),
        Err(error) => Err(FunctionError::Setting(format!("`allow`: {error}"))),
    }
}

/// Creates the record of a function that is not deployed yet.
pub(crate) fn new_record(
    owner: Option<&str>,
    name: &str,
    now_ms: u64,
) -> Result<FunctionRecord, FunctionError> {
    if !is_name(name) {
        return Err(FunctionError::Name);
    }
    Ok(FunctionRecord {
        owner: owner.map(str::to_owned),
        name: name.to_owned(),
        enabled: true,
        public: false,
        settings: LoadSettings::default(),
        schedule: None,
        sandbox_key: None,
        // No version has this number.
        answering: 0,
        versions: Vec::new(),
        next_version: 1,
        revision: 0,
        created_ms: now_ms,
        updated_ms: now_ms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox_key::SandboxKeyScope;

    /// Returns the record of a version.
    fn version() -> VersionRecord {
        VersionRecord {
            number: 0,
            module: "m".to_owned(),
            bytes: 1,
            world: World::Core,
            artifact: Artifact {
                engine: "e".to_owned(),
                digest: "d".to_owned(),
                bytes: 1,
            },
            created_ms: 0,
        }
    }

    #[test]
    fn five_versions_are_retained_and_can_be_rolled_back_to() {
        let mut record = new_record(None, "hello", 0).unwrap();
        for _ in 0..7 {
            record.push(version());
        }
        let numbers: Vec<_> = record.versions.iter().map(|v| v.number).collect();
        assert_eq!((numbers, record.answering), (vec![3, 4, 5, 6, 7], 7));
        record.roll_back(None).unwrap();
        assert_eq!(record.answering, 6);
        record.roll_back(Some(3)).unwrap();
        let error = record.roll_back(None).unwrap_err().to_string();
        assert!(
            error.contains(
                "version 2 of function `hello` no longer exists; available versions: 3, 4, 5, 6, 7"
            ),
            "{error}"
        );
        assert!(record.roll_back(Some(8)).is_err());
        record.push(version());
        assert_eq!((record.answering, record.versions.len()), (8, 5));
    }

    #[test]
    fn settings_outside_their_bounds_are_rejected() {
        let mut record = new_record(None, "hello", 0).unwrap();
        let env = |name: &str, value: &str| DeployChanges {
            env: Some([(name.to_owned(), value.to_owned())].into()),
            ..DeployChanges::default()
        };
        let allow = |hosts: Vec<String>| DeployChanges {
            allow: Some(hosts),
            ..DeployChanges::default()
        };
        let memory = DeployChanges {
            memory_mib: Some(100_000),
            ..DeployChanges::default()
        };
        for bad in [
            env("", "x"),
            env("A=B", "x"),
            env("A", "\0"),
            env("A", &"x".repeat(MAX_ENV_BYTES)),
            allow(vec![String::new()]),
            allow(vec!["a b".to_owned()]),
            allow(vec!["a:0".to_owned()]),
            allow(vec!["[a]".to_owned()]),
            allow(vec!["a".to_owned(); crate::egress::MAX_ALLOWED_HOSTS + 1]),
            memory,
        ] {
            assert!(bad.apply(&mut record).is_err(), "{bad:?}");
        }
        env("A", "x").apply(&mut record).unwrap();
        let hosts = [
            "api.example:8443",
            "*.a_b.example",
            "[2600::1]",
            "[2600::1]:8443",
        ];
        allow(hosts.map(str::to_owned).to_vec())
            .apply(&mut record)
            .unwrap();
        DeployChanges::default().apply(&mut record).unwrap();
        assert_eq!(
            (
                record.settings.env["A"].as_str(),
                record.settings.allow.len()
            ),
            ("x", 4)
        );
        assert!(new_record(None, "a--b", 0).is_err());
    }

    #[test]
    fn each_deployment_states_its_sandbox_key() {
        let mut record = new_record(Some("k1"), "agent", 0).unwrap();
        let scope = SandboxKeyScope::Create;
        let with_key = DeployChanges {
            sandbox_key: Some(SandboxKey::new("k1".to_owned(), false, scope).unwrap()),
            ..DeployChanges::default()
        };
        with_key.apply(&mut record).unwrap();
        assert!(record.load_settings().env.contains_key("E2B_API_KEY"));
        assert!(record.settings.env.is_empty() && record.origin().is_some());
        DeployChanges::default().apply(&mut record).unwrap();
        assert!(record.load_settings().env.is_empty() && record.origin().is_none());

        let env = DeployChanges {
            env: Some([("E2B_API_KEY".to_owned(), "x".to_owned())].into()),
            ..DeployChanges::default()
        };
        env.apply(&mut record).unwrap();
        let error = with_key.apply(&mut record).unwrap_err().to_string();
        assert!(error.contains("E2B_API_KEY"), "{error}");
        for host in ["api.jiffy.internal", "API.jiffy.internal.:8080"] {
            let allow = DeployChanges {
                allow: Some(vec![host.to_owned()]),
                ..DeployChanges::default()
            };
            assert!(allow.apply(&mut record).is_err(), "{host}");
        }
    }
}

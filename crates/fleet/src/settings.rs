//! `<data directory>/fleet.toml`: settings of a member. Without this file a host is not a member of
//! a fleet, and no code of the fleet runs.
//!
//! The certificates and keys are in `<data directory>/fleet/`, readable by the owner only.

mod etcd_access;

use crate::channel::Identity;
use crate::files::{read, read_existing, write_private};
use crate::records::{EtcdRecords, EtcdUrl};
use crate::{Records, SetupError, StoreRecords};
use jiffy_fleet_core::record::{HostLabel, MAX_LABELS};
use jiffy_fleet_core::{FleetId, MemberId};
use jiffy_store::StoreUrl;
use jiffy_store::host::RemoteStore;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use etcd_access::EtcdAccess;

/// Format that this version writes.
const FORMAT: u32 = 1;
/// Maximum size of the files of a member.
pub(crate) const MAX_FILE_BYTES: u64 = 64 << 10;
/// Default port of a member.
pub const DEFAULT_PORT: u16 = 7946;

/// Role of a member.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The member runs sandboxes.
    #[default]
    Host,
    /// The member is a front: it has no sandboxes, and passes connections of clients to hosts.
    Front,
}

/// Settings of a member.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Format of the file.
    pub version: u32,
    /// Fleet.
    pub fleet: FleetId,
    /// Number of this member.
    pub member: MemberId,
    /// Name of the host.
    pub name: String,
    /// Role.
    #[serde(default)]
    pub role: Role,
    /// Address at which this member accepts connections of other members.
    pub listen: SocketAddr,
    /// Address (`HOST:PORT`) at which other members reach this one.
    pub address: String,
    /// URL of the store.
    pub store: String,
    /// Domains of sandboxes.
    #[serde(default)]
    pub domains: Vec<String>,
    /// Processor level of microVMs on all hosts, such as `x86-64-v3`. `None` for all features.
    #[serde(default)]
    pub cpu_level: Option<String>,
    /// Labels of the host, which creates may require.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// True if the keys, secrets and webhooks of this host must still be added to the tables of the
    /// fleet, which all members share.
    #[serde(default)]
    pub import_keys: bool,
    /// Cluster of the control records. `None` if they are in the store.
    #[serde(default)]
    pub records: Option<EtcdAccess>,
}

/// Paths of the files of a member.
#[derive(Debug, Clone)]
pub struct MemberFiles {
    /// Settings.
    pub settings: PathBuf,
    /// Settings that `init` or `join` writes first. They become `fleet.toml` when the command is
    /// complete.
    pub draft: PathBuf,
    /// Certificate of the authority of the fleet.
    pub authority: PathBuf,
    /// Certificate of this member.
    pub certificate: PathBuf,
    /// Private key of this member.
    pub key: PathBuf,
    /// Permanent random number of this data directory.
    pub installation: PathBuf,
    /// Certificate of the authority of etcd, certificate and key of its client, and password.
    pub etcd: [PathBuf; 4],
    /// Master keys of the store.
    pub store_keys: PathBuf,
}

impl MemberFiles {
    /// Returns the paths in a data directory.
    #[must_use]
    pub fn of(home: &Path) -> Self {
        let folder = home.join("fleet");
        Self {
            settings: home.join("fleet.toml"),
            draft: folder.join("fleet.draft.toml"),
            authority: folder.join("authority.pem"),
            certificate: folder.join("certificate.pem"),
            key: folder.join("key.pem"),
            installation: folder.join("installation"),
            etcd: [
                "etcd-ca.pem",
                "etcd-cert.pem",
                "etcd-key.pem",
                "etcd-password",
            ]
            .map(|name| folder.join(name)),
            store_keys: home.join("store/keys.toml"),
        }
    }
}

impl Settings {
    /// Returns the settings of a member without records in etcd.
    pub fn new(
        fleet: FleetId,
        member: MemberId,
        name: &str,
        listen: SocketAddr,
        address: &str,
        store: &str,
    ) -> Self {
        Self {
            version: FORMAT,
            fleet,
            member,
            name: name.to_owned(),
            role: Role::Host,
            listen,
            address: address.to_owned(),
            store: store.to_owned(),
            domains: Vec::new(),
            cpu_level: None,
            labels: BTreeMap::new(),
            import_keys: false,
            records: None,
        }
    }

    /// Reads the settings of a data directory. `None` if it is not of a member.
    ///
    /// # Errors
    /// [`SetupError::File`] or [`SetupError::Content`].
    pub fn load(home: &Path) -> Result<Option<Self>, SetupError> {
        Self::read(&MemberFiles::of(home).settings)
    }

    /// Reads the draft of an interrupted `init` or `join`, whose repetition uses the same numbers.
    pub(crate) fn load_draft(home: &Path) -> Result<Option<Self>, SetupError> {
        Self::read(&MemberFiles::of(home).draft)
    }

    /// Reads and checks a file of settings. `None` if it does not exist.
    fn read(path: &Path) -> Result<Option<Self>, SetupError> {
        let Some(text) = read(path, MAX_FILE_BYTES)? else {
            return Ok(None);
        };
        let settings: Self =
            toml::from_str(&text).map_err(|error| SetupError::content(path, error.message()))?;
        if settings.version != FORMAT {
            let reason = format!(
                "format {} is not supported: upgrade Jiffy",
                settings.version
            );
            return Err(SetupError::content(path, reason));
        }
        settings
            .check()
            .map_err(|reason| SetupError::content(path, reason))?;
        Ok(Some(settings))
    }

    /// Checks the fields whose types permit invalid values.
    fn check(&self) -> Result<(), String> {
        let is_front = self.role == Role::Front;
        if is_front && !(self.store.is_empty() && self.records.is_none()) {
            return Err("a front has no store and no records".to_owned());
        }
        if is_front != self.member.is_front() {
            return Err(format!(
                "{} does not have the role of this file",
                self.member
            ));
        }
        let texts = [&self.name, &self.address, &self.store];
        let records = self.records.iter();
        let records = records.flat_map(|etcd| [Some(&etcd.url), etcd.user.as_ref()]);
        // A front accepts no connections of members and has no store.
        let texts = texts
            .into_iter()
            .filter(|text| !is_front || !text.is_empty());
        let all = (texts.chain(&self.domains))
            .chain(&self.cpu_level)
            .chain(records.flatten());
        for text in all {
            if text.is_empty() || text.len() > 1024 || text.contains(['"', '\\']) {
                return Err(format!("{text:?} is not a valid value"));
            }
            if text.chars().any(char::is_control) {
                return Err(format!("{text:?} has control characters"));
            }
        }
        check_name(&self.name)?;
        if is_front {
            return Ok(());
        }
        check_address(&self.address)?;
        self.host_labels()?;
        self.store_url().map_err(|e| e.to_string())?;
        if let Some(etcd) = &self.records {
            etcd.url.parse::<EtcdUrl>().map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Writes the settings, so that the host is a member from its next start on.
    ///
    /// # Errors
    /// [`SetupError::File`] or [`SetupError::Content`].
    pub fn save(&self, home: &Path) -> Result<(), SetupError> {
        self.write(&MemberFiles::of(home).settings)
    }

    pub(crate) fn save_draft(&self, home: &Path) -> Result<(), SetupError> {
        self.write(&MemberFiles::of(home).draft)
    }

    fn write(&self, path: &Path) -> Result<(), SetupError> {
        self.check()
            .map_err(|reason| SetupError::content(path, reason))?;
        write_private(path, self.text().as_bytes())
    }

    /// Returns the content of `fleet.toml`.
    fn text(&self) -> String {
        let quote = |text: &str| format!("\"{text}\"");
        let role = match self.role {
            Role::Host => "host",
            Role::Front => "front",
        };
        let domains: Vec<String> = self.domains.iter().map(|domain| quote(domain)).collect();
        let mut text = String::from("# Written by jiffy fleet. Settings of this member.\n");
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name} = {value}");
        };
        line("version", FORMAT.to_string());
        line("fleet", quote(&self.fleet.to_string()));
        line("member", self.member.0.to_string());
        line("name", quote(&self.name));
        line("role", quote(role));
        line("listen", quote(&self.listen.to_string()));
        line("address", quote(&self.address));
        line("store", quote(&self.store));
        line("domains", format!("[{}]", domains.join(", ")));
        if let Some(level) = &self.cpu_level {
            line("cpu_level", quote(level));
        }
        if !self.labels.is_empty() {
            let labels = self.labels.iter();
            let labels: Vec<_> = labels
                .map(|(name, value)| format!("{} = {}", quote(name), quote(value)))
                .collect();
            line("labels", format!("{{ {} }}", labels.join(", ")));
        }
        line("import_keys", self.import_keys.to_string());
        if let Some(etcd) = &self.records {
            text.push_str("\n[records]\n");
            let _ = writeln!(text, "url = {}", quote(&etcd.url));
            if let Some(user) = &etcd.user {
                let _ = writeln!(text, "user = {}", quote(user));
            }
        }
        text
    }

    /// Returns the labels of the host.
    ///
    /// # Errors
    /// The reason why a label is not valid.
    pub fn host_labels(&self) -> Result<Vec<HostLabel>, String> {
        if self.labels.len() > MAX_LABELS {
            return Err(format!("a host has at most {MAX_LABELS} labels"));
        }
        let labels = self.labels.iter();
        labels
            .map(|(name, value)| HostLabel::new(name, value))
            .collect()
    }

    /// Replaces the labels of the host, and writes the settings.
    ///
    /// # Errors
    /// [`SetupError::File`] or [`SetupError::Content`].
    pub fn set_labels(
        &mut self,
        home: &Path,
        labels: BTreeMap<String, String>,
    ) -> Result<(), SetupError> {
        self.labels = labels;
        self.save(home)
    }

    /// Returns the URL of the store.
    ///
    /// # Errors
    /// [`SetupError::Storage`] if it is malformed.
    pub fn store_url(&self) -> Result<StoreUrl, SetupError> {
        Ok(self.store.parse()?)
    }

    /// Returns the identity of this member.
    ///
    /// # Errors
    /// [`SetupError`] if a file is missing, or the certificate is of another member.
    pub fn identity(&self, home: &Path) -> Result<Identity, SetupError> {
        let files = MemberFiles::of(home);
        let authority = read_existing(&files.authority, MAX_FILE_BYTES)?;
        let certificate = read_existing(&files.certificate, MAX_FILE_BYTES)?;
        let key = read_existing(&files.key, MAX_FILE_BYTES)?;
        let identity = Identity::new(self.fleet.clone(), &authority, &certificate, &key)?;
        if identity.member() != self.member {
            let reason = format!(
                "it belongs to {}, but this host is {}",
                identity.member(),
                self.member
            );
            return Err(SetupError::content(&files.certificate, reason));
        }
        Ok(identity)
    }

    /// Returns the access to the control records of the fleet, in etcd or in the store `remote`.
    /// Sends no request.
    ///
    /// # Errors
    /// [`SetupError`] if the settings of etcd cannot be used.
    pub fn records(
        &self,
        home: &Path,
        remote: &RemoteStore,
    ) -> Result<Arc<dyn Records>, SetupError> {
        match &self.records {
            None => Ok(Arc::new(StoreRecords::new(remote.shared.backend()))),
            Some(etcd) => Ok(Arc::new(EtcdRecords::new(&etcd.settings(home)?)?)),
        }
    }
}

/// Checks the name of a host: a label of DNS.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    let is_valid = (1..=63).contains(&name.len())
        && name.bytes().all(allowed)
        && !name.starts_with('-')
        && !name.ends_with('-');
    if is_valid {
        return Ok(());
    }
    Err(format!(
        "{:?} is not a name of a host: use 1 to 63 lower-case letters, digits and hyphens",
        name.chars().take(64).collect::<String>()
    ))
}

/// Checks an address: `HOST:PORT`.
pub(crate) fn check_address(address: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || ".-:[]%".contains(c);
    let is_valid = address.len() <= 255
        && address.chars().all(allowed)
        && address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
    if is_valid {
        return Ok(());
    }
    Err(format!(
        "{:?} is not an address: use HOST:PORT",
        address.chars().take(64).collect::<String>()
    ))
}

/// Called when the keys of this host are in the tables of the fleet: they are not imported again.
///
/// # Errors
/// [`SetupError`].
pub fn clear_import(home: &Path) -> Result<(), SetupError> {
    match Settings::load(home)? {
        Some(mut settings) if settings.import_keys => {
            settings.import_keys = false;
            settings.save(home)
        }
        _ => Ok(()),
    }
}

/// Returns the permanent random number of a data directory. Creates it at the first call.
pub(crate) fn installation(home: &Path) -> Result<String, SetupError> {
    let path = MemberFiles::of(home).installation;
    if let Some(text) = read(&path, 64)? {
        return Ok(text.trim().to_owned());
    }
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|e| SetupError::content(&path, e))?;
    let text = data_encoding::HEXLOWER.encode(&bytes);
    write_private(&path, text.as_bytes())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let fleet = FleetId::try_from("abcd".to_owned()).unwrap();
        let listen = "0.0.0.0:7946".parse().unwrap();
        Settings {
            domains: vec!["sbx.example.com".to_owned(), "b.example".to_owned()],
            labels: BTreeMap::from([("zone".to_owned(), "eu-1/a".to_owned())]),
            cpu_level: Some("x86-64-v3".to_owned()),
            import_keys: true,
            records: Some(EtcdAccess {
                url: "etcd://a:2379,b:2379/prod".to_owned(),
                user: Some("jiffy".to_owned()),
            }),
            ..Settings::new(
                fleet,
                MemberId(3),
                "host3",
                listen,
                "10.0.0.3:7946",
                "s3://b/p",
            )
        }
    }

    #[test]
    fn settings_are_read_as_they_are_written() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(Settings::load(home.path()).unwrap(), None);
        let mut settings = settings();
        settings.save(home.path()).unwrap();
        assert_eq!(Settings::load(home.path()).unwrap(), Some(settings.clone()));
        clear_import(home.path()).unwrap();
        settings.import_keys = false;
        assert_eq!(Settings::load(home.path()).unwrap(), Some(settings));
        let mode = std::os::unix::fs::MetadataExt::mode(
            &std::fs::metadata(home.path().join("fleet.toml")).unwrap(),
        );
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn invalid_settings_are_rejected_with_the_reason() {
        let home = tempfile::tempdir().unwrap();
        let text = settings().text();
        for (from, to, reason) in [
            ("version = 1", "version = 2", "format 2 is not supported"),
            ("\"abcd\"", "\"A\"", "is not a fleet id"),
            ("\"10.0.0.3:7946\"", "\"10.0.0.3\"", "is not an address"),
            ("\"host3\"", "\"Host 3\"", "is not a name of a host"),
            ("\"s3://b/p\"", "\"ftp://b\"", "neither s3 nor file"),
            ("etcd://a:2379", "etcd://a", "no port"),
            ("eu-1/a", "eu 1", "the value of a label"),
            ("role", "rule", "unknown field `rule`"),
            ("member = 3", "member = -3", "invalid value"),
        ] {
            assert!(text.contains(from), "{from}");
            std::fs::write(home.path().join("fleet.toml"), text.replacen(from, to, 1)).unwrap();
            let error = Settings::load(home.path()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let mut quoted = settings();
        quoted.domains = vec!["a\"\nx = \"b".to_owned()];
        assert!(quoted.save(home.path()).is_err());
    }
}

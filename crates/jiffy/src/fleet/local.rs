//! Properties of this host for `jiffy fleet init` and `join`: name, addresses, labels and content.
//!
//! A *stock template* is a template whose recipe Jiffy contains. A *recipe* is a directory with the
//! packages, files and settings of a template.

use crate::cli::MemberAddressArgs;
use anyhow::Context;
use jiffy_api::Keys;
use jiffy_fleet_core::record::{HostLabel, MAX_LABELS};
use jiffy_image::{Home, Reference, Templates};
use jiffy_secrets::OwnSecrets;
use jiffy_webhooks::OwnWebhooks;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Address whose route determines the address of this host (TEST-NET-1). No packet is sent to it.
const ANY_REMOTE_ADDRESS: &str = "192.0.2.1:9";
/// Maximum length of a label of a host name (RFC 1035, 2.3.4).
const MAX_LABEL_CHARS: usize = 63;

/// Name, addresses and labels of a member.
#[derive(Debug)]
pub struct MemberAddress {
    pub name: String,
    pub listen: SocketAddr,
    pub address: String,
    /// Labels of the host.
    pub labels: BTreeMap<String, String>,
}

/// Returns name, addresses and labels. `peer` is a host that the address must reach.
pub fn member_address(
    args: &MemberAddressArgs,
    peer: Option<&str>,
) -> anyhow::Result<MemberAddress> {
    let listen = args.fleet_listen;
    let address = match &args.fleet_address {
        Some(address) => address.clone(),
        None if !listen.ip().is_unspecified() => listen.to_string(),
        None => {
            let ip = local_address(peer.unwrap_or(ANY_REMOTE_ADDRESS));
            let ip =
                ip.context("cannot determine the address of this host: specify --fleet-address")?;
            SocketAddr::new(ip, listen.port()).to_string()
        }
    };
    let name = match &args.name {
        Some(name) => name.clone(),
        None => host_name(),
    };
    Ok(MemberAddress {
        name,
        listen,
        address,
        labels: labels(&args.labels)?,
    })
}

/// Returns the labels by name. Fails if a name is repeated or the number exceeds its maximum.
fn labels(all: &[HostLabel]) -> anyhow::Result<BTreeMap<String, String>> {
    anyhow::ensure!(
        all.len() <= MAX_LABELS,
        "a host has at most {MAX_LABELS} labels"
    );
    let mut labels = BTreeMap::new();
    for HostLabel { name, value } in all {
        let former = labels.insert(name.clone(), value.clone());
        anyhow::ensure!(
            former.is_none(),
            "the label `{name}` has two values: specify each name once"
        );
    }
    Ok(labels)
}

/// Returns the address of the interface over which `peer` is reached.
fn local_address(peer: &str) -> anyhow::Result<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(peer)?;
    let ip = socket.local_addr()?.ip();
    anyhow::ensure!(!ip.is_unspecified(), "no route");
    Ok(ip)
}

/// Returns the first label of the system's host name, with the characters of names only.
pub(super) fn host_name() -> String {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy().to_ascii_lowercase();
    let label: String = name
        .split('.')
        .next()
        .unwrap_or_default()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(MAX_LABEL_CHARS)
        .collect();
    match label.trim_matches('-') {
        "" => "host".to_owned(),
        label => label.to_owned(),
    }
}

/// API keys, templates, secrets and webhooks of this host.
#[derive(Debug, Default)]
pub struct OwnContent {
    /// Names of keys that are not revoked.
    pub keys: Vec<String>,
    /// Templates that are no stock templates.
    pub templates: Vec<String>,
    /// Names of secrets.
    pub secrets: Vec<String>,
    /// Names of webhooks.
    pub webhooks: Vec<String>,
    /// Stock templates.
    pub stock: Vec<String>,
}

impl OwnContent {
    /// Reads the content of the data directory.
    pub fn read(home: &Home) -> anyhow::Result<Self> {
        let mut content = Self::default();
        if home.path().join("keys.db").exists() {
            let keys = Keys::open(home.path())?.list()?;
            let valid = keys.into_iter().filter(|key| key.revoked_ms.is_none());
            content.keys = valid.map(|key| key.name).collect();
        }
        for manifest in Templates::new(home).list()? {
            let name = manifest.reference();
            let list = if Reference::parse(&name)?.is_stock() {
                &mut content.stock
            } else {
                &mut content.templates
            };
            list.push(name);
        }
        content.secrets = OwnSecrets::names(home.path())?;
        content.webhooks = OwnWebhooks::names(home.path())?;
        content.stock.sort();
        content.stock.dedup();
        Ok(content)
    }

    /// Returns whether the host has content that a fleet imports.
    pub fn is_importable(&self) -> bool {
        self.names().next().is_some()
    }

    /// Returns the names of the content that a fleet imports.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let lists = [&self.keys, &self.templates, &self.secrets, &self.webhooks];
        lists.into_iter().flatten().map(String::as_str)
    }
}

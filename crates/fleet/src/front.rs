//! Fronts: processes without sandboxes that pass connections of clients to the hosts, like a load
//! balancer. This module has the hosts that a front knows, and their delivery.
//!
//! A front has a certificate only. It has neither the master keys of the store nor the records, and
//! takes no part in any decision. A record names it only after its removal, so that its certificate
//! is rejected. Any host sends it the addresses of the hosts, and renews its certificate.

use crate::SetupError;
use crate::access::FleetAccess;
use crate::certificates::{MEMBER_LIFETIME, RENEWAL_MARGIN};
use crate::channel::{Client, Identity, MessageHandler, Rejected};
use crate::files::{read, write_private};
use crate::settings::{MAX_FILE_BYTES, MemberFiles, check_address};
use async_trait::async_trait;
use bytes::Bytes;
use jiffy_fleet_core::{MESSAGE_FORMAT, MemberId};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

/// Path of messages of fronts.
pub const FRONT_PATH: &str = "/front/hosts";
/// Interval at which a front requests the addresses of the hosts.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum duration of a request.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of hosts that a front contacts in one interval, if they do not answer.
const MAX_TRIED: usize = 3;
/// Maximum number of hosts of a fleet.
const MAX_HOSTS: usize = 1000;

/// Host of the fleet, as fronts know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontHost {
    /// Number of the host.
    pub member: MemberId,
    /// Address (`HOST:PORT`) of its channel.
    pub address: String,
}

/// Request of a front.
#[derive(Debug, Serialize, Deserialize)]
struct Request {
    /// Version of the format.
    format: u32,
    /// Request for a certificate (PEM), if the front needs another one.
    certificate_request: Option<String>,
}

/// Answer of a host.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// Live hosts.
    hosts: Vec<FrontHost>,
    /// Requested certificate (PEM).
    certificate: Option<String>,
}

/// Returns the live hosts of the fleet.
pub type LiveHosts = Box<dyn Fn() -> Vec<FrontHost> + Send + Sync>;

/// Answers the requests of fronts.
pub struct FrontService {
    access: FleetAccess,
    hosts: LiveHosts,
}

impl FrontService {
    /// Returns the service of a host.
    pub fn new(access: FleetAccess, hosts: LiveHosts) -> Self {
        Self { access, hosts }
    }
}

#[async_trait]
impl MessageHandler for FrontService {
    async fn message(&self, peer: MemberId, message: Bytes) -> Result<Bytes, Rejected> {
        if !peer.is_front() {
            return Err(Rejected::new(403, "only fronts send this message"));
        }
        let request: Request = serde_json::from_slice(&message)
            .map_err(|error| Rejected::new(400, format!("the message is damaged: {error}")))?;
        if request.format != MESSAGE_FORMAT {
            let reason = format!(
                "the front has format {}, but this host has {MESSAGE_FORMAT}: install the same \
                 version of Jiffy",
                request.format
            );
            return Err(Rejected::new(409, reason));
        }
        let certificate = request.certificate_request.map(|request| {
            let fleet = &self.access.root.fleet;
            let authority = &self.access.authority;
            authority.issue(fleet, peer, &request, SystemTime::now(), MEMBER_LIFETIME)
        });
        let certificate = certificate.transpose();
        let answer = Answer {
            hosts: (self.hosts)(),
            certificate: certificate.map_err(|error| Rejected::new(400, error.to_string()))?,
        };
        serde_json::to_vec(&answer)
            .map(Bytes::from)
            .map_err(|error| Rejected::new(500, error.to_string()))
    }
}

/// Returns the path of the addresses of the hosts.
fn hosts_path(home: &std::path::Path) -> PathBuf {
    home.join("fleet/hosts.json")
}

/// Writes the addresses of the hosts to the data directory of a front.
pub(crate) fn save_hosts(home: &std::path::Path, hosts: &[FrontHost]) -> Result<(), SetupError> {
    let text = serde_json::to_vec(hosts).unwrap_or_default();
    write_private(&hosts_path(home), &text)
}

/// Hosts of the fleet, as a front knows them. Clones share the state.
#[derive(Debug, Clone)]
pub struct KnownHosts(Arc<State>);

/// State of the known hosts, shared by their clones.
#[derive(Debug)]
struct State {
    home: PathBuf,
    hosts: RwLock<Arc<Vec<FrontHost>>>,
    /// Index of the host that the next connection tries first.
    next: AtomicUsize,
}

impl KnownHosts {
    /// Reads the hosts that the front knew last.
    ///
    /// # Errors
    /// [`SetupError`] if the file is missing or damaged.
    pub fn load(home: &std::path::Path) -> Result<Self, SetupError> {
        let path = hosts_path(home);
        // The file may list [`MAX_HOSTS`] hosts, so it may be larger than other files of a member.
        let text = read(&path, MAX_FILE_BYTES * 16)?.unwrap_or_default();
        let hosts: Vec<FrontHost> =
            serde_json::from_str(&text).map_err(|error| SetupError::content(&path, error))?;
        check(&hosts).map_err(|reason| SetupError::content(&path, reason))?;
        Ok(Self(Arc::new(State {
            home: home.to_owned(),
            hosts: RwLock::new(Arc::new(hosts)),
            next: AtomicUsize::new(0),
        })))
    }

    /// Returns all hosts. Each call starts with another host, so that requests are spread.
    pub fn in_turn(&self) -> Vec<FrontHost> {
        let hosts = self.0.hosts.read().clone();
        let start = self.0.next.fetch_add(1, Ordering::Relaxed) % hosts.len().max(1);
        let (before, after) = hosts.split_at(start.min(hosts.len()));
        after.iter().chain(before).cloned().collect()
    }

    /// Replaces the known hosts, and stores them for the next start.
    fn set(&self, hosts: Vec<FrontHost>) {
        if **self.0.hosts.read() == hosts {
            return;
        }
        // Ignore an error: after a restart the front contacts the hosts of the former file.
        if let Err(error) = save_hosts(&self.0.home, &hosts) {
            tracing::warn!(%error, "cannot store the addresses of the hosts");
        }
        tracing::info!(count = hosts.len(), "hosts of the fleet changed");
        *self.0.hosts.write() = Arc::new(hosts);
    }
}

/// Checks hosts that the front will contact: from its file, or from the response of a host.
fn check(hosts: &[FrontHost]) -> Result<(), String> {
    if hosts.is_empty() || hosts.len() > MAX_HOSTS {
        return Err(format!("it has {} hosts", hosts.len()));
    }
    hosts.iter().try_for_each(|host| {
        if host.member.is_front() {
            return Err(format!("{} is no host", host.member));
        }
        check_address(&host.address)
    })
}

/// Updates the known hosts, and renews the certificate of the front, until the future is dropped.
pub async fn follow_hosts(client: Client, identity: Identity, known: KnownHosts) {
    loop {
        let hosts = known.in_turn();
        let mut failure = None;
        for host in hosts.iter().take(MAX_TRIED) {
            match request(&client, &identity, host).await {
                Ok(answer) => {
                    failure = None;
                    if let Err(error) = apply(answer, &identity, &known) {
                        tracing::warn!(host = %host.member, %error, "rejected the answer of a host");
                    }
                    break;
                }
                Err(error) => failure = Some((host.member, error)),
            }
        }
        // The hosts are unreachable, or reject this front because it was removed.
        if let Some((host, error)) = failure {
            tracing::warn!(%host, error, "no host of the fleet serves this front");
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Requests the addresses of the hosts, and another certificate if it must be renewed.
async fn request(client: &Client, identity: &Identity, host: &FrontHost) -> Result<Answer, String> {
    let needs_renewal = SystemTime::now() + RENEWAL_MARGIN >= identity.expires();
    let certificate_request = needs_renewal.then(|| identity.renewal_request());
    let certificate_request = certificate_request.transpose().map_err(|e| e.to_string())?;
    let request = Request {
        format: MESSAGE_FORMAT,
        certificate_request,
    };
    let message = serde_json::to_vec(&request).map_err(|e| e.to_string())?;
    let (member, address) = (host.member, &host.address);
    let answer = client
        .message(member, address, FRONT_PATH, Bytes::from(message), TIMEOUT)
        .await;
    let answer = answer.map_err(|e| e.to_string())?;
    serde_json::from_slice(&answer).map_err(|e| e.to_string())
}

/// Stores the answer of a host: a renewed certificate, if it contains one, and the addresses of all
/// hosts.
fn apply(answer: Answer, identity: &Identity, known: &KnownHosts) -> Result<(), String> {
    if let Some(certificate) = answer.certificate {
        identity.renew(&certificate).map_err(|e| e.to_string())?;
        let path = MemberFiles::of(&known.0.home).certificate;
        write_private(&path, certificate.as_bytes()).map_err(|e| e.to_string())?;
        tracing::info!("renewed the certificate of this front");
    }
    check(&answer.hosts)?;
    known.set(answer.hosts);
    Ok(())
}

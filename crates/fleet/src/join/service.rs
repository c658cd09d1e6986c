//! [`JoinService`]: admits hosts to the fleet. It runs on every member and answers `jiffy fleet
//! join` of a new host. It checks token, clock, properties and address of the host, and answers
//! with a certificate and the keys of the store.

use super::attempts::Attempts;
use super::message::{EtcdFiles, JoinAnswer, JoinRequest, MAX_REQUEST_BYTES};
use super::registry::register;
use crate::access::FleetAccess;
use crate::certificates::MEMBER_LIFETIME;
use crate::channel::{JoinHandler, Rejected};
use crate::files::{read, read_existing};
use crate::settings::{MAX_FILE_BYTES, MemberFiles, Settings, check_address, check_name};
use crate::tokens::{self, Token, TokenError};
use crate::{HostFacts, SetupError};
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// Maximum difference of the clocks of a host and a member.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(300);
/// Maximum duration of the test connection to the address that a host has stated.
const CONNECT_BACK: Duration = Duration::from_secs(3);

/// Stock templates of a fleet, which a host fetches when it joins.
#[async_trait]
pub trait StockTemplates: std::fmt::Debug + Send + Sync {
    /// Returns the names of the stock templates in the store. A template is omitted if the store
    /// does not answer.
    async fn stored(&self) -> Vec<String>;
}

/// Admits hosts that have a token.
#[derive(Debug)]
pub struct JoinService {
    settings: Settings,
    home: PathBuf,
    /// File with the master keys of the store.
    store_keys: PathBuf,
    access: FleetAccess,
    facts: HostFacts,
    templates: Box<dyn StockTemplates>,
    attempts: Mutex<Attempts>,
}

impl JoinService {
    /// Returns the service of a member with these properties. `store_keys` is `None` for the file
    /// in the data directory.
    pub fn new(
        settings: Settings,
        home: PathBuf,
        store_keys: Option<PathBuf>,
        access: FleetAccess,
        facts: HostFacts,
        templates: Box<dyn StockTemplates>,
    ) -> Self {
        Self {
            store_keys: store_keys.unwrap_or_else(|| MemberFiles::of(&home).store_keys),
            settings,
            home,
            access,
            facts,
            templates,
            attempts: Mutex::default(),
        }
    }

    /// Checks a join request in full before the token is used up, so that a rejected host can use
    /// it again.
    async fn answer(&self, from: SocketAddr, bytes: &[u8]) -> Result<JoinAnswer, Rejected> {
        let bad = |reason: String| Rejected::new(400, reason);
        let request = JoinRequest::decode(bytes).map_err(bad)?;
        let token: Token = request
            .token
            .parse()
            .map_err(|error: SetupError| self.denied(from, &error.to_string()))?;
        let (records, secret) = (&self.access.records, &self.access.secret);
        tokens::check(records, secret, &token, &request.installation)
            .await
            .map_err(|error| self.token_error(from, error))?;
        check_name(&request.name).map_err(bad)?;
        check_clock(request.unix_ms)?;
        let checked = if request.is_front {
            // A front only passes requests of clients to members. It has no guests, and members do
            // not connect to it.
            request.facts.check_format(&self.facts)
        } else {
            check_address(&request.address).map_err(bad)?;
            let level = self.access.root.cpu_level;
            request.facts.check(level, &self.facts)
        };
        checked.map_err(|reason| Rejected::new(409, reason))?;
        if !request.is_front {
            connect_back(&request.address, &request.nonce).await?;
        }
        tokens::spend(records, secret, &token, &request.installation)
            .await
            .map_err(|error| self.token_error(from, error))?;
        self.admit(&request).await.map_err(|error| match error {
            SetupError::Rejected(reason) => Rejected::new(409, reason),
            error => {
                tracing::error!(%error, host = request.name, "cannot admit a host");
                Rejected::new(503, error.to_string())
            }
        })
    }

    /// Assigns a member number to the host, and issues its certificate. The token was accepted
    /// before.
    async fn admit(&self, request: &JoinRequest) -> Result<JoinAnswer, SetupError> {
        let (name, address) = (&request.name, &request.address);
        let member = register(&self.access, request).await?;
        let certificate = self.access.authority.issue(
            &self.settings.fleet,
            member,
            &request.certificate_request,
            SystemTime::now(),
            MEMBER_LIFETIME,
        )?;
        tracing::info!(%member, host = name, %address, "admitted a member");
        if request.is_front {
            // A front receives neither the keys of the store nor the access to the records.
            return Ok(JoinAnswer {
                fleet: self.settings.fleet.clone(),
                member,
                admitted_by: self.settings.member,
                authority: self.access.authority.certificate().to_owned(),
                certificate,
                store: String::new(),
                store_keys: String::new(),
                domains: self.access.root.domains.clone(),
                cpu_level: None,
                records: None,
                templates: Vec::new(),
            });
        }
        Ok(JoinAnswer {
            fleet: self.settings.fleet.clone(),
            member,
            admitted_by: self.settings.member,
            authority: self.access.authority.certificate().to_owned(),
            certificate,
            store: self.settings.store.clone(),
            store_keys: read_existing(&self.store_keys, MAX_FILE_BYTES)?,
            domains: self.access.root.domains.clone(),
            cpu_level: self.settings.cpu_level.clone(),
            records: self.etcd()?,
            templates: self.templates.stored().await,
        })
    }

    /// Returns the access to etcd with the content of its files.
    fn etcd(&self) -> Result<Option<EtcdFiles>, SetupError> {
        let Some(etcd) = &self.settings.records else {
            return Ok(None);
        };
        let mut files = [const { None }; 4];
        for (content, path) in files.iter_mut().zip(MemberFiles::of(&self.home).etcd) {
            *content = read(&path, MAX_FILE_BYTES)?;
        }
        Ok(Some(EtcdFiles {
            url: etcd.url.clone(),
            user: etcd.user.clone(),
            files,
        }))
    }

    /// Counts a failure and returns the rejection.
    fn denied(&self, from: SocketAddr, reason: &str) -> Rejected {
        self.attempts.lock().failed(from.ip(), Instant::now());
        Rejected::new(401, reason)
    }

    fn token_error(&self, from: SocketAddr, error: TokenError) -> Rejected {
        match error {
            TokenError::Records(_) => Rejected::new(503, error.to_string()),
            _ => self.denied(from, &error.to_string()),
        }
    }
}

#[async_trait]
impl JoinHandler for JoinService {
    async fn join(&self, from: SocketAddr, request: Bytes) -> Result<Bytes, Rejected> {
        if !self.attempts.lock().permits(from.ip(), Instant::now()) {
            let reason = "too many joins with wrong tokens: try again in a minute";
            return Err(Rejected::new(429, reason));
        }
        if request.len() > MAX_REQUEST_BYTES {
            return Err(Rejected::new(413, "the join request is too large"));
        }
        let answer = self.answer(from, &request).await?;
        serde_json::to_vec(&answer)
            .map(Bytes::from)
            .map_err(|error| Rejected::new(500, error.to_string()))
    }
}

/// Checks the clock of a host, on which the validity of certificates depends.
fn check_clock(unix_ms: u64) -> Result<(), Rejected> {
    let theirs = UNIX_EPOCH + Duration::from_millis(unix_ms.min(u64::MAX / 2));
    let now = SystemTime::now();
    let (difference, direction) = match theirs.duration_since(now) {
        Ok(ahead) => (ahead, "ahead of"),
        Err(error) => (error.duration(), "behind"),
    };
    if difference <= MAX_CLOCK_DIFFERENCE {
        return Ok(());
    }
    Err(Rejected::new(
        409,
        format!(
            "the clock of the host is {} s {direction} the clock of this member, and the maximum is \
             {} s; set both clocks (NTP)",
            difference.as_secs(),
            MAX_CLOCK_DIFFERENCE.as_secs()
        ),
    ))
}

/// Checks that the host accepts connections at its address.
async fn connect_back(address: &str, nonce: &str) -> Result<(), Rejected> {
    let failed = |reason: String| {
        Rejected::new(
            409,
            format!(
                "this member cannot reach the host at {address}: {reason}; give an address that \
                 all members reach with --fleet-address, and permit the port in firewalls"
            ),
        )
    };
    let connected = async {
        let mut stream = TcpStream::connect(address).await?;
        let mut read = vec![0; nonce.len()];
        stream.read_exact(&mut read).await?;
        std::io::Result::Ok(read)
    };
    match tokio::time::timeout(CONNECT_BACK, connected).await {
        Err(_) => Err(failed(format!(
            "no answer within {} s",
            CONNECT_BACK.as_secs()
        ))),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Ok(Ok(read)) if read == nonce.as_bytes() => Ok(()),
        Ok(Ok(_)) => Err(failed("another program answers there".to_owned())),
    }
}

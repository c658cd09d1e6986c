//! `jiffy fleet join`, from the side of the host that joins: requests a certificate and keys from a
//! member, and writes the files that make this host a member.

use super::message::{JoinAnswer, JoinRequest};
use crate::certificates::{MemberCertificate, MemberKey};
use crate::channel;
use crate::files::{read, write_private};
use crate::front::{FrontHost, save_hosts};
use crate::settings::{
    EtcdAccess, MAX_FILE_BYTES, MemberFiles, Role, Settings, check_address, check_name,
    installation,
};
use crate::tokens::Token;
use crate::{HostFacts, SetupError};
use bytes::Bytes;
use data_encoding::HEXLOWER;
use jiffy_fleet_core::{MESSAGE_FORMAT, MemberId};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

/// Maximum duration of a join.
const JOIN_TIMEOUT: Duration = Duration::from_secs(50);

/// Options of a join.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// Address (`HOST:PORT`) of a member.
    pub member: String,
    /// Token.
    pub token: Token,
    /// Name of this host.
    pub name: String,
    /// Address at which this host will accept connections of members.
    pub listen: SocketAddr,
    /// Address (`HOST:PORT`) at which members reach this host.
    pub address: String,
    /// Role: a host with sandboxes, or a front, which only passes on connections.
    pub role: Role,
    /// True if the keys and template names of this host are added to the tables of the fleet.
    pub import: bool,
}

/// Result of a join.
#[derive(Debug, Clone)]
pub struct Joined {
    /// Settings of the new member.
    pub settings: Settings,
    /// Member that admitted the host.
    pub admitted_by: MemberId,
    /// Stock templates in the store.
    pub templates: Vec<String>,
}

/// Joins a fleet: requests a certificate and the keys of the store, and writes the files of a
/// member to the data directory `home`.
///
/// `fleet.toml` is written last, so that an interrupted join leaves a host that is not a member. A
/// repeated join receives the same member number.
///
/// # Errors
/// [`SetupError`].
pub async fn join_fleet(
    home: &Path,
    options: &JoinOptions,
    facts: HostFacts,
) -> Result<Joined, SetupError> {
    if let Some(settings) = Settings::load(home)? {
        return Err(SetupError::Member {
            member: settings.member.to_string(),
            fleet: settings.fleet.to_string(),
        });
    }
    check_name(&options.name).map_err(SetupError::Rejected)?;
    let is_front = options.role == Role::Front;
    if !is_front {
        check_address(&options.address).map_err(SetupError::Rejected)?;
    }
    let key = MemberKey::generate()?;
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce)
        .map_err(|e| SetupError::Rejected(format!("no random bytes: {e}")))?;
    let request = JoinRequest {
        format: MESSAGE_FORMAT,
        token: options.token.to_string(),
        name: options.name.clone(),
        address: options.address.clone(),
        nonce: HEXLOWER.encode(&nonce),
        installation: installation(home)?,
        is_front,
        facts,
        certificate_request: key.request.clone(),
        unix_ms: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0)),
    };
    // A member connects back to the address of a new host, to check it. Members never connect to
    // fronts, so a front needs no listener for this check.
    let answerer = if is_front {
        None
    } else {
        Some(answer_connections(options.listen, &request.nonce).await?)
    };
    let bytes = serde_json::to_vec(&request).unwrap_or_default();
    let (address, authority) = (&options.member, options.token.authority);
    let answer = channel::join(address, authority, Bytes::from(bytes), JOIN_TIMEOUT).await;
    if let Some(answerer) = answerer {
        answerer.abort();
        // Wait for the end of the task: the daemon will listen at the same address.
        let _ = answerer.await;
    }
    let answer: JoinAnswer = serde_json::from_slice(&answer?).map_err(|error| {
        SetupError::Rejected(format!("the answer of {address} is damaged: {error}"))
    })?;
    let settings = settings(options, &answer);
    if is_front {
        let host = FrontHost {
            member: answer.admitted_by,
            address: address.clone(),
        };
        save_hosts(home, &[host])?;
    }
    write(home, &settings, &answer, &key.key)?;
    Ok(Joined {
        settings,
        admitted_by: answer.admitted_by,
        templates: answer.templates,
    })
}

/// Accepts connections at the future address of this host and sends them the nonce. The member that
/// admits the host connects to this address and compares the nonce, before it admits the host.
async fn answer_connections(
    listen: SocketAddr,
    nonce: &str,
) -> Result<tokio::task::JoinHandle<()>, SetupError> {
    let listener = TcpListener::bind(listen).await.map_err(|error| {
        SetupError::Rejected(format!(
            "cannot listen at {listen}: {error}; choose another address with --fleet-listen"
        ))
    })?;
    let nonce = nonce.to_owned();
    Ok(tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // Ignore an error: the member then rejects the join.
            let _ = stream.write_all(nonce.as_bytes()).await;
        }
    }))
}

/// Returns the settings of the new member from its options and the answer of the admitting member.
fn settings(options: &JoinOptions, answer: &JoinAnswer) -> Settings {
    let (member, name) = (answer.member, &options.name);
    let fleet = answer.fleet.clone();
    let records = answer.records.as_ref().map(|etcd| EtcdAccess {
        url: etcd.url.clone(),
        user: etcd.user.clone(),
    });
    Settings {
        role: options.role,
        domains: answer.domains.clone(),
        cpu_level: answer.cpu_level.clone(),
        import_keys: options.import,
        records,
        ..Settings::new(
            fleet,
            member,
            name,
            options.listen,
            &options.address,
            &answer.store,
        )
    }
}

/// Writes the files of a member.
fn write(
    home: &Path,
    settings: &Settings,
    answer: &JoinAnswer,
    key: &str,
) -> Result<(), SetupError> {
    let files = MemberFiles::of(home);
    let certificate = MemberCertificate::read_pem(&answer.certificate, &answer.fleet)?;
    if certificate.member != answer.member {
        let reason = "the certificate in the answer belongs to another member".to_owned();
        return Err(SetupError::Rejected(reason));
    }
    write_private(&files.authority, answer.authority.as_bytes())?;
    write_private(&files.certificate, answer.certificate.as_bytes())?;
    write_private(&files.key, key.as_bytes())?;
    if settings.role == Role::Front {
        return settings.save(home);
    }
    // The keys of the fleet replace the keys of this host. Retain the former ones: snapshots that
    // this host has in another store cannot be decrypted without them.
    match read(&files.store_keys, MAX_FILE_BYTES)? {
        Some(keys) if keys != answer.store_keys => {
            let old = files.store_keys.with_extension("before-fleet.toml");
            write_private(&old, keys.as_bytes())?;
        }
        _ => {}
    }
    write_private(&files.store_keys, answer.store_keys.as_bytes())?;
    let etcd = answer.records.iter().flat_map(|etcd| &etcd.files);
    for (content, path) in etcd.zip(&files.etcd) {
        if let Some(content) = content {
            write_private(path, content.as_bytes())?;
        }
    }
    settings.save(home)
}

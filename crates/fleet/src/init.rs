//! `jiffy fleet init`: creates a fleet whose first member is this host. It checks the store, and
//! writes the first records (root record with the secrets, record of the members). The record of
//! the members belongs to a *shard*, a part of the sandboxes; a new fleet has one shard. The files
//! of this host are written last: `fleet.toml` makes it a member.

use crate::access::{FleetAccess, root_key};
use crate::certificates::{Authority, MEMBER_LIFETIME, MemberKey};
use crate::check::{CheckOptions, CheckReport, check};
use crate::files::write_private;
use crate::join::HostRecord;
use crate::node::current_instance;
use crate::records::{EtcdRecords, EtcdSettings, Outcome};
use crate::settings::{EtcdAccess, MAX_FILE_BYTES, MemberFiles, Settings, installation};
use crate::{
    CONTROL_TENANT, HostFacts, RecordError, RecordKey, Records, SealedRecords, SetupError,
    StoreRecords,
};
use jiffy_fleet_core::record::{
    Capacity, MemberRow, MemberState, ObjectRecords, Root, ShardRecord, TableIndex,
};
use jiffy_fleet_core::{Epoch, FleetId, MemberId, ShardId, Term};
use jiffy_store::host::RemoteStore;
use jiffy_store::{StoreUrl, Tenant};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Characters of fleet ids: without characters that are easily confused.
const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
/// Term of the first records. The term counts the coordinators of a fleet.
const FIRST_TERM: Term = Term(1);

/// Options of `jiffy fleet init`.
#[derive(Debug, Clone)]
pub struct InitOptions {
    /// Store.
    pub store: StoreUrl,
    /// etcd for the control records, with the files of its client. `None` if the store has these
    /// records.
    pub etcd: Option<EtcdSettings>,
    /// Name of this host.
    pub name: String,
    /// Domains of sandboxes.
    pub domains: Vec<String>,
    /// Address at which this host will accept connections of members.
    pub listen: SocketAddr,
    /// Address (`HOST:PORT`) at which members reach this host.
    pub address: String,
    /// Processor level that all hosts have: 2 to 4 for x86-64-v2 to v4.
    pub cpu_level: u8,
    /// Processor level of microVMs, such as `x86-64-v3`. `None` for all features of the host.
    pub guest_level: Option<String>,
    /// True if the keys and template names of this host are added to the tables of the fleet.
    pub import: bool,
}

/// Checks of the store and of etcd.
#[derive(Debug, Clone)]
pub struct InitChecks {
    /// Check of the store.
    pub store: CheckReport,
    /// Check of etcd, and warnings about its settings.
    pub etcd: Option<(CheckReport, Vec<String>)>,
}

/// Checks that the store, and etcd, can be used by a fleet.
///
/// # Errors
/// [`SetupError::Store`] for a directory, or the failure of the check.
pub async fn check_storage(
    options: &InitOptions,
    remote: &RemoteStore,
) -> Result<InitChecks, SetupError> {
    let store = async {
        let records: Arc<dyn Records> = Arc::new(StoreRecords::new(remote.shared.backend()));
        let checked = check(&records, CheckOptions::default()).await;
        checked.map_err(|error| match error {
            RecordError::Unsuitable(reason) => SetupError::Store {
                url: options.store.to_string(),
                reason,
            },
            error => error.into(),
        })
    };
    let etcd = async {
        let Some(settings) = &options.etcd else {
            return Ok(None);
        };
        let etcd = EtcdRecords::new(settings)?;
        let warnings = etcd.warnings().await?;
        let records: Arc<dyn Records> = Arc::new(etcd);
        let report = check(&records, CheckOptions::default()).await?;
        Ok::<_, SetupError>(Some((report, warnings)))
    };
    // The checks of two servers mostly wait, so they run at the same time.
    let (store, etcd) = tokio::try_join!(store, etcd)?;
    Ok(InitChecks { store, etcd })
}

/// Rejects a host that is a member, and a store that no fleet can use.
///
/// # Errors
/// [`SetupError::Member`] or [`SetupError::Store`].
pub fn check_host(home: &Path, store: &StoreUrl) -> Result<(), SetupError> {
    if let Some(settings) = Settings::load(home)? {
        return Err(SetupError::Member {
            member: settings.member.to_string(),
            fleet: settings.fleet.to_string(),
        });
    }
    if matches!(store, StoreUrl::Directory(_)) {
        return Err(SetupError::Store {
            url: store.to_string(),
            reason: "a directory cannot replace objects conditionally, as a fleet requires; use \
                     s3://BUCKET/PREFIX"
                .to_owned(),
        });
    }
    Ok(())
}

/// Creates a fleet whose first member is this host. Sandboxes, keys and templates of the host
/// remain. The caller has checked the host and the storage. The last written file is `fleet.toml`;
/// the repetition of an interrupted call completes it.
///
/// # Errors
/// [`SetupError`], also if another fleet uses the store or etcd.
pub async fn create_fleet(
    home: &Path,
    options: &InitOptions,
    facts: &HostFacts,
    remote: &RemoteStore,
) -> Result<(Settings, FleetAccess), SetupError> {
    let tenant = remote.shared.tenant(CONTROL_TENANT).await?;
    let mut settings = Settings::load_draft(home)?;
    let raw = records(options, remote)?;
    // Without a root record, no record refers to the draft. Its options may be outdated: write a
    // new draft.
    if raw.get(&root_key()?).await?.is_none() {
        settings = None;
    }
    let settings = match settings {
        Some(settings) => settings,
        None => draft(home, options)?,
    };
    let sealed = Arc::new(SealedRecords::new(raw, tenant.clone()));
    let root = match root(home, options, &settings, &sealed, &tenant).await? {
        Some(root) => root,
        None => return Err(occupied(options, &sealed).await),
    };
    create(
        &sealed,
        "fleet/shards/0",
        shard(&settings, facts)?.encode()?,
    )
    .await?;
    // With an index, a member knows after its first read that the tables are empty. Without one,
    // the start of its API waits for rows.
    let index = TableIndex::new(settings.fleet.clone(), FIRST_TERM, settings.member);
    create(&sealed, "fleet/tables/index", index.encode()?).await?;
    let host = HostRecord {
        version: 1,
        member: settings.member,
        installation: installation(home)?,
        address: settings.address.clone(),
    };
    let content = serde_json::to_vec(&host).unwrap_or_default();
    create(&sealed, &format!("fleet/hosts/{}", settings.name), content).await?;
    let access = FleetAccess::with_root(sealed, &tenant, root)?;
    issue(home, &settings, &access)?;
    settings.save(home)?;
    let draft = MemberFiles::of(home).draft;
    std::fs::remove_file(&draft).map_err(SetupError::file(&draft))?;
    Ok((settings, access))
}

fn records(options: &InitOptions, remote: &RemoteStore) -> Result<Arc<dyn Records>, SetupError> {
    Ok(match &options.etcd {
        Some(settings) => Arc::new(EtcdRecords::new(settings)?),
        None => Arc::new(StoreRecords::new(remote.shared.backend())),
    })
}

/// Writes the settings of a new fleet to a draft file. The caller writes `fleet.toml` when all
/// records exist. An interrupted call leaves the draft, so that its repetition uses the same fleet
/// id.
fn draft(home: &Path, options: &InitOptions) -> Result<Settings, SetupError> {
    let mut id = [0; 4];
    getrandom::fill(&mut id).map_err(|e| SetupError::Rejected(format!("no random bytes: {e}")))?;
    let id: String = id
        .iter()
        .map(|&byte| char::from(ALPHABET[usize::from(byte) % ALPHABET.len()]))
        .collect();
    let store = options.store.to_string();
    let etcd = options.etcd.as_ref();
    let settings = Settings {
        domains: options.domains.clone(),
        // The settings contain the level of microVMs only. The root record has the level of hosts.
        cpu_level: options.guest_level.clone(),
        import_keys: options.import,
        records: etcd.map(|etcd| EtcdAccess {
            url: etcd.url.to_string(),
            user: etcd.user.as_ref().map(|(name, _)| name.clone()),
        }),
        ..Settings::new(
            FleetId::try_from(id)?,
            MemberId(1),
            &options.name,
            options.listen,
            &options.address,
            &store,
        )
    };
    if let Some(etcd) = etcd {
        copy_etcd_files(home, etcd)?;
    }
    settings.save_draft(home)?;
    Ok(settings)
}

/// Copies the files of the client of etcd to the data directory. The members deliver them from
/// there to hosts that join.
fn copy_etcd_files(home: &Path, etcd: &EtcdSettings) -> Result<(), SetupError> {
    let certificate = etcd.identity.as_ref().map(|(certificate, _)| certificate);
    let key = etcd.identity.as_ref().map(|(_, key)| key);
    let password = etcd.user.as_ref().map(|(_, password)| password);
    let sources = [etcd.ca.as_ref(), certificate, key, password];
    for (source, path) in sources.into_iter().zip(MemberFiles::of(home).etcd) {
        if let Some(source) = source {
            let content = crate::files::read_existing(source, MAX_FILE_BYTES)?;
            write_private(&path, content.as_bytes())?;
        }
    }
    Ok(())
}

/// Creates the root record. `None` if another fleet has one.
async fn root(
    home: &Path,
    options: &InitOptions,
    settings: &Settings,
    records: &SealedRecords,
    tenant: &Tenant,
) -> Result<Option<Root>, SetupError> {
    let key = root_key()?;
    let occupied = |error: RecordError| match error {
        RecordError::Damaged { .. } => SetupError::Occupied {
            place: place(options),
            fleet: "another fleet, or a fleet with other master keys".to_owned(),
            reason: format!(
                "{} does not open its root record; use another prefix, or the key file of that \
                 fleet",
                MemberFiles::of(home).store_keys.display()
            ),
        },
        error => error.into(),
    };
    let own = |content: &[u8]| -> Result<Option<Root>, SetupError> {
        let root = Root::decode(content, None)?;
        Ok((root.fleet == settings.fleet).then_some(root))
    };
    if let Some(record) = records.get(&key).await.map_err(occupied)? {
        return own(&record.content);
    }
    let authority = Authority::generate(&settings.fleet)?;
    let mut secret = [0; 32];
    getrandom::fill(&mut secret)
        .map_err(|e| SetupError::Rejected(format!("no random bytes: {e}")))?;
    let mut root = Root::new(
        settings.fleet.clone(),
        authority.certificate().to_owned(),
        options.cpu_level,
        ObjectRecords::Store,
        String::new(),
    );
    root.domains = options.domains.clone();
    FleetAccess::wrap(&mut root, tenant, &secret, &authority)?;
    let write = records.create(&key, root.encode()?)?;
    match records.send(&write).await? {
        Outcome::Done(_) => Ok(Some(root)),
        Outcome::Lost(Some(record)) => own(&record.content),
        Outcome::Lost(None) => Ok(None),
    }
}

fn place(options: &InitOptions) -> String {
    match &options.etcd {
        Some(etcd) => etcd.url.to_string(),
        None => options.store.to_string(),
    }
}

/// Returns the error for a store or etcd prefix that already contains the root record of another
/// fleet.
async fn occupied(options: &InitOptions, records: &SealedRecords) -> SetupError {
    let root = match root_key() {
        Ok(key) => records.get(&key).await.ok().flatten(),
        Err(error) => return error,
    };
    let root = root.and_then(|record| Root::decode(&record.content, None).ok());
    SetupError::Occupied {
        place: place(options),
        fleet: root.map_or("another fleet".to_owned(), |root| {
            format!("fleet {}", root.fleet)
        }),
        reason: "to add this host to that fleet, run `jiffy fleet token` on a member and `jiffy \
                 fleet join` here; for another fleet use another prefix"
            .to_owned(),
    }
}

/// Returns the record of the shard with this host as its first member and coordinator.
fn shard(settings: &Settings, facts: &HostFacts) -> Result<ShardRecord, SetupError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let row = MemberRow {
        id: settings.member,
        epoch: Epoch(1),
        instance: current_instance().map_err(SetupError::file(path))?,
        address: settings.address.clone(),
        state: MemberState::Up,
        version: facts.version.clone(),
        capacity: Capacity::default(),
        dead_since_ms: None,
        unknown: Default::default(),
    };
    Ok(ShardRecord::new(settings.fleet.clone(), ShardId(0), row))
}

/// Creates a record, unless an interrupted call has created it.
async fn create(records: &SealedRecords, key: &str, content: Vec<u8>) -> Result<(), SetupError> {
    let key: RecordKey = key.parse()?;
    records
        .send(&records.create(&key, content)?)
        .await
        .map(drop)
        .map_err(Into::into)
}

/// Issues the certificate of this host.
fn issue(home: &Path, settings: &Settings, access: &FleetAccess) -> Result<(), SetupError> {
    let files = MemberFiles::of(home);
    let key = MemberKey::generate()?;
    let certificate = access.authority.issue(
        &settings.fleet,
        settings.member,
        &key.request,
        SystemTime::now(),
        MEMBER_LIFETIME,
    )?;
    write_private(&files.authority, access.authority.certificate().as_bytes())?;
    write_private(&files.certificate, certificate.as_bytes())?;
    write_private(&files.key, key.key.as_bytes())
}

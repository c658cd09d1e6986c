//! Tables of the fleet: API keys, names and tags of templates, secrets, webhooks, the keys that
//! sign identity tokens, and volumes.
//!
//! Each member holds all rows in memory. One member, the coordinator, writes the tables; the others
//! send changes to it. A commit is pushed to all members. The rows are stored in parts (records),
//! and one more record, the *index*, lists the last commits. A member also reads the index every 30
//! s, and loads the parts that changed. The *term* counts the coordinators. A member without
//! contact for 60 s reports [`TableError::Disconnected`], so that a revoked key does not remain
//! valid on a host that was cut off.

mod change;
#[cfg(feature = "client")]
mod channel;
mod contact;
mod error;
mod import;
mod load;
mod message;
mod peers;
mod push;
mod secret;
mod state;
mod writer;

pub use change::{Action, Change};
#[cfg(feature = "client")]
pub use channel::ChannelPeers;
pub use error::TableError;
pub use import::{Imported, import_actions};
pub use message::{
    Failure, MAX_TABLE_MESSAGE_BYTES, Push, TableAnswer, TableRequest, decode_answer,
    decode_request,
};
pub use peers::{PeerError, Peers};
pub use secret::{preview_key, secrets_key};

use crate::SealedRecords;
use contact::Contact;
use jiffy_fleet_core::record::{KeyHash, Row, RowKey, Table};
use jiffy_fleet_core::{FleetId, MemberId, Term};
use message::{decode_answer as decode, encode_request, error_of};
use parking_lot::{Mutex, RwLock};
use state::State;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use writer::{Committed, WriteRequest, Writer};

/// Path of requests about tables on the members' channel.
pub const TABLES_PATH: &str = "/tables";
/// Time without contact after which a member rejects calls that use keys.
pub const CONTACT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum time for which a change waits for the confirmation of a member.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(1);
/// Usual maximum duration of a change: a takeover by another coordinator takes up to 20 s.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(25);
/// Pause before a change is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Maximum number of changes that wait for the writer.
const MAX_WAITING: usize = 4_096;

/// Clock that also advances while the host is suspended. Returns the time since a fixed moment.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Settings of [`Tables`].
pub struct TablesConfig {
    /// Fleet.
    pub fleet: FleetId,
    /// Control records of the fleet.
    pub records: Arc<SealedRecords>,
    /// Other members.
    pub peers: Arc<dyn Peers>,
    /// Clock.
    pub clock: Clock,
    /// Maximum duration of a change.
    pub change_timeout: Duration,
}

/// State that the tasks of a member share.
struct Shared {
    fleet: FleetId,
    records: Arc<SealedRecords>,
    peers: Arc<dyn Peers>,
    clock: Clock,
    /// Maximum duration of a change.
    change_timeout: Duration,
    state: RwLock<State>,
    /// Held while parts are read.
    loading: tokio::sync::Mutex<()>,
    contact: Mutex<Contact>,
    /// Number of the last commit in memory.
    number: watch::Sender<u64>,
}

/// Tables of the fleet, as this member sees them.
#[derive(Clone)]
pub struct Tables {
    shared: Arc<Shared>,
    requests: mpsc::Sender<WriteRequest>,
    _tasks: Arc<Tasks>,
}

/// Background tasks. They end when the last handle is dropped.
struct Tasks(Vec<JoinHandle<()>>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables")
            .field("number", &self.number())
            .finish_non_exhaustive()
    }
}

/// Committed change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// Changed row. Of an import, the last one.
    pub row: Row,
    /// Number of the commit.
    pub number: u64,
    /// Members that have not confirmed the commit within [`PEER_TIMEOUT`].
    pub unconfirmed: Vec<MemberId>,
}

impl Tables {
    /// Starts the tables of a member. The rows are loaded in the background.
    pub fn start(config: TablesConfig) -> Self {
        let (requests, receiver) = mpsc::channel(MAX_WAITING);
        let shared = Arc::new(Shared {
            fleet: config.fleet,
            records: config.records,
            peers: config.peers,
            clock: config.clock,
            change_timeout: config.change_timeout,
            state: RwLock::default(),
            loading: tokio::sync::Mutex::default(),
            contact: Mutex::default(),
            number: watch::Sender::new(0),
        });
        let writer = Writer::new(shared.clone(), receiver);
        let tasks = vec![
            tokio::spawn(writer.run()),
            tokio::spawn(contact::run(shared.clone())),
        ];
        Self {
            shared,
            requests,
            _tasks: Arc::new(Tasks(tasks)),
        }
    }

    /// Returns the number of the last commit in memory. Zero before the tables are loaded.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.shared.state.read().number()
    }

    /// Returns a receiver of the number of the last commit.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.shared.number.subscribe()
    }

    /// Checks that the rows can be used to verify keys.
    ///
    /// # Errors
    /// [`TableError::Disconnected`] if the member had no contact for [`CONTACT_TIMEOUT`].
    pub fn check_contact(&self) -> Result<(), TableError> {
        let now = (self.shared.clock)();
        self.shared.contact.lock().check(now)
    }

    /// Returns the row with this key.
    #[must_use]
    pub fn row(&self, key: &RowKey) -> Option<Arc<Row>> {
        self.shared.state.read().row(key).cloned()
    }

    /// Returns the API key with this current or previous secret. The caller checks whether the
    /// previous secret is still valid.
    #[must_use]
    pub fn key_by_hash(&self, hash: &KeyHash) -> Option<Arc<Row>> {
        self.shared.state.read().key_by_hash(hash).cloned()
    }

    /// Returns the secret of an API key with this name. `owner` is `None` for the owner of the
    /// fleet.
    #[must_use]
    pub fn secret(&self, owner: Option<&str>, name: &str) -> Option<Arc<Row>> {
        self.shared.state.read().secret(owner, name).cloned()
    }

    /// Returns all rows of a table, in no particular order.
    #[must_use]
    pub fn rows(&self, table: Table) -> Vec<Arc<Row>> {
        self.shared.state.read().rows(table).cloned().collect()
    }

    /// Accepts tables that are older than the rows in memory, because an operator has restored the
    /// records from a backup. Keys that were created after the backup are unknown from then on.
    ///
    /// # Errors
    /// [`TableError`] if the records cannot be read or used. The rows in memory then remain.
    pub async fn accept_restore(&self) -> Result<(), TableError> {
        self.shared.reload().await
    }

    /// Reads the tables from the records.
    ///
    /// # Errors
    /// [`TableError`] if the records cannot be read or used.
    pub async fn refresh(&self) -> Result<(), TableError> {
        self.shared.load().await.map(drop)
    }

    /// Makes a change, through the member that writes the tables. Waits until all reachable members
    /// have confirmed the change, at most for [`PEER_TIMEOUT`].
    ///
    /// # Errors
    /// [`TableError::Unsettled`] if the change may have been made. With any other error it was not
    /// made.
    pub async fn change(&self, action: Action) -> Result<Changed, TableError> {
        let change = Change {
            request: secret::new_request()?,
            action,
        };
        let changed = self.change_until_known(change).await?;
        // The next call on this member must see the change, even if the writer's push was lost.
        self.shared.state.write().apply(changed.row.clone());
        Ok(changed)
    }

    /// Sends a change until a writer answers.
    async fn change_until_known(&self, change: Change) -> Result<Changed, TableError> {
        let deadline = Instant::now() + self.shared.change_timeout;
        let mut may_be_made = false;
        loop {
            let sent = match self.shared.peers.writer() {
                Some((writer, _)) if writer == self.shared.peers.own() => {
                    timeout_at(deadline, self.submit(change.clone())).await
                }
                Some((writer, _)) => {
                    timeout_at(deadline, self.forward(writer, change.clone())).await
                }
                None => Ok(Err(TableError::NoWriter)),
            };
            match sent {
                Ok(Err(TableError::NoWriter | TableError::NotWriter(_))) => {}
                // The outcome is unknown. Send the change again: the writer recognises its number,
                // and so does not make it twice.
                Ok(Err(TableError::Unsettled)) => may_be_made = true,
                Ok(result) => return result,
                Err(_) => return Err(TableError::Unsettled),
            }
            if Instant::now() + RETRY_PAUSE >= deadline {
                return Err(if may_be_made {
                    TableError::Unsettled
                } else {
                    TableError::NoWriter
                });
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Passes a change to the writer of this member.
    async fn submit(&self, change: Change) -> Result<Changed, TableError> {
        let (answer, committed) = oneshot::channel();
        let request = WriteRequest { change, answer };
        let own = self.shared.peers.own();
        if self.requests.send(request).await.is_err() {
            return Err(TableError::NotWriter(own));
        }
        match committed.await {
            Ok(Ok(Committed {
                row,
                number,
                unconfirmed,
            })) => Ok(Changed {
                row,
                number,
                unconfirmed,
            }),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(TableError::Unsettled),
        }
    }

    /// Sends a change to the member that writes the tables.
    async fn forward(&self, writer: MemberId, change: Change) -> Result<Changed, TableError> {
        let request = TableRequest::Change(Box::new(change));
        match self.shared.request(writer, request).await? {
            TableAnswer::Changed {
                row,
                number,
                unconfirmed,
            } => Ok(Changed {
                row: *row,
                number,
                unconfirmed,
            }),
            TableAnswer::Failed { kind, message } => Err(error_of(writer, kind, message)),
            TableAnswer::Contact { .. } => Err(TableError::Unsettled),
        }
    }

    /// Handles a request of another member on [`TABLES_PATH`]. `peer` is the member that the
    /// transport has authenticated.
    ///
    /// # Errors
    /// [`TableError::Message`] if the request cannot be used.
    pub async fn handle(&self, peer: MemberId, body: &[u8]) -> Result<Vec<u8>, TableError> {
        let fleet = &self.shared.fleet;
        let answer = match decode_request(body, fleet)? {
            TableRequest::Change(change) => {
                let submitted = timeout(self.shared.change_timeout, self.submit(*change)).await;
                match submitted.unwrap_or(Err(TableError::Unsettled)) {
                    Ok(changed) => TableAnswer::Changed {
                        row: Box::new(changed.row),
                        number: changed.number,
                        unconfirmed: changed.unconfirmed,
                    },
                    Err(e) => TableAnswer::from(&e),
                }
            }
            TableRequest::Push(push) => self.shared.receive(peer, push).await,
            TableRequest::Contact => self.shared.contact_answer(),
        };
        message::encode_answer(fleet, answer)
    }
}

impl Shared {
    /// Returns the term of this member as the coordinator, which writes the tables. `None` if
    /// another member is the coordinator.
    fn term(&self) -> Option<Term> {
        let (writer, term) = self.peers.writer()?;
        (writer == self.peers.own()).then_some(term)
    }

    fn is_writer(&self) -> bool {
        self.term().is_some()
    }

    /// Sends a request to another member.
    async fn request(
        &self,
        member: MemberId,
        request: TableRequest,
    ) -> Result<TableAnswer, TableError> {
        let body = encode_request(&self.fleet, request)?;
        match self.peers.call(member, TABLES_PATH, body.into()).await {
            Ok(answer) => decode(&answer, &self.fleet),
            Err(PeerError::Unreachable { .. }) => Err(TableError::NoWriter),
            Err(PeerError::NoAnswer { .. }) => Err(TableError::Unsettled),
        }
    }

    /// Answer to a host that requests the age of this host's tables.
    fn contact_answer(&self) -> TableAnswer {
        let age = if self.is_writer() {
            Some(Duration::ZERO)
        } else {
            self.contact.lock().age((self.clock)())
        };
        TableAnswer::Contact {
            number: self.state.read().number(),
            age_ms: age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

//! [`Node`]: the handle by which the other parts of a daemon use its node. The node is the part
//! that takes part in the fleet: it registers this host, and answers queries of other members.
//!
//! An *epoch* of a member lasts from its registration with the coordinator until the coordinator
//! declares it dead. A restart of the daemon continues the epoch, but a reboot of the host does
//! not. A *row* is the entry of a sandbox in the coordinator's directory, which has the host and
//! the state of each sandbox. To *claim* a stored sandbox means to become its owner.

mod locate;
mod members;
mod operate;
mod placement;

use super::clock::Clock;
use super::executor::{Command, Executor};
use super::host::Host;
use super::messenger::Messenger;
use super::query::{Answer, HostSummary, Query};
use super::rows::Rows;
use super::shard::ShardFile;
use super::view::{CoordinatorStatus, FleetStatus, NodeStatus, View};
use crate::{RecordError, SealedRecords};
use jiffy_fleet_core::{
    BudgetOwner, FleetId, Member, MemberConfig, MemberId, MembershipError, Message, Owner,
    RejectionReason, RowChange, ShardId, SharedShares,
};
use locate::Places;
use members::Current;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

pub use locate::{LocateError, Place, ReserveError};
pub use members::Members;
pub use placement::PlaceError;

/// Maximum number of commands that wait for the executor.
const MAX_COMMANDS: usize = 1024;
/// Maximum duration of a query to another member.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of queries that run at the same time for one request.
const MAX_CONCURRENT_QUERIES: usize = 32;

/// Settings and connections of a node.
pub struct NodeConfig {
    /// Settings of the member.
    pub member: MemberConfig,
    /// Shard of the member: the part of the fleet's sandboxes for which its coordinator decides.
    pub shard: ShardId,
    /// Records of the fleet.
    pub records: Arc<SealedRecords>,
    /// Transport to the other members.
    pub messenger: Arc<dyn Messenger>,
    /// Daemon of this member.
    pub host: Arc<dyn Host>,
    /// Clock.
    pub clock: Arc<dyn Clock>,
}

/// Error of a method of [`Node`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// Too many requests wait for the node.
    #[error("the fleet node of this host has too many requests: retry")]
    Busy,
    /// The node has stopped.
    #[error("the fleet node of this host has stopped: retry after the restart of the daemon")]
    Stopped,
    /// The command is not possible.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The command may take effect later.
    #[error(
        "the coordinator has not confirmed the command on {0} yet: `jiffy fleet nodes` shows the \
         state of the host"
    )]
    Unconfirmed(MemberId),
    /// The placement of a sandbox on this host is not valid any longer.
    #[error("the placement on this host is not valid any longer: {0}")]
    Placement(RejectionReason),
}

/// Handle of a node. Clones are handles of the same node, which stops after the last one was
/// dropped.
#[derive(Clone)]
pub struct Node {
    inner: Arc<Inner>,
}

/// State of a node, shared by its handles.
struct Inner {
    pub fleet: FleetId,
    pub commands: mpsc::Sender<Command>,
    pub view: watch::Receiver<Arc<View>>,
    pub rows: Arc<Rows>,
    pub changed: Arc<Notify>,
    pub clock: Arc<dyn Clock>,
    pub messenger: Arc<dyn Messenger>,
    pub host: Arc<dyn Host>,
    pub places: Places,
    pub members: watch::Receiver<Current>,
    pub shares: SharedShares,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Node").field(&self.id()).finish()
    }
}

impl Node {
    /// Starts a node in the current runtime. The caller reports the existing sandboxes with
    /// [`Self::change_row`] before it accepts requests.
    ///
    /// # Errors
    /// [`RecordError`] if the number of the shard is invalid.
    pub fn start(config: NodeConfig) -> Result<Self, RecordError> {
        let fleet = config.member.fleet.clone();
        let shard = ShardFile::new(config.records.clone(), fleet.clone(), config.shard)?;
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        let (view_sender, view) = watch::channel(Arc::new(View::new(config.member.id)));
        let (members_sender, members) = watch::channel(Current::default());
        let member = Member::new(config.member.clone(), config.clock.now());
        let shares = member.shared_shares();
        shares.lock().set_complete(config.host.starts_counted());
        let inner = Arc::new(Inner {
            fleet,
            commands: commands.clone(),
            view,
            rows: Arc::default(),
            changed: Arc::default(),
            clock: config.clock.clone(),
            messenger: config.messenger.clone(),
            host: config.host.clone(),
            places: Places::default(),
            members,
            shares,
        });
        let receiver_of_view = inner.view.clone();
        tokio::spawn(members::run(
            Arc::downgrade(&inner),
            receiver_of_view,
            members_sender,
        ));
        let executor = Executor::new(
            &config,
            member,
            shard,
            (commands.downgrade(), receiver),
            view_sender,
            (inner.rows.clone(), inner.changed.clone()),
        );
        tokio::spawn(executor.run());
        Ok(Self { inner })
    }

    /// Returns the number of this member.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.inner.view.borrow().member
    }

    /// Returns the state after the latest event.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        self.inner.view.borrow().clone()
    }

    /// Waits until the state fulfils a condition.
    ///
    /// # Errors
    /// [`NodeError::Stopped`] if the node stops before.
    pub async fn wait_for(
        &self,
        mut condition: impl FnMut(&View) -> bool,
    ) -> Result<Arc<View>, NodeError> {
        let mut view = self.inner.view.clone();
        let reached = view.wait_for(|view| condition(view)).await;
        reached
            .map(|view| view.clone())
            .map_err(|_| NodeError::Stopped)
    }

    /// Returns this member and its epoch if it may claim, resume and restore stored sandboxes.
    #[must_use]
    pub fn authority(&self) -> Option<Owner> {
        // The clock is read after the state: the epoch may have ended in between, but not before
        // the deadline.
        let view = self.view();
        view.authority(self.inner.clock.now())
    }

    /// Returns whether an owner's epoch is dead according to the record of the shard.
    #[must_use]
    pub fn is_dead(&self, owner: Owner) -> bool {
        self.members().is_dead(owner)
    }

    /// Reports a change of a local sandbox.
    pub fn change_row(&self, change: RowChange) {
        if self.inner.rows.change(change) {
            self.inner.changed.notify_one();
        }
    }

    /// Changes the limit of an owner's budget. `None` removes the limit.
    ///
    /// # Errors
    /// [`NodeError::Stopped`] if the node has stopped.
    pub async fn set_limit(&self, owner: BudgetOwner, limit: Option<u64>) -> Result<(), NodeError> {
        let command = Command::SetLimit(owner, limit);
        let sent = self.inner.commands.send(command).await;
        sent.map_err(|_| NodeError::Stopped)
    }

    /// Processes a message of another member. Returns the messages with which this member replies
    /// on the same connection.
    ///
    /// # Errors
    /// [`NodeError::Busy`] if too many messages wait.
    pub async fn deliver(
        &self,
        from: MemberId,
        message: Message,
    ) -> Result<Vec<Message>, NodeError> {
        let (sender, replies) = oneshot::channel();
        self.try_send(Command::Message(from, Box::new(message), sender))?;
        replies.await.map_err(|_| NodeError::Stopped)
    }

    /// Answers a query of another member.
    ///
    /// # Errors
    /// [`NodeError::Busy`] if too many queries wait.
    pub async fn answer(&self, from: MemberId, query: Query) -> Result<Answer, NodeError> {
        match query {
            Query::Summary => Ok(Answer::Summary(self.inner.host.summary())),
            Query::Local(hash) => Ok(self.local(hash)),
            Query::Members(digest) => Ok(self.members_answer(&digest)),
            Query::Operate(operation) => self.answer_operation(operation).await,
            Query::AcceptRestore => Ok(Answer::Accepted(self.accept_restore().await?)),
            Query::Directory(_)
            | Query::Reserve(_)
            | Query::Heartbeats
            | Query::Place(_)
            | Query::Ended(_)
            | Query::Share(_)
            | Query::Why(..) => {
                let (sender, answer) = oneshot::channel();
                self.try_send(Command::Query(from, query, sender))?;
                answer.await.map_err(|_| NodeError::Stopped)
            }
        }
    }

    fn try_send(&self, command: Command) -> Result<(), NodeError> {
        let sent = self.inner.commands.try_send(command);
        sent.map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => NodeError::Busy,
            mpsc::error::TrySendError::Closed(_) => NodeError::Stopped,
        })
    }

    /// Sends a query to a member, which may be this one. `None` without an answer within 1 s.
    pub async fn query(&self, to: MemberId, address: &str, query: Query) -> Option<Answer> {
        if to == self.id() {
            return self.answer(to, query).await.ok();
        }
        let answer = self.inner.messenger.query(to, address, &query);
        match timeout(QUERY_TIMEOUT, answer).await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                tracing::debug!(member = %to, %error, "a member did not answer a query");
                None
            }
            Err(_) => None,
        }
    }

    /// Sends a query to each other live member, with bounded concurrency. Returns the members with
    /// their answers, in the order of their arrival.
    pub async fn query_all(&self, query: &Query) -> Vec<(MemberId, Option<Answer>)> {
        let mut waiting = self.members().peers(self.id()).into_iter();
        let mut running = JoinSet::new();
        let mut answers = Vec::new();
        loop {
            while running.len() < MAX_CONCURRENT_QUERIES
                && let Some((member, address)) = waiting.next()
            {
                let (node, query) = (self.clone(), query.clone());
                running.spawn(async move { (member, node.query(member, &address, query).await) });
            }
            match running.join_next().await {
                Some(joined) => answers.extend(joined.ok()),
                None => return answers,
            }
        }
    }

    /// Returns the state of the fleet. Members that do not answer within 1 s have no summary.
    pub async fn status(&self) -> FleetStatus {
        let view = self.view();
        let members = self.members();
        let heartbeats = async {
            let (member, address) = members.coordinator()?;
            match self.query(member, &address, Query::Heartbeats).await? {
                Answer::Heartbeats(heartbeats) => Some(heartbeats),
                _ => None,
            }
        };
        let (heartbeats, answers) = tokio::join!(heartbeats, self.query_all(&Query::Summary));
        let mut summaries: BTreeMap<MemberId, HostSummary> = answers
            .into_iter()
            .filter_map(|(member, answer)| match answer? {
                Answer::Summary(summary) => Some((member, summary)),
                _ => None,
            })
            .collect();
        summaries.insert(view.member, self.inner.host.summary());
        let ages: BTreeMap<_, _> = match &heartbeats {
            Some(heartbeats) => heartbeats.ages_ms.iter().copied().collect(),
            None => BTreeMap::new(),
        };
        let is_known = !members.rows.is_empty();
        FleetStatus {
            fleet: self.inner.fleet.clone(),
            member: view.member,
            authority: self.authority(),
            is_ready: view.is_ready(),
            coordinator: is_known.then(|| CoordinatorStatus {
                member: members.coordinator,
                term: members.term,
                is_directory_complete: heartbeats
                    .as_ref()
                    .is_some_and(|heartbeats| heartbeats.is_directory_complete),
            }),
            rejected: view.rejected,
            mass_silence: heartbeats.and_then(|heartbeats| heartbeats.mass_silence),
            is_regressed: view.regressed.is_some(),
            nodes: members
                .rows
                .iter()
                .map(|row| NodeStatus {
                    row: row.clone(),
                    heartbeat_age_ms: ages.get(&row.id).copied(),
                    summary: summaries.remove(&row.id),
                })
                .collect(),
        }
    }

    /// Stops the node: it sends and answers nothing afterwards. Sandboxes are not affected.
    pub async fn stop(&self) {
        let (sender, stopped) = oneshot::channel();
        if self
            .inner
            .commands
            .send(Command::Stop(sender))
            .await
            .is_ok()
        {
            // Ignore an error: the node has stopped before.
            let _ = stopped.await;
        }
    }
}

//! Executor: the task of a node that drives the state machine `jiffy_fleet_core::Member`. It
//! reports events (messages, results of reads and writes, commands, time), and executes the
//! returned effects in order. If this member is the coordinator, it also selects the hosts of new
//! sandboxes (`placement`) and answers queries about its directory, which has a row for each
//! sandbox. A *shard* is a part of the fleet's sandboxes. An *epoch* of a member lasts from its
//! registration until the coordinator declares it dead (by a *verdict*).

mod decisions;
mod placement;

use super::clock::Clock;
use super::handle::NodeConfig;
use super::host::Host;
use super::outbox::{Outbox, Replies, merge_changes};
use super::query::{Answer, Heartbeats, Operation, Query, RowPlace};
use super::rows::Rows;
use super::shard::{ShardAnswer, ShardFile};
use super::view::View;
use decisions::Decisions;
use jiffy_fleet_core::{
    Admission, BudgetOwner, Effect, Epoch, Event, Member, MemberId, MembershipError, Message,
    Millis, Owner, RejectionReason, SandboxHash,
};
use placement::CreateRates;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Maximum number of replies that wait for the executor.
const MAX_REPLIES: usize = 256;
/// Maximum number of commands before the state is published. Publishing clones the state.
const MAX_BATCH: usize = 64;
/// Minimum interval of calls of [`Host::status`].
const STATUS_INTERVAL_MS: u64 = 500;
/// Delay before a failed reconciliation is repeated.
const RECONCILE_PAUSE: Duration = Duration::from_secs(2);
/// Time for which a row of the directory is reserved for a create.
const RESERVATION_MS: u64 = 30_000;
/// Maximum number of reservations.
const MAX_RESERVATIONS: usize = 65_536;
/// Minimum sleep, so that the executor never uses a whole processor.
const MIN_SLEEP: Duration = Duration::from_millis(1);

/// Request to the executor.
pub(super) enum Command {
    Message(MemberId, Box<Message>, oneshot::Sender<Vec<Message>>),
    Query(MemberId, Query, oneshot::Sender<Answer>),
    SetLimit(BudgetOwner, Option<u64>),
    Operate(Operation, oneshot::Sender<Result<(), MembershipError>>),
    AcceptPlacement(Box<Admission>, oneshot::Sender<Result<(), RejectionReason>>),
    HastenHeartbeat,
    AcceptRestore(oneshot::Sender<bool>),
    Reconciled(Epoch),
    Stop(oneshot::Sender<()>),
}

pub(super) struct Executor {
    member: Member,
    id: MemberId,
    clock: Arc<dyn Clock>,
    host: Arc<dyn Host>,
    shard: ShardFile,
    outbox: Outbox,
    replies: mpsc::Receiver<Replies>,
    commands: mpsc::Receiver<Command>,
    /// Weak: the executor stops when all handles are dropped.
    sender: mpsc::WeakSender<Command>,
    /// Reads and writes of the shard's record in flight.
    io: JoinSet<ShardAnswer>,
    rows: Arc<Rows>,
    changed: Arc<Notify>,
    view: View,
    published: watch::Sender<Arc<View>>,
    status_at: Option<Millis>,
    /// Reserved rows: member, time, and number of the decision (zero without a placement).
    reservations: HashMap<SandboxHash, (MemberId, Millis, u64)>,
    decisions: Decisions,
    rates: CreateRates,
    /// Messages from this member to itself: the coordinator also is a member.
    own: VecDeque<Event>,
}

impl Executor {
    pub fn new(
        config: &NodeConfig,
        member: Member,
        shard: ShardFile,
        (sender, commands): (mpsc::WeakSender<Command>, mpsc::Receiver<Command>),
        published: watch::Sender<Arc<View>>,
        (rows, changed): (Arc<Rows>, Arc<Notify>),
    ) -> Self {
        let (reply_sender, replies) = mpsc::channel(MAX_REPLIES);
        Self {
            member,
            id: config.member.id,
            clock: config.clock.clone(),
            host: config.host.clone(),
            shard,
            outbox: Outbox::new(config.messenger.clone(), reply_sender),
            replies,
            commands,
            sender,
            io: JoinSet::new(),
            rows,
            changed,
            view: View::new(config.member.id),
            published,
            status_at: None,
            reservations: HashMap::new(),
            decisions: Decisions::default(),
            rates: CreateRates::default(),
            own: VecDeque::new(),
        }
    }

    /// Processes events until the node is stopped.
    pub async fn run(mut self) {
        self.own.push_back(Event::Timer);
        loop {
            self.process_own();
            self.publish();
            let pause = self.member.wake_at().since(self.clock.now());
            let pause = Duration::from_millis(pause).max(MIN_SLEEP);
            let changed = self.changed.clone();
            tokio::select! {
                command = self.commands.recv() => {
                    let Some(command) = command else { return };
                    if !self.commands(command) {
                        return;
                    }
                }
                Some((from, messages)) = self.replies.recv() => {
                    for message in messages {
                        let message = Box::new(message);
                        self.handle(Event::Message { from, message }, None);
                    }
                }
                Some(answer) = self.io.join_next() => {
                    // The tasks do not panic, and are aborted with the executor only.
                    if let Ok(answer) = answer {
                        let event = self.shard.event(answer);
                        self.handle(event, None);
                    }
                }
                () = changed.notified() => self.send_changes(),
                () = sleep(pause) => self.timer(),
            }
        }
    }

    /// Processes a command and all waiting commands. Returns false if the node must stop.
    fn commands(&mut self, first: Command) -> bool {
        let mut next = Some(first);
        for _ in 0..MAX_BATCH {
            let Some(command) = next.or_else(|| self.commands.try_recv().ok()) else {
                break;
            };
            next = None;
            if let Command::Stop(stopped) = command {
                // Ignore an error: the caller does not wait.
                let _ = stopped.send(());
                return false;
            }
            self.command(command);
            self.process_own();
        }
        true
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Message(from, message, replies) => {
                let mut answers = Vec::new();
                self.handle(Event::Message { from, message }, Some((from, &mut answers)));
                // Ignore an error: the connection was closed.
                let _ = replies.send(answers);
            }
            Command::Query(from, query, answer) => {
                let _ = answer.send(self.answer(from, query));
            }
            Command::SetLimit(owner, limit) => self.member.set_limit(&owner, limit),
            Command::AcceptPlacement(admission, result) => {
                let now = self.clock.now();
                let _ = result.send(self.member.accept_placement(now, &admission));
            }
            Command::HastenHeartbeat => {
                self.status_at = None;
                self.member.hasten_heartbeat(self.clock.now());
            }
            Command::Operate(operation, result) => {
                let _ = result.send(self.operate(operation));
                // The timer event writes the changed record now.
                self.own.push_back(Event::Timer);
            }
            Command::AcceptRestore(accepted) => {
                let is_regressed = self.view.regressed.take().is_some();
                if is_regressed {
                    self.shard.accept_restore();
                    self.member.accept_restore();
                    self.own.push_back(Event::Timer);
                }
                let _ = accepted.send(is_regressed);
            }
            Command::Reconciled(epoch) => {
                if self.member.epoch() == Some(epoch) {
                    self.view.reconciled = Some(epoch);
                }
            }
            Command::Stop(_) => {}
        }
    }

    /// Executes an operator's command. The next write of the record makes it effective.
    fn operate(&mut self, operation: Operation) -> Result<(), MembershipError> {
        let now = self.clock.now();
        self.member.set_wall_clock(wall_ms());
        match operation {
            Operation::Drain(member) => self.member.set_draining(member, true),
            Operation::Undrain(member) => self.member.set_draining(member, false),
            Operation::Remove(member) => self.member.remove(now, member),
            Operation::ConfirmDead(member) => self.member.confirm_dead(now, member),
        }
    }

    /// Answers a query that only the coordinator can answer.
    fn answer(&mut self, from: MemberId, query: Query) -> Answer {
        match query {
            Query::Place(request) => return self.place(from, &request),
            Query::Ended(end) => return self.end_placement(end),
            Query::Share(request) => return self.share(from, &request),
            Query::Why(row, text) => return self.why(row, &text),
            _ => {}
        }
        let now = self.clock.now();
        let is_complete = self.member.is_directory_complete();
        let Some(directory) = self.member.directory() else {
            return Answer::Incomplete;
        };
        match query {
            Query::Directory(hash) | Query::Reserve(hash) => {
                if let Some(located) = directory.find(hash) {
                    return Answer::Found(RowPlace {
                        host: located.host,
                        revision: located.revision,
                        state: located.state,
                    });
                }
                if !is_complete {
                    return Answer::Incomplete;
                }
                match query {
                    Query::Reserve(hash) => self.reserve(now, from, hash),
                    _ => Answer::Absent,
                }
            }
            Query::Heartbeats => {
                let heartbeats = self.member.heartbeats();
                Answer::Heartbeats(Heartbeats {
                    ages_ms: heartbeats
                        .filter_map(|(member, at)| Some((member, now.since(at?))))
                        .collect(),
                    is_directory_complete: is_complete,
                    mass_silence: self.view.mass_silence,
                })
            }
            // `Node::answer` and the first `match` have answered the other queries.
            _ => Answer::Incomplete,
        }
    }

    /// Reserves a row for a create on `from`, unless another member has reserved it recently.
    fn reserve(&mut self, now: Millis, from: MemberId, hash: SandboxHash) -> Answer {
        // Without authority, this member may no longer be the coordinator.
        if self.member.authority(now).is_none() || !self.has_room_for_reservation(now) {
            return Answer::Incomplete;
        }
        let entry = self.reservations.entry(hash).or_insert((from, now, 0));
        if entry.0 != from && now.since(entry.1) < RESERVATION_MS {
            return Answer::Found(RowPlace {
                host: entry.0,
                revision: Default::default(),
                state: jiffy_fleet_core::RowState::Running,
            });
        }
        *entry = (from, now, entry.2);
        Answer::Reserved
    }

    /// Returns whether another row can be reserved.
    fn has_room_for_reservation(&mut self, now: Millis) -> bool {
        if self.reservations.len() >= MAX_RESERVATIONS {
            self.reservations
                .retain(|_, (_, at, _)| now.since(*at) < RESERVATION_MS);
        }
        self.reservations.len() < MAX_RESERVATIONS
    }

    /// Updates the state of the host for the next heartbeat, and reports the timer event.
    fn timer(&mut self) {
        let now = self.clock.now();
        if self
            .status_at
            .is_none_or(|at| now.since(at) >= STATUS_INTERVAL_MS)
        {
            self.status_at = Some(now);
            self.member.set_status(self.host.status());
            self.member.set_wall_clock(wall_ms());
        }
        self.handle(Event::Timer, None);
    }

    fn send_changes(&mut self) {
        let mut effects = Vec::new();
        for change in self.rows.clone().take_changes() {
            self.member.change_row(change, &mut effects);
        }
        let effects = merge_changes(effects);
        self.execute(effects, None);
    }

    /// Processes the events in `own`.
    fn process_own(&mut self) {
        while let Some(event) = self.own.pop_front() {
            self.handle(event, None);
        }
    }

    fn handle(&mut self, event: Event, reply: Option<(MemberId, &mut Vec<Message>)>) {
        let mut effects = Vec::new();
        // Read the clock after the event was received: an earlier time could prolong deadlines.
        self.member.handle(self.clock.now(), event, &mut effects);
        self.execute(effects, reply);
    }

    /// Executes effects in order. `reply` collects the messages that answer a request.
    fn execute(&mut self, effects: Vec<Effect>, mut reply: Option<(MemberId, &mut Vec<Message>)>) {
        for effect in effects {
            match effect {
                Effect::Send { to, message, .. } if to == self.id => {
                    let from = self.id;
                    self.own.push_back(Event::Message { from, message });
                }
                Effect::Send {
                    to,
                    address: None,
                    message,
                } => match &mut reply {
                    Some((from, replies)) if *from == to => replies.push(*message),
                    // Other members are reached at their registered address.
                    _ => {
                        let row = self.view.row(to);
                        if let Some(address) = row.map(|row| row.address.clone()) {
                            self.outbox.send(to, address, *message);
                        }
                    }
                },
                Effect::Send {
                    to,
                    address: Some(address),
                    message,
                } => self.outbox.send(to, address, *message),
                Effect::ReadShard => {
                    self.io.spawn(self.shard.read());
                }
                Effect::ReplaceShard {
                    write,
                    record,
                    expected,
                } => match self.shard.replace(write, &record, &expected) {
                    Ok(replace) => {
                        self.io.spawn(replace);
                    }
                    Err(event) => self.own.push_back(event),
                },
                Effect::ListRows { list, after, limit } => {
                    let (rows, is_last) = self.rows.page(after, limit);
                    self.own.push_back(Event::RowsListed {
                        list,
                        after,
                        rows,
                        is_last,
                    });
                }
                effect => self.report(effect),
            }
        }
    }

    /// Executes an effect that informs the daemon or the log.
    fn report(&mut self, effect: Effect) {
        match effect {
            Effect::Registered { epoch } => {
                tracing::info!(member = %self.id, %epoch, "registered in the fleet");
                self.view.rejected = None;
                self.view.reconciled = None;
                self.start_reconciliation(epoch);
            }
            Effect::EpochEnded { epoch } => {
                tracing::warn!(
                    member = %self.id, %epoch,
                    "the epoch of this host has ended: it resumes no stored sandboxes until its \
                     next registration"
                );
                self.view.reconciled = None;
                self.host.epoch_ended(epoch);
            }
            Effect::TermStarted(term) => {
                tracing::info!(member = %self.id, %term, "this host is the coordinator");
                self.reservations.clear();
                self.decisions.clear();
                self.rates.clear();
            }
            Effect::TermEnded { term, reason } => {
                tracing::info!(member = %self.id, %term, ?reason, "this host is no longer the coordinator");
                self.view.mass_silence = None;
            }
            Effect::Verdict(owner) => {
                tracing::warn!(member = %owner.member, epoch = %owner.epoch, "declared the epoch of a host dead");
                self.host.verdict(owner);
            }
            Effect::MassSilence { silent, members } => {
                if silent > 0 {
                    tracing::error!(
                        silent,
                        members,
                        "most hosts are silent, declaring no host dead"
                    );
                }
                self.view.mass_silence = (silent > 0).then_some((silent, members));
            }
            Effect::Rejected(reason) => {
                if self.view.rejected != Some(reason) {
                    tracing::warn!(member = %self.id, %reason, "the coordinator rejected a message of this host");
                }
                self.view.rejected = Some(reason);
            }
            Effect::Pools(pools) => self.host.set_pools(pools),
            Effect::RowsRemoved { member, rows } => self.end_reservations(member, &rows),
            Effect::RowsRejected { member, error } => {
                tracing::warn!(%member, %error, "cannot store rows of a host");
            }
            Effect::Regressed { term, seq } => {
                if self.view.regressed.is_none() {
                    tracing::error!(
                        %term, seq,
                        "the record of the shard is older than before: if the records were \
                         restored from a backup, run `jiffy fleet accept-restore`"
                    );
                }
                self.view.regressed = Some((term, seq));
            }
            // Executed by the caller.
            Effect::Send { .. }
            | Effect::ReadShard
            | Effect::ReplaceShard { .. }
            | Effect::ListRows { .. } => {}
        }
    }

    /// Compares local sandboxes with their heads (records of the owners) in the background: others
    /// may have resumed or killed them while this host was away. The node is ready afterwards.
    fn start_reconciliation(&self, epoch: Epoch) {
        let owner = Owner {
            member: self.id,
            epoch,
        };
        let (host, sender) = (self.host.clone(), self.sender.clone());
        let view = self.published.subscribe();
        tokio::spawn(async move {
            while let Err(error) = host.reconcile(owner).await {
                tracing::warn!(%error, "cannot compare sandboxes with their heads, retrying");
                tokio::time::sleep(RECONCILE_PAUSE).await;
                if view.borrow().epoch != Some(epoch) {
                    return;
                }
            }
            if let Some(sender) = sender.upgrade() {
                // Ignore an error: the node has stopped.
                let _ = sender.send(Command::Reconciled(epoch)).await;
            }
        });
    }

    /// Publishes the state if it has changed.
    fn publish(&mut self) {
        self.view.update(&self.member);
        if **self.published.borrow() != self.view {
            self.published.send_replace(Arc::new(self.view.clone()));
        }
    }
}

/// Returns the wall clock in milliseconds since 1970.
fn wall_ms() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    time.map_or(0, |time| time.as_millis() as u64)
}

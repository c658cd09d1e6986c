//! Simulated hosts, clocks, network and store.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. A *root*
//! identifies the snapshot of a sandbox in the store, and its *manifest* lists the files. A
//! *mutation* is a deliberate defect that the checks must detect.
//!
//! A *verdict* is the decision of the coordinator that a member is dead.

use super::host::{Host, Input, Target};
use super::mutation::Mutation;
use super::records::{Answer, Key, Request, Store, Token};
use crate::random::Random;
use jiffy_fleet_core::{BudgetOwner, Digest, MemberId, Message, SandboxId, Timing, Version};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Time in milliseconds after which a caller stops waiting for the answer of the store.
const CALL_MS: u64 = 6_000;
/// Characters of sandbox ids.
const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// Event of the simulation.
#[derive(Debug)]
pub enum Action {
    /// Input of a process.
    Process {
        host: usize,
        process: u32,
        input: Box<Input>,
    },
    /// A request arrives at the store, and its answer follows after a delay.
    Arrive {
        host: usize,
        process: u32,
        target: Target,
        key: Key,
        request: Box<Request>,
        /// Delay of the answer. `None` if the answer is lost.
        answer_after: Option<u64>,
    },
    /// The caller stops waiting for the answer of the store.
    Limit {
        host: usize,
        process: u32,
        target: Target,
        key: Key,
        request: Box<Request>,
    },
    /// The manifest of a root is stored.
    Manifest(Digest),
    /// A root is removed from the store.
    Retract(Digest),
    /// A stopped process continues.
    Continue { host: usize, process: u32 },
    /// A process starts.
    Start { host: usize },
    /// The next fault.
    Fault,
    /// The next requests of clients.
    Clients,
    /// The next removal of killed heads.
    Purge,
}

/// Counts of one run.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    /// Executed actions.
    pub events: u64,
    /// Takeovers of the role of the coordinator.
    pub takeovers: u64,
    /// Verdicts on members.
    pub verdicts: u64,
    /// Claims after which a sandbox runs.
    pub claims: u64,
    /// Claims after which the restored guest is dropped.
    pub claims_lost: u64,
    /// Published pauses.
    pub stored: u64,
    /// Completed kills.
    pub kills: u64,
    /// Writes whose outcome is unknown to their caller.
    pub unknown: u64,
    /// Sandboxes that the coordinator has placed.
    pub placements: u64,
    /// Removed heads of killed sandboxes.
    pub purged: u64,
}

/// Simulated hosts, store and network, and the facts that the checks compare.
pub struct World {
    pub seed: u64,
    pub now: u64,
    pub mutation: Mutation,
    pub timing: Timing,
    pub random: Random,
    /// Actions by time and number.
    queue: BTreeMap<(u64, u64), Action>,
    next_action: u64,
    pub hosts: Vec<Host>,
    pub store: Store,
    /// End of the cut of each link, by sender and receiver.
    pub cuts: HashMap<(usize, usize), u64>,
    /// End of a period with delays of up to 25 s, by sender and receiver.
    pub slow: HashMap<(usize, usize), u64>,
    /// End of the outage of the store for a host.
    pub outages: Vec<u64>,
    pub violation: Option<String>,
    pub counts: Counts,
    /// Owners of budgets, with their limits.
    pub owners: Vec<(BudgetOwner, u64)>,
    /// Number of sandboxes by owner that hosts still ran when they returned after their verdict.
    /// They may exceed the limit.
    pub returned: Vec<u64>,
    pub next_sandbox: u64,
    /// Sandbox of each root, and the state of its guest (a number that grows while it runs).
    pub roots: HashMap<Digest, (SandboxId, u64)>,
    /// Newest state of the guest that was acknowledged as stored.
    pub acknowledged: BTreeMap<SandboxId, u64>,
    /// Time of the acknowledgement of each kill.
    pub killed: BTreeMap<SandboxId, u64>,
    /// Host that ran each revision with an identity.
    pub identities: BTreeMap<(SandboxId, u64), usize>,
    pub sandboxes: BTreeSet<SandboxId>,
    /// Faults and new sandboxes have ended.
    pub is_quiet: bool,
    /// Clients send no requests.
    pub has_no_clients: bool,
    /// Resumes are not limited by budgets, which are no longer checked.
    pub has_no_limits: bool,
    /// Effects are printed (`JIFFY_TRACE=1`).
    pub is_traced: bool,
}

impl World {
    /// Creates three to five hosts, whose processes start within 3 s. The seed determines all
    /// random choices.
    pub fn new(seed: u64, mutation: Mutation) -> Self {
        // The constant sets more bits of small seeds.
        let mut random = Random::new(seed ^ 0x5deece66d);
        let count = 3 + random.below(3) as usize;
        let owners = [6, 10, 40].map(|limit| (BudgetOwner(format!("key{limit}")), limit));
        let mut world = Self {
            seed,
            now: 1_000_000,
            mutation,
            timing: mutation.timing(),
            hosts: (0..count)
                .map(|index| Host::new(index, &mut random))
                .collect(),
            random,
            queue: BTreeMap::new(),
            next_action: 0,
            store: Store::default(),
            cuts: HashMap::new(),
            slow: HashMap::new(),
            outages: vec![0; count],
            violation: None,
            counts: Counts::default(),
            returned: vec![0; owners.len()],
            owners: owners.into(),
            next_sandbox: 0,
            roots: HashMap::new(),
            acknowledged: BTreeMap::new(),
            killed: BTreeMap::new(),
            identities: BTreeMap::new(),
            sandboxes: BTreeSet::new(),
            is_quiet: false,
            has_no_clients: false,
            has_no_limits: false,
            is_traced: std::env::var_os("JIFFY_TRACE").is_some(),
        };
        world.store.checks_grace = mutation == Mutation::None;
        let shard = crate::samples::shard(count as u32);
        world.store.create(Key::Shard, shard.encode().unwrap());
        for host in 0..count {
            let delay = u64::from(world.random.below(3_000));
            world.after(delay, Action::Start { host });
        }
        world.after(20_000, Action::Fault);
        world.after(15_000, Action::Clients);
        world.after(30_000, Action::Purge);
        world
    }

    /// Runs all actions up to a time, or up to a violation.
    pub fn run_until(&mut self, end: u64) {
        while let Some(entry) = self.queue.first_entry() {
            if entry.key().0 > end || self.violation.is_some() {
                return;
            }
            let ((at, _), action) = entry.remove_entry();
            self.now = at;
            self.counts.events += 1;
            self.execute(action);
        }
    }

    /// Schedules an action.
    pub fn after(&mut self, delay: u64, action: Action) {
        self.next_action += 1;
        self.queue
            .insert((self.now + delay, self.next_action), action);
    }

    /// Records the first violation of a guarantee, which ends the simulation.
    pub fn violate(&mut self, violation: String) {
        if self.violation.is_none() {
            self.violation = Some(format!("seed {}, {} ms: {violation}", self.seed, self.now));
        }
    }

    /// Returns a number from `from` up to `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + u64::from(self.random.below((to - from + 1) as u32))
    }

    /// Returns true in `percent` of all calls.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.random.below(100) < percent
    }

    /// Returns the id of a new sandbox.
    pub fn new_sandbox(&mut self) -> SandboxId {
        self.next_sandbox += 1;
        let mut id = [b'a'; 20];
        let mut rest = self.next_sandbox;
        for character in id.iter_mut().rev() {
            *character = ALPHABET[(rest % 32) as usize];
            rest /= 32;
        }
        let id = SandboxId::try_from(std::str::from_utf8(&id).unwrap()).unwrap();
        self.sandboxes.insert(id);
        id
    }

    /// Executes an action at its time.
    fn execute(&mut self, action: Action) {
        match action {
            Action::Process {
                host,
                process,
                input,
            } => self.input(host, process, *input),
            Action::Arrive {
                host,
                process,
                target,
                key,
                request,
                answer_after,
            } => {
                let (answer, violation) = self.store.execute(self.now, key, &request);
                if let (Key::Shard, Request::Write { token, .. }, Answer::Done(_)) =
                    (key, &*request, &answer)
                {
                    // The last part of a token is the number of the write.
                    let sent = self.hosts[host].sent.get(&token.3).copied();
                    if let Some(sent) = sent {
                        self.store.truth.renewed.insert((host, process), sent);
                    }
                    self.check_verdicts();
                    self.count_returned();
                }
                if let Some(violation) = violation {
                    self.violate(violation);
                }
                if let Some(delay) = answer_after {
                    self.answer(delay, host, process, target, answer);
                }
            }
            Action::Limit {
                host,
                process,
                target,
                key,
                request,
            } => self.limit(host, process, target, key, &request),
            Action::Manifest(root) => {
                self.store.roots.insert(root);
            }
            Action::Retract(root) => {
                self.store.roots.remove(&root);
                let id = self.roots[&root].0;
                if let Some(violation) = self.store.head_violation(id) {
                    self.violate(violation);
                }
            }
            Action::Continue { host, process } => self.continue_process(host, process),
            Action::Start { host } => self.start_process(host),
            Action::Fault => self.fault(),
            Action::Clients => self.clients(),
            Action::Purge => self.purge(),
        }
    }

    /// Delivers an answer of the store to the process that has called it.
    fn answer(&mut self, delay: u64, host: usize, process: u32, target: Target, answer: Answer) {
        let input = Box::new(Input::Answer { target, answer });
        self.after(
            delay,
            Action::Process {
                host,
                process,
                input,
            },
        );
    }

    /// Reports to the caller that the store has not answered in time. The outcome of a write is
    /// then unknown.
    fn limit(&mut self, host: usize, process: u32, target: Target, key: Key, request: &Request) {
        let answer = match request {
            Request::Read | Request::Purge { .. } => Answer::Failed,
            Request::Write { .. } => {
                self.counts.unknown += 1;
                Answer::Unknown
            }
        };
        let is_mutant = self.mutation == Mutation::UnchangedIsFailed;
        if let (true, Request::Write { expected, .. }) = (is_mutant, request) {
            let (read, _) = self.store.execute(self.now, key, &Request::Read);
            if let Answer::Read(current) = read
                && current.as_ref().map(|(_, version)| version) == expected.as_ref()
            {
                return self.answer(0, host, process, target, Answer::Lost(current));
            }
        }
        self.answer(0, host, process, target, answer);
    }

    /// Starts a call to the store.
    pub fn call(&mut self, host: usize, target: Target, key: Key, request: Request) {
        let process = self.hosts[host].process;
        let request = Box::new(request);
        if self.outages[host] > self.now {
            // A refused connection, or a request that is lost.
            if self.chance(30) {
                let delay = self.between(1, 100);
                let answer = match *request {
                    Request::Write { .. } => Answer::Rejected,
                    _ => Answer::Failed,
                };
                return self.answer(delay, host, process, target, answer);
            }
            return self.after(
                CALL_MS,
                Action::Limit {
                    host,
                    process,
                    target,
                    key,
                    request,
                },
            );
        }
        // Milliseconds until the request reaches the store.
        let there = match self.random.below(100) {
            0 => self.between(5_000, 25_000),
            1..4 => self.between(500, 4_000),
            _ => self.between(1, 40),
        };
        // Milliseconds until the answer reaches the host.
        let back = match self.random.below(100) {
            0 => CALL_MS,
            1..4 => self.between(500, 4_000),
            _ => self.between(1, 40),
        };
        let is_answered = there + back < CALL_MS;
        if !is_answered {
            self.after(
                CALL_MS,
                Action::Limit {
                    host,
                    process,
                    target,
                    key,
                    request: request.clone(),
                },
            );
        }
        // A write arrives also after its caller has stopped waiting. A read would have no effect
        // then.
        if is_answered || !matches!(*request, Request::Read) {
            self.after(
                there,
                Action::Arrive {
                    host,
                    process,
                    target,
                    key,
                    request,
                    answer_after: is_answered.then_some(back),
                },
            );
        }
    }

    /// Starts a conditional write.
    pub fn write(
        &mut self,
        host: usize,
        target: Target,
        key: Key,
        bytes: Vec<u8>,
        expected: Option<Version>,
        (operation, number): (u64, u64),
    ) {
        let token: Token = (host, self.hosts[host].process, operation, number);
        self.call(
            host,
            target,
            key,
            Request::Write {
                bytes,
                expected,
                token,
            },
        );
    }

    /// Sends an input to a process on another host.
    pub fn send(&mut self, from: usize, to: MemberId, input: Input) {
        let to = to.0 as usize - 1;
        let link = (from, to);
        if from != to {
            // One percent of the inputs is lost on an intact link, and one percent is duplicated.
            if self.cuts.get(&link).is_some_and(|&end| end > self.now) || self.chance(1) {
                return;
            }
            if self.chance(1) {
                let delay = self.between(1, 25_000);
                self.deliver(delay, to, input.clone());
            }
        }
        let is_slow = self.slow.get(&link).is_some_and(|&end| end > self.now);
        let delay = match is_slow {
            true => self.between(1, 25_000),
            false if from == to => 0,
            false => self.between(1, 30),
        };
        self.deliver(delay, to, input);
    }

    /// Delivers an input to a host after a delay.
    fn deliver(&mut self, delay: u64, host: usize, input: Input) {
        // `u32::MAX` is the process that runs at the time of the arrival: messages are addressed to
        // a host.
        self.after(
            delay,
            Action::Process {
                host,
                process: u32::MAX,
                input: Box::new(input),
            },
        );
    }

    /// Returns a random host.
    pub fn any_host(&mut self) -> usize {
        self.random.below(self.hosts.len() as u32) as usize
    }
}

/// Returns a message input.
pub fn message(from: usize, message: Message) -> Input {
    Input::Message {
        from: MemberId(from as u32 + 1),
        message: Box::new(message),
    }
}

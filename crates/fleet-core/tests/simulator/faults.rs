//! Random faults of hosts, network and store, and random requests of clients.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. An *epoch*
//! of a member lasts from its registration with the coordinator until the coordinator declares it
//! dead.
//!
//! A *share* is the part of an API key's limit that one member may use.

use super::host::{Input, Target};
use super::mutation::Mutation;
use super::operations::Operation;
use super::records::{Key, Request};
use super::sandboxes::Local;
use super::world::{Action, World};
use jiffy_fleet_core::record::{Head, HeadState};
use jiffy_fleet_core::{BudgetNeed, Purpose, SandboxId, may_purge};
use jiffy_scheduler::{PlacementRequest, Resources};

impl World {
    /// Causes a random fault and schedules the next one.
    pub fn fault(&mut self) {
        if self.is_quiet {
            return;
        }
        let next = self.between(1_500, 12_000);
        self.after(next, Action::Fault);
        let coordinator = self.hosts.iter().position(|entry| {
            entry
                .member
                .as_ref()
                .is_some_and(|member| member.is_coordinator())
        });
        // Faults of the coordinator are more frequent than faults of other hosts.
        let host = match coordinator {
            Some(coordinator) if self.chance(35) => coordinator,
            _ => self.any_host(),
        };
        let end = self.now + self.between(500, 40_000);
        match self.random.below(16) {
            0..3 => self.stop_process(host, end),
            3 => {
                self.kill_process(host);
                let delay = self.between(100, 15_000);
                self.after(delay, Action::Start { host });
            }
            4 | 5 => {
                self.lose_power(host);
                let delay = self.between(2_000, 130_000);
                self.after(delay, Action::Start { host });
            }
            // One host, or all hosts, cannot reach the store.
            6 => self.outages[host] = end,
            7 => {
                let end = self.now + self.between(500, 60_000);
                self.outages.fill(end);
            }
            8 => {
                // The coordinator loses the store and the connection to one member, which may then
                // take over.
                let host = coordinator.unwrap_or(host);
                let end = self.now + self.between(10_000, 50_000);
                self.outages[host] = end;
                let other = self.any_host();
                self.cut(host, other, end);
                self.cut(other, host, end);
            }
            9 | 10 => {
                // Messages are lost in one direction.
                let other = self.any_host();
                self.cut(host, other, end);
            }
            11 => {
                // No message of the host arrives, and often it receives none.
                for other in 0..self.hosts.len() {
                    self.cut(host, other, end);
                    if self.chance(70) {
                        self.cut(other, host, end);
                    }
                }
                if self.chance(40) {
                    self.outages[host] = end;
                }
            }
            12 => {
                // The host is isolated for longer than the head of a killed sandbox is retained.
                let end = self.now + self.between(90_000, 150_000);
                for other in 0..self.hosts.len() {
                    self.cut(host, other, end);
                    self.cut(other, host, end);
                }
            }
            _ => {
                // Messages from and to the host are delayed.
                for other in 0..self.hosts.len() {
                    self.slow.insert((host, other), end);
                    self.slow.insert((other, host), end);
                }
            }
        }
    }

    /// Cuts the link from one host to another until `end`.
    fn cut(&mut self, from: usize, to: usize, end: u64) {
        if from != to {
            self.cuts.insert((from, to), end);
        }
    }

    fn stop_process(&mut self, host: usize, end: u64) {
        if self.hosts[host].member.is_some() && self.hosts[host].stopped_until == 0 {
            self.hosts[host].stopped_until = end;
            let process = self.hosts[host].process;
            self.after(end - self.now, Action::Continue { host, process });
        }
    }

    /// Ends the process and all guests of a host.
    fn lose_power(&mut self, host: usize) {
        self.kill_process(host);
        let entry = &mut self.hosts[host];
        // The boot id of a process has four bits for this number.
        entry.boot = entry.boot % 15 + 1;
        entry.held.retain(|_, held| held.local != Local::Running);
    }

    /// Ends all faults.
    pub fn heal(&mut self) {
        self.is_quiet = true;
        self.cuts.clear();
        self.slow.clear();
        self.outages.fill(0);
        for host in 0..self.hosts.len() {
            if self.hosts[host].member.is_none() {
                self.after(1, Action::Start { host });
            }
            let process = self.hosts[host].process;
            if self.hosts[host].stopped_until > 0 {
                self.hosts[host].stopped_until = self.now;
                self.after(1, Action::Continue { host, process });
            }
        }
    }

    /// Sends requests of clients and schedules the next ones.
    pub fn clients(&mut self) {
        if self.has_no_clients {
            return;
        }
        let next = self.between(20, 300);
        self.after(next, Action::Clients);
        if self.chance(5) && !self.is_quiet {
            self.resume_everywhere();
        }
        let host = self.any_host();
        let entry = &self.hosts[host];
        if entry.member.is_none() || entry.stopped_until > self.now || !entry.is_accepting {
            return;
        }
        self.retry_publications(host);
        let owner = self.random.below(self.owners.len() as u32) as usize;
        if self.chance(30) && !self.is_quiet {
            return self.create_anywhere(host, owner);
        }
        let ids: Vec<_> = self.sandboxes.iter().copied().collect();
        if ids.is_empty() {
            return;
        }
        let id = ids[self.random.below(ids.len() as u32) as usize];
        self.request(host, id, owner);
    }

    /// Requests the resume of a stored sandbox on all hosts at the same time.
    fn resume_everywhere(&mut self) {
        let heads = self.store.heads();
        let paused = |head: &Head| head.state() == HeadState::Paused;
        let ids: Vec<_> = heads
            .iter()
            .map(|(head, _)| head)
            .filter(|h| paused(h))
            .collect();
        if ids.is_empty() {
            return;
        }
        let id = ids[self.random.below(ids.len() as u32) as usize].id;
        for host in 0..self.hosts.len() {
            let entry = &self.hosts[host];
            let is_stored = entry
                .held
                .get(&id)
                .is_none_or(|held| held.local == Local::Paused && held.root.is_some());
            if entry.member.is_some()
                && entry.stopped_until <= self.now
                && entry.is_accepting
                && is_stored
                && !entry.operations.contains_key(&id)
            {
                let owner = self.random.below(self.owners.len() as u32) as usize;
                self.resume(host, id, owner, false);
            }
        }
    }

    /// Uploads a paused sandbox whose snapshot is not in the store yet.
    fn retry_publications(&mut self, host: usize) {
        let entry = &self.hosts[host];
        let unstored = entry.held.iter().find(|(id, held)| {
            held.local == Local::Paused
                && held.root.is_none()
                && !entry.operations.contains_key(*id)
        });
        if let Some((&id, _)) = unstored {
            self.publish(host, id);
        }
    }

    /// Creates a sandbox on the host that the coordinator selects. Without a coordinator, creates
    /// it on this host, within its share of the limit.
    fn create_anywhere(&mut self, host: usize, owner: usize) {
        let key = self.owners[owner].0.clone();
        let local = self.hosts[host].clock(self.now);
        let member = self.hosts[host].member.as_mut().unwrap();
        let request = PlacementRequest {
            needs: Resources {
                cpu_milli: 1_000,
                memory_mib: 512,
                disk_mib: 1_024,
            },
            ..PlacementRequest::default()
        };
        match member.place(
            local,
            &[BudgetNeed {
                owner: key.clone(),
                amount: 1,
            }],
            &request,
        ) {
            Ok(placement) => {
                self.counts.placements += 1;
                if self.is_traced {
                    println!("{} PLACE {:?}", self.now, placement.admission);
                }
                let to = placement.admission.host.member;
                let admission = Box::new(placement.admission);
                self.send(host, to, Input::Create { owner, admission });
            }
            Err(_) => self.create(host, owner),
        }
    }

    /// Requests a random operation on a sandbox.
    fn request(&mut self, host: usize, id: SandboxId, owner: usize) {
        if self.hosts[host].operations.contains_key(&id) {
            return self.resume_during_publication(host, id);
        }
        let authority = self.hosts[host].authority(self.now);
        let Some(held) = self.hosts[host].held.get(&id).cloned() else {
            return self.request_elsewhere(host, id, owner);
        };
        match held.local {
            Local::Killing => self.start_kill(host, id, None),
            Local::Running => {
                let held = self.hosts[host].held.get_mut(&id).unwrap();
                held.value += 1;
                if self.is_quiet {
                    // The sandbox continues to run.
                } else if self.random.below(100) < 10 {
                    self.start_kill(host, id, None);
                } else {
                    self.pause(host, id);
                }
            }
            Local::Paused if self.chance(10) && !self.is_quiet => self.start_kill(host, id, None),
            Local::Paused if held.root.is_some() => {
                let from_stored = self.chance(50);
                self.resume(host, id, held.owner, from_stored);
            }
            Local::Paused => {
                // A state that is not stored is resumed locally. Once the sandbox has a head, this
                // requires the authority of the epoch in the head.
                let is_permitted =
                    held.head.is_none() || authority.is_some() && authority == held.owner_of_head();
                if is_permitted {
                    self.resume_locally(host, id);
                }
            }
        }
    }

    /// Cancels the upload of a paused sandbox, because a request resumes it.
    fn resume_during_publication(&mut self, host: usize, id: SandboxId) {
        let Some(Operation::Publish { machine, .. }) = self.hosts[host].operations.get_mut(&id)
        else {
            return;
        };
        if self.random.below(100) < 50 && machine.cancel() {
            self.hosts[host].operations.remove(&id);
        }
    }

    /// Resumes a paused sandbox of this host without a claim, within the share of the host.
    fn resume_locally(&mut self, host: usize, id: SandboxId) {
        let held = self.hosts[host].held[&id].clone();
        let key = self.owners[held.owner].0.clone();
        let local = self.hosts[host].clock(self.now);
        let member = self.hosts[host].member.as_mut().unwrap();
        if !member.shares().admit(local, &key, 1) {
            return;
        }
        if held.head.is_some() {
            self.check_identity(host, id, held.revision(), held.value);
        }
        let mut held = held;
        held.local = Local::Running;
        held.value += 1;
        self.hold(host, id, held);
    }

    /// Requests an operation on a sandbox that is not on this host.
    fn request_elsewhere(&mut self, host: usize, id: SandboxId, owner: usize) {
        let member = self.hosts[host].member.as_ref().unwrap();
        let is_coordinator = member.is_coordinator();
        let home = self.hosts.iter().find(|entry| entry.held.contains_key(&id));
        let home = home.map(|entry| entry.id);
        let is_dead = home.is_some_and(|home| {
            let row = member.shard().and_then(|shard| shard.row(home));
            row.is_some_and(|row| !row.state.is_live())
        });
        if is_dead && is_coordinator && self.chance(60) && !self.is_quiet {
            return self.start_kill(host, id, home);
        }
        if self.store.head(id).is_some() {
            let from_stored = self.chance(50);
            self.resume(host, id, owner, from_stored);
        }
    }

    /// Requests the home (the host that still has files of a killed sandbox) to remove them and to
    /// confirm this.
    fn request_confirmation(&mut self, home: usize, id: SandboxId) {
        let entry = &self.hosts[home];
        if entry.is_accepting
            && entry.stopped_until <= self.now
            && !entry.operations.contains_key(&id)
        {
            self.forget(home, id);
            let member = self.hosts[home].id;
            self.update(home, id, Purpose::Confirm(member));
        }
    }

    /// Removes heads of killed sandboxes.
    pub fn purge(&mut self) {
        self.after(3_000, Action::Purge);
        let host = self.any_host();
        for (head, version) in self.store.heads() {
            let HeadState::Killed(mut killed) = head.state() else {
                continue;
            };
            if let Some(home) = killed.home {
                self.request_confirmation(home.0 as usize - 1, head.id);
            }
            let mut decided = head.clone();
            if self.mutation == Mutation::PurgeBeforeReturn {
                killed.home = None;
                decided = Head::new(head.id, HeadState::Killed(killed), None, None);
            }
            if may_purge(&decided, self.now, &self.timing, &|_| false) {
                self.counts.purged += 1;
                let request = Request::Purge { expected: version };
                self.call(host, Target::None, Key::Head(head.id), request);
            }
        }
    }
}

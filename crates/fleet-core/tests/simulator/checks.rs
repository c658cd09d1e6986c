//! Guarantees of a fleet, which are checked after each step of the simulation. A *verdict* is the
//! decision of the coordinator, committed in the record of the shard, that an epoch is dead. A
//! *share* is the part of an API key's limit that one member may use.
//!
//! The *head* of a sandbox is the record that decides which member may run the sandbox. An *epoch*
//! of a member lasts from its registration with the coordinator until the coordinator declares it
//! dead.
//!
//! A *shard* is a part of the fleet's sandboxes. A *claim* of a sandbox is the write that makes a
//! member its owner in the head.

use super::mutation::Mutation;
use super::sandboxes::Local;
use super::world::World;
use jiffy_fleet_core::record::HeadState;
use jiffy_fleet_core::{Millis, Owner, Revision, SandboxId, Timing};

impl World {
    /// No process has authority in a dead epoch.
    pub fn check_authority(&mut self, host: usize) {
        let owner = self.hosts[host].authority(self.now);
        if let Some(owner) = owner.filter(|&owner| self.store.is_dead(owner)) {
            self.violate(format!("{owner} has authority after its verdict"));
        }
    }

    /// Called after each write of the record of the shard. No verdict is committed while the member
    /// still has authority from an acknowledged heartbeat. This must also hold for a stopped
    /// process, which may continue at any time.
    pub fn check_verdicts(&mut self) {
        for host in 0..self.hosts.len() {
            self.check_authority(host);
        }
    }

    /// Counts the running sandboxes of hosts that were registered again after their verdict. These
    /// sandboxes may exceed the limit: others were created while the host was dead.
    pub fn count_returned(&mut self) {
        for member in std::mem::take(&mut self.store.truth.returned) {
            let entry = &mut self.hosts[member.0 as usize - 1];
            for (owner, (key, _)) in self.owners.iter().enumerate() {
                let held = entry.held.values();
                let running = held
                    .filter(|held| held.owner == owner && held.is_running())
                    .count();
                let member = entry.member.as_mut();
                let in_use = member.map_or(0, |member| member.shares().share(key).1);
                self.returned[owner] += in_use.max(running as u64);
            }
        }
    }

    /// A coordinator acknowledges no heartbeat more than 9 s after it sent the last replacement of
    /// the record of the shard. `renewed` is the time of this sending.
    pub fn check_acknowledgement(&mut self, host: usize) {
        // A mutant that acknowledges for longer must be detected by the consequences, not here.
        if self.mutation != Mutation::None {
            return;
        }
        let entry = &self.hosts[host];
        let renewed = self
            .store
            .truth
            .renewed
            .get(&(host, entry.process))
            .copied();
        let age = entry.clock(self.now).since(renewed.unwrap_or(Millis(0)));
        if age > Timing::PRODUCTION.acknowledge {
            self.violate(format!("acknowledgement {age} ms after the last replace"));
        }
    }

    /// The shares of all members that are not dead do not exceed the limit, except by sandboxes
    /// that hosts brought back after their verdict.
    pub fn check_budget(&mut self, owner: usize) {
        if self.has_no_limits {
            return;
        }
        let (key, limit) = self.owners[owner].clone();
        let shard = self.store.shard();
        let mut sum = 0;
        for entry in &mut self.hosts {
            let row = shard.row(entry.id).filter(|row| row.state.is_live());
            let epoch = entry.member.as_ref().and_then(|member| member.epoch());
            // Shares of dead members and of ended epochs are not counted.
            if row.is_none_or(|row| epoch.is_some_and(|epoch| epoch != row.epoch)) {
                continue;
            }
            let running = entry
                .held
                .values()
                .filter(|held| held.owner == owner && held.is_running())
                .count() as u64;
            let share = entry.member.as_mut().map_or(0, |member| {
                let is_registered = member.epoch().is_some();
                let (share, in_use) = member.shares().share(&key);
                if is_registered { share } else { in_use }
            });
            sum += share.max(running);
        }
        let returned = self.returned[owner];
        if sum > limit + returned {
            self.violate(format!(
                "shares of {sum} exceed the limit of {limit} and {returned} returned sandboxes"
            ));
        }
    }

    /// A guest receives its identity only for the current claim, in the state that was stored last,
    /// and while no other guest of the sandbox has a live owner.
    pub fn check_identity(
        &mut self,
        host: usize,
        id: SandboxId,
        revision: Option<Revision>,
        value: u64,
    ) {
        let member = self.hosts[host].id;
        let head = self.store.head(id);
        let is_claimed = head.as_ref().is_some_and(|head| match head.state() {
            HeadState::Running(owner) => {
                owner.member == member && revision.is_none_or(|r| r == head.revision)
            }
            // A kill may follow the claim at any time.
            HeadState::Killed(_) => true,
            HeadState::Paused => false,
        });
        if !is_claimed {
            let state = head.map(|head| head.state());
            self.violate(format!("{member} runs {id} without a claim: {state:?}"));
        }
        if let Some(revision) = revision {
            let former = self.identities.insert((id, revision.0), host);
            if former.is_some_and(|former| former != host) {
                self.violate(format!("{revision} of {id} has two owners"));
            }
        }
        let acknowledged = self.acknowledged.get(&id).copied().unwrap_or(0);
        if value < acknowledged {
            self.violate(format!(
                "{id} runs state {value}, but {acknowledged} was stored"
            ));
        }
        self.check_overlap(host, id);
    }

    /// Checks that no other host runs the sandbox with authority.
    fn check_overlap(&mut self, host: usize, id: SandboxId) {
        let others = self
            .hosts
            .iter()
            .enumerate()
            .filter(|&(other, _)| other != host);
        // `owner_of_head` names the epoch that claimed the head. A guest does not count if that
        // epoch is dead, even if its member was registered again in a later epoch.
        let overlapping = others.filter_map(|(_, entry)| {
            let held = entry
                .held
                .get(&id)
                .filter(|held| held.local == Local::Running)?;
            let owner = held.owner_of_head()?;
            (!self.store.is_dead(owner)).then_some(owner)
        });
        let overlapping: Vec<Owner> = overlapping.collect();
        if let Some(owner) = overlapping.first() {
            self.violate(format!("{id} also runs on {owner}"));
        }
    }

    /// A host that accepts requests again after its return runs no sandbox whose kill was
    /// acknowledged before the return.
    pub fn check_kills(&mut self, host: usize) {
        let entry = &self.hosts[host];
        let revived = entry.held.iter().find(|(id, held)| {
            held.local != Local::Killing
                && self
                    .killed
                    .get(id)
                    .is_some_and(|&at| at < entry.reconcile_started)
        });
        if let Some((id, _)) = revived {
            let id = *id;
            self.violate(format!(
                "host {host} has returned with the killed sandbox {id}"
            ));
        }
    }
}

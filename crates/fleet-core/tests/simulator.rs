//! Simulation of a fleet: hosts, clocks, network and store are simulated by seed; members,
//! coordinators, scheduler, directory, claims and records are the production code.
//!
//! A *mutant* is the same system with one deliberate defect. Its test passes if the checks of the
//! simulator detect the defect.
//!
//! `JIFFY_SEEDS` is the number of seeds, `JIFFY_SEED` replays one seed.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::match_bool,
    reason = "a panic is a failed test"
)]

mod checks;
mod faults;
mod host;
mod mutation;
mod operations;
mod records;
mod sandboxes;
mod world;

use jiffy_fleet_core::record::HeadState;
use jiffy_fleet_core::{RowState, SandboxId};
use mutation::Mutation;
use sandboxes::{Local, hash};
use std::time::Instant;
use world::{Counts, World};

/// Simulated time with faults.
const FAULTS_MS: u64 = 400_000;
/// Simulated time without faults, after which everything works.
const QUIET_MS: u64 = 90_000;
/// Simulated time without requests, in which all messages arrive.
const SETTLE_MS: u64 = 10_000;
/// Seeds for each mutant.
const MUTANT_SEEDS: u64 = 400;

/// Runs a seed. Returns the counts and a violation.
fn run(seed: u64, mutation: Mutation) -> (Counts, Option<String>) {
    let mut world = World::new(seed, mutation);
    let start = world.now;
    world.run_until(start + FAULTS_MS);
    world.heal();
    world.run_until(start + FAULTS_MS + QUIET_MS);
    world.has_no_clients = true;
    world.run_until(start + FAULTS_MS + QUIET_MS + SETTLE_MS);
    world.check_recovery();
    (world.counts, world.violation)
}

impl World {
    /// After the faults, the fleet is complete: one coordinator, all members registered, the
    /// directory correct, and each stored sandbox can be resumed.
    fn check_recovery(&mut self) {
        // Single requests and messages are still lost, so a missing acknowledgement may delay the
        // recovery: check several times.
        let mut obstacle = self.obstacle();
        for _ in 0..6 {
            if obstacle.is_some() {
                let end = self.now + 5_000;
                self.run_until(end);
                obstacle = self.obstacle();
            }
        }
        if let Some(obstacle) = obstacle {
            return self.violate(obstacle);
        }
        let Some(coordinator) = self.coordinators().pop() else {
            return;
        };
        self.check_directory(coordinator);
        self.check_resumes();
    }

    /// Returns the hosts whose members are coordinators.
    fn coordinators(&self) -> Vec<usize> {
        let is_coordinator = |host: &usize| {
            let member = self.hosts[*host].member.as_ref();
            member.is_some_and(|member| member.is_coordinator())
        };
        (0..self.hosts.len()).filter(is_coordinator).collect()
    }

    /// Returns the reason for which the fleet is not complete.
    fn obstacle(&self) -> Option<String> {
        let coordinators = self.coordinators();
        if coordinators.len() != 1 {
            return Some(format!("coordinators after the faults: {coordinators:?}"));
        }
        let is_known = |host: usize| {
            let member = self.hosts[host].member.as_ref();
            member.is_some_and(|member| member.is_directory_complete())
        };
        if !coordinators.iter().all(|&host| is_known(host)) {
            return Some("the directory is incomplete".to_owned());
        }
        let incomplete = self
            .hosts
            .iter()
            .find(|entry| entry.authority(self.now).is_none() || !entry.is_accepting);
        incomplete.map(|entry| format!("{} has not recovered", entry.id))
    }

    /// Checks that the directory of the coordinator names the host of each running sandbox.
    fn check_directory(&mut self, coordinator: usize) {
        let member = self.hosts[coordinator].member.as_ref().unwrap();
        let directory = member.directory().unwrap();
        let mut missing = None;
        for entry in &self.hosts {
            for (id, held) in entry.held.iter().filter(|(_, held)| held.is_running()) {
                let located = directory.find(hash(*id));
                let is_correct = located.is_some_and(|located| {
                    located.host == entry.id
                        && located.state == RowState::Running
                        // The row of a sandbox without a head has the default revision.
                        && Some(located.revision) == held.revision().or(Some(Default::default()))
                });
                if !is_correct {
                    missing = Some(format!("{id} runs on {}, directory: {located:?}", entry.id));
                }
            }
            let rows = directory.rows(entry.id).count() as u64;
            if rows != directory.rows_of(entry.id) {
                missing = Some(format!("{} has {rows} rows", entry.id));
            }
        }
        if let Some(missing) = missing {
            self.violate(missing);
        }
    }

    /// Resumes each stored sandbox that does not run, and checks that it then runs.
    fn check_resumes(&mut self) {
        self.has_no_limits = true;
        for (head, _) in self.store.heads() {
            let id = head.id;
            // Single requests to the store are still lost: try several times.
            let is_resumed = (0..8).any(|_| {
                let is_resumed = self.is_resumed_or_killed(id);
                if !is_resumed {
                    self.try_resume(id);
                }
                is_resumed
            });
            if !is_resumed {
                let state = self.store.head(id).map(|head| head.state());
                self.violate(format!("{id} cannot be resumed: {state:?}"));
            }
        }
    }

    /// Returns whether a resume is not needed: the sandbox runs or is paused on a host in a state
    /// that is not stored, or it is killed.
    fn is_resumed_or_killed(&self, id: SandboxId) -> bool {
        let is_held = self.hosts.iter().any(|entry| {
            let held = entry.held.get(&id);
            held.is_some_and(|held| held.root.is_none() || held.local == Local::Killing)
        });
        let head = self.store.head(id);
        is_held || head.is_none_or(|head| matches!(head.state(), HeadState::Killed(_)))
    }

    /// Resumes a sandbox on the host that its head names, or on any host, and lets the operation
    /// end within 15 s.
    fn try_resume(&mut self, id: SandboxId) {
        let host = match self.store.head(id).map(|head| head.state()) {
            Some(HeadState::Running(owner)) => owner.member.0 as usize - 1,
            _ => self.any_host(),
        };
        if !self.hosts[host].operations.contains_key(&id) {
            // Count the sandbox in the first budget, and accept its stored state.
            self.resume(host, id, 0, true);
        }
        let end = self.now + 15_000;
        self.run_until(end);
    }
}

#[test]
fn no_seed_violates_a_guarantee() {
    let variable = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let seeds: Vec<u64> = match variable("JIFFY_SEED") {
        Some(seed) => vec![seed],
        None => (0..variable("JIFFY_SEEDS").unwrap_or(50)).collect(),
    };
    let start = Instant::now();
    let mut total = Counts::default();
    let mut violations = Vec::new();
    for &seed in &seeds {
        let (counts, violation) = run(seed, Mutation::None);
        violations.extend(violation);
        total.add(&counts);
    }
    println!(
        "{} seeds in {:.1} s: {total:?}",
        seeds.len(),
        start.elapsed().as_secs_f64()
    );
    assert!(
        violations.is_empty(),
        "{} of {} seeds; JIFFY_SEED=N replays one:\n{}",
        violations.len(),
        seeds.len(),
        violations.join("\n")
    );
    if seeds.len() > 1 {
        // A simulation in which nothing happens detects nothing.
        let seeds = seeds.len() as u64;
        assert!(
            total.takeovers > seeds && total.verdicts > seeds,
            "{total:?}"
        );
        assert!(
            total.claims > 20 * seeds && total.claims_lost > seeds,
            "{total:?}"
        );
        assert!(total.unknown > seeds && total.kills > seeds, "{total:?}");
        assert!(total.placements > seeds && total.purged > 0, "{total:?}");
    }
}

#[test]
fn a_seed_is_replayed_exactly() {
    let first = format!("{:?}", run(7, Mutation::None));
    assert_eq!(first, format!("{:?}", run(7, Mutation::None)));
    assert_ne!(first, format!("{:?}", run(8, Mutation::None)));
}

/// Runs seeds until a violation is found.
fn detect(mutation: Mutation) {
    for seed in 0..MUTANT_SEEDS {
        if let (_, Some(violation)) = run(seed, mutation) {
            println!("{mutation:?}: {} seeds: {violation}", seed + 1);
            return;
        }
    }
    panic!("{mutation:?} was not detected by {MUTANT_SEEDS} seeds");
}

/// Defines a test for each mutant.
macro_rules! mutants {
    ($($test:ident: $mutation:ident,)*) => {
        $(
            #[test]
            fn $test() {
                detect(Mutation::$mutation);
            }
        )*

        #[test]
        fn each_mutant_has_a_test() {
            assert_eq!([$(Mutation::$mutation),*], Mutation::ALL);
        }
    };
}

mutants! {
    mutant_coordinator_limit_of_18_s_is_detected: CoordinatorLimit,
    mutant_no_grace_after_a_takeover_is_detected: NoGrace,
    mutant_verdict_after_8_s_is_detected: EarlyVerdict,
    mutant_acknowledgement_of_a_condemned_host_is_detected: AcknowledgeCondemned,
    mutant_identity_before_the_claim_is_detected: IdentityBeforeClaim,
    mutant_head_before_the_manifest_is_detected: HeadBeforeManifest,
    mutant_retraction_before_the_head_is_detected: RetractBeforeHead,
    mutant_shares_during_the_grace_period_is_detected: SharesDuringGrace,
    mutant_unchanged_record_taken_as_failed_write_is_detected: UnchangedIsFailed,
    mutant_killed_head_removed_before_the_return_of_its_home_is_detected: PurgeBeforeReturn,
}

impl Counts {
    /// Adds the counts of another run.
    fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.takeovers += other.takeovers;
        self.verdicts += other.verdicts;
        self.claims += other.claims;
        self.claims_lost += other.claims_lost;
        self.stored += other.stored;
        self.kills += other.kills;
        self.unknown += other.unknown;
        self.placements += other.placements;
        self.purged += other.purged;
    }
}

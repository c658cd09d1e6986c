//! Sandboxes that any host of a store can resume.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox. A host *claims* a sandbox by writing itself to the head as the owner, and then
//! resumes the sandbox. An *epoch* of a member (host of a fleet) lasts from its registration with
//! the coordinator until the coordinator declares it dead.

use crate::fake;
use crate::uploads::{TestStore, stored};

use fake::{Bench, base};
use jiffy_api_types::NetworkSettings;
use jiffy_fleet::Authority;
use jiffy_fleet_core::{Epoch, MemberId, Owner};
use jiffy_sandbox_manager::{
    CreateSpec, ErrorKind, OperationError, Sandbox, SandboxSettings, SandboxState, Sandboxes,
};
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Host with its guests.
pub struct Host {
    pub bench: Bench,
    pub sandboxes: Sandboxes,
}

impl Host {
    pub async fn start(store: &TestStore, number: u32) -> Self {
        let bench = Bench::new();
        let sandboxes = bench.open_with(store.sharing_options(number)).await;
        Self { bench, sandboxes }
    }

    /// Creates a sandbox of `owner` with `text` in its memory.
    pub async fn create(&self, owner: Option<&str>, text: &str) -> Sandbox {
        let spec = CreateSpec {
            name: Some("worker".to_owned()),
            settings: SandboxSettings {
                owner: owner.map(str::to_owned),
                secure: true,
                metadata: BTreeMap::from([("team".to_owned(), "blue".to_owned())]),
                timeout_s: Some(3600),
                network: NetworkSettings {
                    join: Some("lab".to_owned()),
                    ..NetworkSettings::default()
                },
                ..SandboxSettings::default()
            },
            ..base()
        };
        let sandbox = self.sandboxes.create(spec).await.unwrap();
        self.bench.world.write(sandbox.id(), text);
        sandbox
    }

    /// Pauses a sandbox, and waits until other hosts can resume it.
    pub async fn pause_durably(&self, id: &str) {
        let paused = self.sandboxes.pause(id).await.unwrap();
        stored(&self.sandboxes, paused.snapshot().unwrap()).await;
    }

    /// Resumes a sandbox of another host here.
    pub async fn take_over(
        &self,
        owner: Option<&str>,
        id: &str,
    ) -> Result<Sandbox, OperationError> {
        let stored = self.sandboxes.stored_sandbox(owner, id).await?;
        let stored = stored.unwrap_or_else(|| panic!("the store does not know {id}"));
        self.sandboxes.adopt_stored(&stored);
        self.sandboxes.resume(id).await
    }

    /// Reads a sandbox in the store repeatedly, at most 30 s, until the result matches.
    pub async fn stored_until(
        &self,
        id: &str,
        matches: impl Fn(&Result<Option<Sandbox>, OperationError>) -> bool,
    ) -> Result<Option<Sandbox>, OperationError> {
        self.stored_until_of(None, id, matches).await
    }

    /// Like [`Self::stored_until`], for a sandbox of `owner`.
    async fn stored_until_of(
        &self,
        owner: Option<&str>,
        id: &str,
        matches: impl Fn(&Result<Option<Sandbox>, OperationError>) -> bool,
    ) -> Result<Option<Sandbox>, OperationError> {
        for _ in 0..600 {
            let stored = self.sandboxes.stored_sandbox(owner, id).await;
            if matches(&stored) {
                return stored;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        panic!("the store does not change");
    }

    /// Returns the text in the memory of a sandbox that runs on this host.
    fn memory(&self, id: &str) -> String {
        self.bench.world.body(id).memory.lock().unwrap().clone()
    }

    /// Returns the state of a sandbox on this host. `None` if this host has no such sandbox.
    pub fn state(&self, id: &str) -> Option<SandboxState> {
        self.sandboxes
            .find(id)
            .map(|sandbox| sandbox.state().clone())
    }
}

#[tokio::test]
async fn a_stored_sandbox_is_resumed_on_another_host_as_the_same_sandbox() {
    let store = TestStore::new();
    let (one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    for owner in [None, Some("key1")] {
        let created = one.create(owner, "kept").await;
        let id = created.id();
        one.pause_durably(id).await;
        let resumed = two.take_over(owner, id).await.unwrap();
        assert_eq!(*resumed.state(), SandboxState::Running);
        assert!(two.memory(id).ends_with("kept"));
        let identity = |sandbox: &Sandbox| {
            (
                sandbox.id().to_owned(),
                sandbox.name().map(str::to_owned),
                sandbox.agent_token().map(str::to_owned),
                sandbox.settings().metadata.clone(),
                sandbox.settings().owner.clone(),
                sandbox.created_ms(),
            )
        };
        assert_eq!(identity(&resumed), identity(&created));
        // Other members of its private network may remain on the first host.
        assert!(created.settings().network.address.is_some());
        let network = &resumed.settings().network;
        assert_eq!((&network.join, &network.address), (&None, &None));
        // The first host learns of the move with its next operation, and forgets the sandbox.
        let error = one.sandboxes.resume(id).await.unwrap_err();
        assert!(error.to_string().contains("runs on host h2"), "{error}");
        assert_eq!((error.kind(), one.state(id)), (ErrorKind::Conflict, None));
        two.sandboxes.remove(id).await.unwrap();
    }
}

#[tokio::test]
async fn of_many_hosts_that_resume_one_sandbox_exactly_one_runs_it() {
    let store = TestStore::new();
    let mut hosts = Vec::new();
    for number in 1..=5 {
        hosts.push(Host::start(&store, number).await);
    }
    let id = hosts[0].create(None, "once").await.id().to_owned();
    for _ in 0..4 {
        let home = hosts
            .iter()
            .position(|host| host.state(&id) == Some(SandboxState::Running));
        hosts[home.unwrap()].pause_durably(&id).await;
        let resumes = hosts.iter().map(|host| async {
            if host.state(&id).is_some() {
                return host.sandboxes.resume(&id).await;
            }
            host.take_over(None, &id).await
        });
        let results = futures_util::future::join_all(resumes).await;
        let winners = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(winners, 1, "{results:?}");
        let running = hosts
            .iter()
            .filter(|host| host.state(&id) == Some(SandboxState::Running));
        assert_eq!(running.count(), 1);
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            assert!(
                matches!(error.kind(), ErrorKind::Conflict | ErrorKind::Busy),
                "{error}"
            );
        }
    }
}

#[tokio::test]
async fn a_sandbox_that_returns_to_a_host_has_its_newest_state_there() {
    let store = TestStore::new();
    let (one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    let id = one.create(None, "first ").await.id().to_owned();
    one.pause_durably(&id).await;
    two.take_over(None, &id).await.unwrap();
    two.bench.world.write(&id, "second ");
    two.pause_durably(&id).await;
    // The first host still has the older pause.
    let error = one.sandboxes.resume(&id).await.unwrap_err();
    assert!(error.to_string().contains("newer state"), "{error}");
    assert_eq!(one.state(&id), None);
    one.take_over(None, &id).await.unwrap();
    assert!(one.memory(&id).contains("second "), "{}", one.memory(&id));
    let error = two.sandboxes.kill(&id).await.unwrap_err();
    assert!(error.to_string().contains("runs on host h1"), "{error}");
    assert_eq!(one.state(&id), Some(SandboxState::Running));
}

#[tokio::test]
async fn a_sandbox_that_was_never_stored_is_resumed_without_the_store() {
    let store = TestStore::new();
    let one = Host::start(&store, 1).await;
    let id = one.create(None, "local").await.id().to_owned();
    store.make_unreachable();
    one.sandboxes.pause(&id).await.unwrap();
    one.sandboxes.resume(&id).await.unwrap();
    assert_eq!(one.state(&id), Some(SandboxState::Running));
    one.sandboxes.kill(&id).await.unwrap();
    store.make_reachable();
    assert!(store.objects("heads").is_empty());
}

#[tokio::test]
async fn a_stored_sandbox_is_not_resumed_while_the_store_is_away() {
    let store = TestStore::new();
    let one = Host::start(&store, 1).await;
    let id = one.create(None, "stored").await.id().to_owned();
    one.pause_durably(&id).await;
    assert_eq!(store.objects("heads").len(), 1);
    store.make_unreachable();
    let error = one.sandboxes.resume(&id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(one.state(&id), Some(SandboxState::Paused));
    store.make_reachable();
    one.sandboxes.resume(&id).await.unwrap();
    assert!(one.memory(&id).ends_with("stored"));
}

#[tokio::test]
async fn a_killed_sandbox_is_resumed_by_no_host() {
    let store = TestStore::new();
    let (one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    for is_running in [false, true] {
        let id = one.create(None, "killed").await.id().to_owned();
        one.pause_durably(&id).await;
        if is_running {
            one.sandboxes.resume(&id).await.unwrap();
        }
        // The kill is acknowledged without the store, and recorded in it later.
        store.make_unreachable();
        one.sandboxes.remove(&id).await.unwrap();
        store.make_reachable();
        // For the other host, the sandbox is paused or runs on its host until the head is marked.
        two.stored_until(&id, |stored| {
            stored
                .as_ref()
                .is_err_and(|e| e.to_string().contains("was killed"))
        })
        .await
        .unwrap_err();
        assert_eq!(two.state(&id), None);
    }
}

#[tokio::test]
async fn a_host_that_exits_after_a_claim_lets_others_resume_the_sandbox() {
    let store = TestStore::new();
    let (one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    let id = one.create(None, "released").await.id().to_owned();
    one.pause_durably(&id).await;
    // A restore that fails after its claim releases the sandbox.
    one.bench.world.fail("restore");
    one.sandboxes.resume(&id).await.unwrap_err();
    // The claim and its release end in the background, after the failed resume.
    loop {
        two.stored_until(&id, |stored| stored.is_ok())
            .await
            .unwrap();
        match two.take_over(None, &id).await {
            Ok(_) => break,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Conflict, "{error}"),
        }
    }
    assert!(two.memory(&id).ends_with("released"));
}

#[tokio::test]
async fn other_owners_and_unknown_ids_find_no_sandbox() {
    let store = TestStore::new();
    let (one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    let id = one.create(Some("key1"), "secret").await.id().to_owned();
    one.pause_durably(&id).await;
    for owner in [None, Some("key2")] {
        let found = two.sandboxes.stored_sandbox(owner, &id).await.unwrap();
        assert!(found.is_none(), "{owner:?}");
    }
    for id in ["", "worker", "abcdefghijkmnpqrstuv", "../heads"] {
        let found = two
            .sandboxes
            .stored_sandbox(Some("key1"), id)
            .await
            .unwrap();
        assert!(found.is_none(), "{id}");
    }
    assert!(two.sandboxes.list().is_empty());
}

#[tokio::test]
async fn a_sandbox_whose_record_is_too_large_to_share_is_stored_and_stays_on_its_host() {
    let store = TestStore::new();
    let (one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    let spec = CreateSpec {
        // The variable is too large for the record of a shared sandbox.
        env: BTreeMap::from([("LONG".to_owned(), "x".repeat(70_000))]),
        ..base()
    };
    let id = one.sandboxes.create(spec).await.unwrap().id().to_owned();
    one.pause_durably(&id).await;
    assert!(
        two.sandboxes
            .stored_sandbox(None, &id)
            .await
            .unwrap()
            .is_none()
    );
    one.sandboxes.resume(&id).await.unwrap();
    assert_eq!(one.state(&id), Some(SandboxState::Running));
}

#[tokio::test]
async fn a_former_host_without_the_snapshot_reports_the_move() {
    let store = TestStore::new();
    let (mut one, two) = (Host::start(&store, 1).await, Host::start(&store, 2).await);
    let id = one.create(None, "moved").await.id().to_owned();
    one.pause_durably(&id).await;
    two.take_over(None, &id).await.unwrap();
    // The former host loses its files, and the new host has removed the name from the store.
    let paused = one.sandboxes.find(&id).unwrap();
    fs::remove_file(one.bench.files().join(paused.snapshot().unwrap())).unwrap();
    for name in store.objects("names") {
        fs::remove_file(name).unwrap();
    }
    drop(one.sandboxes);
    one.sandboxes = one.bench.open_with(store.sharing_options(1)).await;
    let error = one.sandboxes.resume(&id).await.unwrap_err();
    assert!(error.to_string().contains("runs on host h2"), "{error}");
    assert_eq!(one.state(&id), None);
}

/// Host of a fleet whose epoch and contact a test changes.
#[derive(Debug)]
struct Member {
    number: u32,
    /// Zero without contact to the fleet.
    epoch: Arc<AtomicU64>,
    /// Number of the host that this host considers dead. Zero for none.
    dead: Arc<AtomicU64>,
}

impl Authority for Member {
    fn member(&self) -> MemberId {
        MemberId(self.number)
    }

    fn owner(&self) -> Option<Owner> {
        let epoch = self.epoch.load(Ordering::SeqCst);
        (epoch > 0).then_some(Owner {
            member: self.member(),
            epoch: Epoch(epoch),
        })
    }

    fn is_dead(&self, owner: Owner) -> bool {
        u64::from(owner.member.0) == self.dead.load(Ordering::SeqCst)
    }
}

/// Host of a fleet, with the values that its [`Member`] reads.
pub struct FleetHost {
    pub host: Host,
    /// Zero without contact to the fleet.
    pub epoch: Arc<AtomicU64>,
    /// Number of the host that this host considers dead.
    pub dead: Arc<AtomicU64>,
}

impl FleetHost {
    pub async fn start(store: &TestStore, number: u32) -> Self {
        let (epoch, dead) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(0)));
        let member = Member {
            number,
            epoch: epoch.clone(),
            dead: dead.clone(),
        };
        let bench = Bench::new();
        let sandboxes = bench.open_with(store.member_options(number, member)).await;
        Self {
            host: Host { bench, sandboxes },
            epoch,
            dead,
        }
    }
}

#[tokio::test]
async fn a_host_that_returns_retains_only_sandboxes_that_no_other_host_changed() {
    let store = TestStore::new();
    let one = FleetHost::start(&store, 1).await;
    let two = FleetHost::start(&store, 2).await;
    let mut ids = Vec::new();
    for text in ["taken", "killed", "stays", "runs", "local"] {
        let created = one.host.create(Some("key1"), text).await;
        // `create` gives each sandbox the same name, which must be free for the next one.
        one.host.sandboxes.rename(created.id(), None).await.unwrap();
        if text != "local" {
            one.host.pause_durably(created.id()).await;
        }
        ids.push(created.id().to_owned());
    }
    let [taken, killed, stays, runs, _] = &ids[..] else {
        panic!("five sandboxes")
    };
    one.host.sandboxes.resume(runs).await.unwrap();
    let owner = Some("key1");
    two.host.take_over(owner, taken).await.unwrap();
    two.host.take_over(owner, killed).await.unwrap();
    two.host.sandboxes.remove(killed).await.unwrap();
    two.host
        .stored_until_of(owner, killed, |stored| stored.is_err())
        .await
        .unwrap_err();
    // The host returns with a new epoch.
    one.epoch.store(2, Ordering::SeqCst);
    // `false`: sandboxes that were never stored are not compared.
    one.host.sandboxes.reconcile_heads(false).await.unwrap();
    let states: Vec<_> = ids.iter().map(|id| one.host.state(id)).collect();
    let expected = [
        None,
        None,
        Some(SandboxState::Paused),
        Some(SandboxState::Running),
        Some(SandboxState::Running),
    ];
    assert_eq!(states, expected);
    // The new epoch owns the running sandbox: another host does not claim it while it is live.
    let error = two.host.take_over(owner, runs).await.unwrap_err();
    assert!(error.to_string().contains("runs on host h1"), "{error}");
    // After the death of its host, its state is not resumed silently.
    two.dead.store(1, Ordering::SeqCst);
    let error = two.host.take_over(owner, runs).await.unwrap_err();
    assert!(error.to_string().contains("host h1 of sandbox"), "{error}");
    two.host.take_over(owner, stays).await.unwrap();
}

#[tokio::test]
async fn without_contact_to_the_fleet_no_stored_sandbox_is_resumed() {
    let store = TestStore::new();
    let one = FleetHost::start(&store, 1).await;
    let created = one.host.create(None, "kept").await;
    let other = one.host.create(Some("key1"), "local").await;
    one.host.pause_durably(created.id()).await;
    one.epoch.store(0, Ordering::SeqCst);
    let error = one.host.sandboxes.resume(created.id()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("no contact with the fleet"));
    assert_eq!(one.host.state(created.id()), Some(SandboxState::Paused));
    // Running sandboxes are not affected.
    assert_eq!(one.host.state(other.id()), Some(SandboxState::Running));
    one.epoch.store(1, Ordering::SeqCst);
    one.host.sandboxes.resume(created.id()).await.unwrap();
}

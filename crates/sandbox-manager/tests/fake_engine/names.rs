//! Names of sandboxes and snapshots, and the choice of engines by name.

use crate::fake;

use fake::{Bench, OTHER, base, create_id, snapshot_id, until};
use jiffy_sandbox_manager::{
    CreateSpec, HostOptions, OperationError, Prefetch, Sandbox, SandboxSettings, SandboxSource,
};

/// Returns the specification of a sandbox with this name.
fn named(name: &str) -> CreateSpec {
    CreateSpec {
        name: Some(name.to_owned()),
        ..base()
    }
}

/// Returns the specification of a sandbox on this engine.
fn on(engine: &str) -> CreateSpec {
    CreateSpec {
        engine: Some(engine.to_owned()),
        ..base()
    }
}

fn ids(sandboxes: Vec<Sandbox>) -> Vec<String> {
    sandboxes.into_iter().map(|s| s.id().to_owned()).collect()
}

#[tokio::test]
async fn a_name_is_unique_until_its_sandbox_is_killed_or_renamed() {
    let bench = Bench::new();
    let host = bench.open().await;
    let web = host.create(named("web")).await.unwrap();
    assert_eq!(ids(host.index().named("web")), [web.id()]);
    let error = host.create(named("web")).await.unwrap_err();
    let holder = matches!(&error, OperationError::NameTaken { holder, .. } if *holder == web.id());
    assert!(holder, "{error}");
    assert_eq!(host.list().len(), 1);
    // Names are unique per owner only.
    let theirs = CreateSpec {
        settings: SandboxSettings {
            owner: Some("k".to_owned()),
            ..SandboxSettings::default()
        },
        ..named("web")
    };
    let theirs = host.create(theirs).await.unwrap();
    assert_eq!(ids(host.index().named("web")).len(), 2);
    assert_eq!(
        host.fork(web.id(), 1, None).await.unwrap().children.len(),
        1
    );
    assert_eq!(
        ids(host.index().named("web")).len(),
        2,
        "a fork has no name"
    );
    host.remove(theirs.id()).await.unwrap();

    let renamed = host.rename(web.id(), Some("api".to_owned())).await.unwrap();
    assert_eq!(renamed.name(), Some("api"));
    let second = host.create(named("web")).await.unwrap();
    assert!(host.rename(web.id(), Some("web".to_owned())).await.is_err());
    assert!(
        host.rename(web.id(), Some("no name".to_owned()))
            .await
            .is_err()
    );
    assert_eq!(ids(host.index().named("api")), [web.id()]);
    host.kill(second.id()).await.unwrap();
    assert!(host.index().named("web").is_empty());
    host.rename(web.id(), None).await.unwrap();
    assert!(host.index().named("api").is_empty());
    host.create(named("api")).await.unwrap();
}

#[tokio::test]
async fn a_failed_create_releases_its_name() {
    let bench = Bench::new();
    let host = bench.open().await;
    bench.world.fail("assign");
    assert!(host.create(named("web")).await.is_err());
    bench.world.clear_failures();
    host.create(named("web")).await.unwrap();
}

#[tokio::test]
async fn names_survive_a_restart_of_the_daemon() {
    let bench = Bench::new();
    let id = {
        let host = bench.open().await;
        host.create(named("web")).await.unwrap().id().to_owned()
    };
    let host = bench.open().await;
    assert_eq!(ids(host.index().named("web")), [id]);
    assert!(host.create(named("web")).await.is_err());
}

#[tokio::test]
async fn each_sandbox_uses_the_requested_engine() {
    let bench = Bench::new();
    let warm = HostOptions {
        warm: 1,
        ..HostOptions::default()
    };
    let host = bench.open_with(warm).await;
    let usual = host.create(on("microvm")).await.unwrap();
    let other = host.create(on(OTHER)).await.unwrap();
    assert_eq!(usual.engine(), Some("microvm"));
    assert_eq!(other.engine(), Some(OTHER));
    until("the pool to fill", || host.pool().waiting() == 1).await;
    // Each engine has booted the template once, and restores further guests from its snapshot. Only
    // the default engine has a warm pool.
    host.create(on(OTHER)).await.unwrap();
    host.create(base()).await.unwrap();
    assert_eq!(*bench.world.boots.lock().unwrap(), 2);
    until("the pool to fill again", || host.pool().waiting() == 1).await;

    let snapshot = host.snapshot(other.id(), None).await.unwrap();
    assert_eq!(snapshot.engine(), OTHER);
    let from = |engine: Option<&str>| CreateSpec {
        source: SandboxSource::Snapshot(snapshot.id().to_owned()),
        engine: engine.map(str::to_owned),
        ..base()
    };
    let copy = host.create(from(None)).await.unwrap();
    assert_eq!(copy.engine(), Some(OTHER));
    host.create(from(Some(OTHER))).await.unwrap();
    let error = host.create(from(Some("microvm"))).await.unwrap_err();
    assert!(error.to_string().contains(OTHER), "{error}");
    let fork = host.fork(other.id(), 1, None).await.unwrap();
    let child = fork.children.into_iter().next().unwrap().unwrap();
    assert_eq!(child.engine(), Some(OTHER));
}

#[tokio::test]
async fn an_unusable_engine_is_rejected_with_the_usable_ones() {
    let bench = Bench::new();
    let host = bench.open().await;
    for engine in ["absent", "nosuch"] {
        let error = host.create(on(engine)).await.unwrap_err().to_string();
        assert!(error.contains(engine) && error.contains(OTHER), "{error}");
    }
    assert!(host.list().is_empty());
}

#[tokio::test]
async fn an_id_has_precedence_over_an_equal_name() {
    let bench = Bench::new();
    let host = bench.open().await;
    let victim = create_id(&host).await;
    bench.world.write(&victim, "the right one");
    let snapshot = snapshot_id(&host, &victim).await;
    let other = create_id(&host).await;
    host.snapshot(&other, Some(snapshot.clone())).await.unwrap();
    let spec = CreateSpec {
        source: SandboxSource::Snapshot(snapshot),
        ..base()
    };
    let copy = host.create(spec).await.unwrap().id().to_owned();
    assert_eq!(bench.world.read(&copy), "the right one");
}

#[tokio::test]
async fn a_create_whose_memory_cannot_be_requested_leaves_nothing() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let snapshot = snapshot_id(&host, &id).await;
    let spec = || CreateSpec {
        source: SandboxSource::Snapshot(snapshot.clone()),
        name: Some("clone".to_owned()),
        prefetch: Prefetch::All,
        ..base()
    };
    bench.world.fail("request_memory");
    host.create(spec()).await.unwrap_err();
    assert_eq!(host.list().len(), 1);
    bench.world.clear_failures();
    // The name is free again.
    host.create(spec()).await.unwrap();
}

#[tokio::test]
async fn addresses_in_a_private_network_last_as_long_as_their_sandboxes() {
    let bench = Bench::new();
    let host = bench.open().await;
    let mut spec = named("web");
    spec.settings.network.join = Some("lab".to_owned());
    let web = host.create(spec.clone()).await.unwrap();
    let address = |sandbox: &Sandbox| sandbox.settings().network.address.clone().unwrap();
    let first = address(&web);
    // A failed create and a fork do not take the address of another sandbox.
    assert!(host.create(spec).await.is_err());
    let fork = host
        .fork(web.id(), 1, None)
        .await
        .unwrap()
        .children
        .remove(0);
    let fork = fork.unwrap();
    assert_ne!(address(&fork), first);
    host.pause(web.id()).await.unwrap();
    let renamed = host.rename(web.id(), Some("api".to_owned())).await.unwrap();
    let resumed = host.resume(web.id()).await.unwrap();
    assert_eq!(
        [address(&renamed), address(&resumed)],
        [first.clone(), first.clone()]
    );
    drop(host);
    let host = bench.open().await;
    assert_eq!(address(&host.find(web.id()).unwrap()), first);
    assert_eq!(address(&host.find(fork.id()).unwrap()), address(&fork));
}

//! Guarantees of each operation on sandboxes and snapshots.

use crate::fake;

use fake::{Bench, base, create_id, snapshot_id, until};
use jiffy_engine_api::{BootMode, SandboxSize};
use jiffy_sandbox_manager::{
    CreateSpec, OperationError, SandboxSettings, SandboxSource, SandboxState,
};
use std::collections::BTreeMap;

#[tokio::test]
async fn a_template_is_booted_once_and_restored_afterwards() {
    let bench = Bench::new();
    let host = bench.open().await;
    let first = host.create(base()).await.unwrap();
    assert_eq!(first.boot_mode(), Some(BootMode::Snapshot));
    let (a, b) = tokio::join!(host.create(base()), host.create(base()));
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(*bench.world.boots.lock().unwrap(), 1);
    assert_eq!(bench.world.running().len(), 3);
    // Another size has another template snapshot.
    let size = Some(SandboxSize {
        memory_mib: 256,
        ..SandboxSize::default()
    });
    host.create(CreateSpec { size, ..base() }).await.unwrap();
    assert_eq!(*bench.world.boots.lock().unwrap(), 2);
}

#[tokio::test]
async fn concurrent_first_creates_boot_the_template_once() {
    let bench = Bench::new();
    let host = bench.open().await;
    let mut work = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let host = host.clone();
        work.spawn(async move { host.create(base()).await.unwrap() });
    }
    assert_eq!(work.join_all().await.len(), 8);
    assert_eq!(*bench.world.boots.lock().unwrap(), 1);
}

#[tokio::test]
async fn a_failed_create_leaves_no_sandbox() {
    let bench = Bench::new();
    let host = bench.open().await;
    for step in ["fingerprint", "boot", "assign", "snapshot", "restore"] {
        bench.world.fail(step);
        let error = host.create(base()).await.unwrap_err();
        assert!(error.to_string().contains(step), "{error}");
        assert!(
            host.list().is_empty() && bench.world.running().is_empty(),
            "{step}"
        );
        bench.world.clear_failures();
    }
    host.create(base()).await.unwrap();
}

#[tokio::test]
async fn a_rebuilt_template_does_not_use_its_old_snapshot() {
    let bench = Bench::new();
    let host = bench.open().await;
    let old = host.create(base()).await.unwrap();
    *bench.world.version.lock().unwrap() += 1;
    let new = host.create(base()).await.unwrap();
    assert_ne!(old.snapshot(), new.snapshot());
    // The old snapshot remains while a sandbox descends from it.
    assert_eq!(bench.file_names().len(), 2);
    host.kill(old.id()).await.unwrap();
    bench.until_files(1).await;
}

#[tokio::test]
async fn a_snapshot_preserves_the_state_while_the_sandbox_continues() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.write(&id, "one");
    let snapshot = host.snapshot(&id, Some("first".into())).await.unwrap();
    bench.world.write(&id, "two");
    for source in [snapshot.id(), &snapshot.id()[..6], "first"] {
        let source = SandboxSource::Snapshot(source.to_owned());
        let copy = CreateSpec { source, ..base() };
        let copy = host.create(copy).await.unwrap();
        assert_eq!(bench.world.read(copy.id()), "one");
    }
    assert_eq!(bench.world.read(&id), "two");
}

#[tokio::test]
async fn a_failed_snapshot_has_no_effect() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let before = host.get(&id).unwrap();
    bench.world.fail("snapshot");
    assert!(host.snapshot(&id, None).await.is_err());
    assert!(host.pause(&id).await.is_err());
    assert!(host.fork(&id, 2, None).await.is_err());
    assert_eq!(host.get(&id).unwrap(), before);
    assert_eq!(host.snapshots().list(None).unwrap().len(), 1);
    bench.world.clear_failures();
    host.snapshot(&id, None).await.unwrap();
}

#[tokio::test]
async fn fork_children_start_from_the_parents_state_and_are_independent() {
    let bench = Bench::new();
    let host = bench.open().await;
    let env = BTreeMap::from([("KEY".to_owned(), "v".to_owned())]);
    let spec = CreateSpec {
        env: env.clone(),
        ..base()
    };
    let id = host.create(spec).await.unwrap().id().to_owned();
    bench.world.write(&id, "shared");
    let report = host.fork(&id, 5, None).await.unwrap();
    assert_eq!(report.children.len(), 5);
    for child in &report.children {
        let child = child.as_ref().unwrap();
        assert_eq!(child.boot_mode(), Some(BootMode::Fork));
        assert_eq!(child.forked_from(), Some(&*id));
        assert_eq!(bench.world.read(child.id()), "shared");
        assert_eq!(
            bench
                .world
                .body(child.id())
                .sandbox_identity
                .lock()
                .unwrap()
                .env,
            env
        );
        bench.world.write(child.id(), child.id());
    }
    assert_eq!(bench.world.read(&id), "shared");
    for child in report.children {
        let child = child.unwrap();
        assert_eq!(bench.world.read(child.id()), child.id());
    }
}

#[tokio::test]
async fn a_fork_reports_the_result_of_each_child() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.fail("assign");
    let report = host.fork(&id, 3, None).await.unwrap();
    assert!(report.children.iter().all(Result::is_err));
    assert_eq!(host.list().len(), 1);
    assert!(matches!(
        host.fork(&id, 0, None).await,
        Err(OperationError::Count { .. })
    ));
}

#[tokio::test]
async fn promote_removes_siblings_and_their_descendants() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let children: Vec<_> = host
        .fork(&id, 3, None)
        .await
        .unwrap()
        .children
        .into_iter()
        .flatten()
        .collect();
    let grandchild = host
        .fork(children[1].id(), 1, None)
        .await
        .unwrap()
        .children
        .remove(0)
        .unwrap();
    let own = host
        .fork(children[0].id(), 1, None)
        .await
        .unwrap()
        .children
        .remove(0)
        .unwrap();
    let removed = host.promote(children[0].id()).await.unwrap();
    // Two siblings, and the child of one of them.
    assert_eq!(removed.len(), 3);
    assert!(removed.iter().any(|r| r.id() == grandchild.id()));
    let mut remaining: Vec<_> = host.list().into_iter().map(|r| r.id().to_owned()).collect();
    let mut expected = vec![id, children[0].id().to_owned(), own.id().to_owned()];
    remaining.sort();
    expected.sort();
    assert_eq!(remaining, expected);
    assert_eq!(bench.world.running().len(), 3);
}

#[tokio::test]
async fn a_rollback_preserves_the_id_and_accepts_any_compatible_snapshot() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let template = host.get(&id).unwrap().snapshot().unwrap().to_owned();
    let mut snapshots = vec![(template, "fresh base".to_owned())];
    for text in ["one", "two", "three"] {
        bench.world.write(&id, text);
        snapshots.push((snapshot_id(&host, &id).await, text.to_owned()));
    }
    let other = create_id(&host).await;
    bench.world.write(&other, "relative");
    snapshots.push((snapshot_id(&host, &other).await, "relative".into()));
    for (snapshot, text) in snapshots.iter().rev() {
        let record = host.rollback(&id, snapshot).await.unwrap();
        assert_eq!(
            (record.id(), record.snapshot()),
            (id.as_str(), Some(snapshot.as_str()))
        );
        assert_eq!(&bench.world.read(&id), text);
    }
    assert_eq!(bench.world.running().len(), 2);
    let unrelated = CreateSpec {
        source: SandboxSource::Template("other".into()),
        ..base()
    };
    let unrelated = host.create(unrelated).await.unwrap();
    let unrelated = unrelated.snapshot().unwrap().to_owned();
    let result = host.rollback(&id, &unrelated).await;
    assert!(matches!(
        result,
        Err(OperationError::IncompatibleSnapshot { .. })
    ));
}

#[tokio::test]
async fn a_failed_rollback_has_no_effect() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let snapshot = snapshot_id(&host, &id).await;
    bench.world.write(&id, "later");
    for step in ["restore", "assign"] {
        bench.world.fail(step);
        assert!(host.rollback(&id, &snapshot).await.is_err());
        bench.world.clear_failures();
        assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
        assert_eq!(bench.world.read(&id), "later");
        assert_eq!(bench.world.running().len(), 1);
    }
}

#[tokio::test]
async fn repeated_rollbacks_and_pauses_leave_no_guests_or_files() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let snapshot = snapshot_id(&host, &id).await;
    for _ in 0..100 {
        host.rollback(&id, &snapshot).await.unwrap();
        host.pause(&id).await.unwrap();
        assert!(bench.world.running().is_empty());
        host.rollback(&id, &snapshot).await.unwrap();
    }
    assert_eq!(bench.world.running(), [id]);
    // The snapshot of the template and the requested one remain.
    bench.until_files(2).await;
}

#[tokio::test]
async fn a_paused_sandbox_has_no_guest_and_resumes_its_state() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    for round in 0..5 {
        bench.world.write(&id, &format!("round {round}"));
        assert_eq!(
            *host.pause(&id).await.unwrap().state(),
            SandboxState::Paused
        );
        assert!(bench.world.running().is_empty());
        assert!(matches!(
            host.pause(&id).await,
            Err(OperationError::State { .. })
        ));
        assert_eq!(
            *host.resume(&id).await.unwrap().state(),
            SandboxState::Running
        );
        assert_eq!(bench.world.read(&id), format!("round {round}"));
    }
    host.pause(&id).await.unwrap();
    // A paused sandbox can be forked, and its snapshot retained, without a resume.
    let child = host
        .fork(&id, 1, None)
        .await
        .unwrap()
        .children
        .remove(0)
        .unwrap();
    assert_eq!(bench.world.read(child.id()), "round 4");
    let snapshot = host.snapshot(&id, Some("name".into())).await.unwrap();
    host.remove(child.id()).await.unwrap();
    host.remove(&id).await.unwrap();
    assert!(bench.file_names().contains(snapshot.id()));
    host.snapshots().remove("name").unwrap();
    // The snapshot of the template remains.
    bench.until_files(1).await;
}

#[tokio::test]
async fn a_guest_exit_breaks_the_sandbox_until_a_rollback() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let snapshot = snapshot_id(&host, &id).await;
    bench.world.panic_guest(&id);
    until("the exit to be noticed", || {
        *host.get(&id).unwrap().state() != SandboxState::Running
    })
    .await;
    let SandboxState::Broken { cause, .. } = host.get(&id).unwrap().state().clone() else {
        panic!()
    };
    assert!(cause.contains("panicked"), "{cause}");
    let error = host.pause(&id).await.unwrap_err().to_string();
    assert!(
        error.contains("broken") && error.contains("roll it back"),
        "{error}"
    );
    host.rollback(&id, &snapshot).await.unwrap();
    assert_eq!(*host.get(&id).unwrap().state(), SandboxState::Running);
}

#[tokio::test]
async fn kill_stops_the_guest_while_an_operation_hangs() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    bench.world.hang("snapshot");
    let hanging = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.snapshot(&id, None).await }
    });
    until("the snapshot to start", || {
        bench.file_names().iter().any(|n| n.starts_with('.'))
    })
    .await;
    let killing = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.kill(&id).await }
    });
    until("the guest to end", || bench.world.running().is_empty()).await;
    // The kill waits for the hanging operation, so the record is not final yet.
    assert_eq!(
        *host.wait_decided(&id).await.unwrap().state(),
        SandboxState::Killed
    );
    drop((hanging, killing));
}

#[tokio::test]
async fn wait_decided_waits_for_the_operation_in_flight_or_a_kill() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    assert_eq!(
        *host.wait_decided(&id).await.unwrap().state(),
        SandboxState::Running
    );
    bench.world.hang("snapshot");
    let pausing = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.pause(&id).await }
    });
    until("the snapshot to start", || {
        bench.file_names().iter().any(|n| n.starts_with('.'))
    })
    .await;
    let mut decided = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.wait_decided(&id).await }
    });
    let soon = std::time::Duration::from_millis(50);
    assert!(tokio::time::timeout(soon, &mut decided).await.is_err());
    let killing = tokio::spawn({
        let (host, id) = (host.clone(), id.clone());
        async move { host.kill(&id).await }
    });
    // The pause hangs forever, but the kill already determines the final state.
    assert_eq!(
        *decided.await.unwrap().unwrap().state(),
        SandboxState::Killed
    );
    assert!(host.wait_decided("unknown").await.is_none());
    drop((pausing, killing));
}

#[tokio::test]
async fn a_sandbox_is_found_by_its_agent_token_until_it_is_killed() {
    let bench = Bench::new();
    let host = bench.open().await;
    let secure = || CreateSpec {
        settings: SandboxSettings {
            secure: true,
            ..SandboxSettings::default()
        },
        ..base()
    };
    let (one, other) = (
        host.create(secure()).await.unwrap(),
        host.create(secure()).await.unwrap(),
    );
    let token = one.agent_token().unwrap();
    assert_ne!(Some(&token), other.agent_token().as_ref());
    let find = || host.index().by_token(|t| t == token);
    assert_eq!(find(), Some(one.id().to_owned()));
    assert_eq!(host.index().by_token(|_| false), None);
    host.kill(one.id()).await.unwrap();
    assert_eq!(find(), None);
}

#[tokio::test]
async fn a_removed_snapshot_stays_until_its_last_user_is_removed() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let first = snapshot_id(&host, &id).await;
    let second = snapshot_id(&host, &id).await;
    host.rename(&id, Some("web".to_owned())).await.unwrap();
    let users = |snapshot: &str| match host.snapshots().remove(snapshot) {
        Err(OperationError::InUse { user, .. }) => user,
        other => panic!("{other:?}"),
    };
    for snapshot in [&first, &second] {
        host.snapshots().remove(snapshot).unwrap();
    }
    assert_eq!(users(&first), format!("snapshot {second}"));
    assert_eq!(users(&second), format!("sandbox {id} (web)"));
    bench.world.write(&id, "still usable");
    host.pause(&id).await.unwrap();
    host.resume(&id).await.unwrap();
    assert_eq!(bench.world.read(&id), "still usable");
    host.kill(&id).await.unwrap();
    host.kill(&id).await.unwrap();
    // The snapshot of the template remains.
    bench.until_files(1).await;
}

#[tokio::test]
async fn a_snapshot_removed_by_name_is_deleted_with_its_last_user() {
    let bench = Bench::new();
    let host = bench.open().await;
    let parent = create_id(&host).await;
    // Ids have no dash, so no id begins with this name.
    let name = "some-name";
    let snapshot = host
        .snapshot(&parent, Some(name.into()))
        .await
        .unwrap()
        .id()
        .to_owned();
    host.snapshots().remove(name).unwrap();
    // The sandbox descends from the snapshot.
    assert!(bench.file_names().contains(&snapshot));
    assert!(
        host.snapshots().remove(name).is_err(),
        "the removed snapshot has no name"
    );
    host.kill(&parent).await.unwrap();
    until("the removal of the files", || {
        !bench.file_names().contains(&snapshot)
    })
    .await;
}

#[tokio::test]
async fn only_a_rollback_marks_the_identity_as_rewound() {
    let bench = Bench::new();
    let host = bench.open().await;
    let id = create_id(&host).await;
    let is_rewound = |id: &str| {
        bench
            .world
            .body(id)
            .sandbox_identity
            .lock()
            .unwrap()
            .rewound
    };
    assert!(!is_rewound(&id));
    let snapshot = snapshot_id(&host, &id).await;
    let fork = host.fork(&id, 1, None).await.unwrap();
    assert!(!is_rewound(fork.children[0].as_ref().unwrap().id()));
    host.rollback(&id, &snapshot).await.unwrap();
    assert!(is_rewound(&id));
    host.pause(&id).await.unwrap();
    host.resume(&id).await.unwrap();
    assert!(!is_rewound(&id));
}

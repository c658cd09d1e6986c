//! Contract of operations that engines reject, and of their errors.
//!
//! An engine describes its *capabilities*, that is, the operations that it supports. A snapshot is
//! *incremental* if its files depend on the files of an earlier snapshot. The *working set* of
//! a snapshot is the set of pages that a restored guest touches first.

use super::place::{Place, TEMPLATE, missing};
use crate::support::{programs, skip};
use jiffy_engine_api::{AfterSnapshot, EngineError, EngineName};
use jiffy_engines::ProgramError;

pub async fn capabilities_match_the_supported_operations(place: &Place) {
    let engine = place.open().await;
    let name = place.engine.to_string();
    let all = engine.engines.descriptions();
    let mut defaults = all.iter().filter(|e| e.default);
    let own = defaults.next().unwrap();
    assert_eq!((own.name.as_str(), own.usable), (name.as_str(), true));
    assert_eq!((defaults.next(), &own.why), (None, &None));
    assert!(own.version.as_ref().is_some_and(|v| !v.is_empty()));
    let capabilities = own.capabilities;
    assert!(capabilities.snapshot && capabilities.rollback && capabilities.pause_frees_memory);
    // The engines were opened without a network.
    assert!(!capabilities.network && engine.network() == "off");

    let running = place.guest(&engine).await;
    let first = running.snapshot(AfterSnapshot::Resume).await;
    let first = first.unwrap();
    let second = running.snapshot(AfterSnapshot::Resume).await;
    assert_eq!(
        !engine.snapshot_files().is_independent(&second.unwrap()),
        capabilities.incremental
    );
    engine.snapshot_files().write_checksums(&first).unwrap();
    match engine.snapshot_files().verify(&first) {
        Ok(verified) => {
            assert!(capabilities.verify);
            assert!(
                verified
                    .iter()
                    .all(|v| v.has_checksums && v.damaged.is_empty())
            );
            assert!(!verified.is_empty());
        }
        Err(EngineError::Unsupported { engine, .. }) => {
            assert!(!capabilities.verify);
            assert_eq!(engine, name);
        }
        Err(other) => panic!("{other}"),
    }
    engine.snapshot_files().prefetch(&first).unwrap();
    engine
        .record_working_set(
            TEMPLATE,
            &first,
            &jiffy_proto::agent::SiteSettings::default(),
        )
        .await
        .unwrap();
    let nested = running.script("[ -e /dev/kvm ]").await.0.exit_code == 0;
    assert_eq!(nested, capabilities.nested_kvm);
    running.stop().await;
}

pub async fn a_snapshot_is_restored_by_the_engine_that_took_it(place: &Place) {
    let engine = place.open().await;
    let running = place.guest(&engine).await;
    running.count().await;
    let id = running.snapshot(AfterSnapshot::Stop).await;
    let (id, other) = (
        id.unwrap(),
        match place.engine {
            EngineName::MicroVm => EngineName::Gvisor,
            EngineName::Gvisor => EngineName::MicroVm,
        },
    );
    drop((running, engine));
    if place.engine == EngineName::Gvisor {
        let missing_program = ProgramError::Missing {
            name: "jiffy-gvisor",
            searched: "it was removed".to_owned(),
            remedy: "run `make build`",
            variable: "JIFFY_GVISOR",
        };
        let mut programs = programs();
        programs.gvisor = Err(missing_program);
        let engine = place.open_with(EngineName::MicroVm, programs).await;
        let refused = engine.restore(&id, None).await.err().unwrap();
        let refused = refused.to_string();
        assert!(
            refused.contains("engine gvisor") && refused.contains("it was removed"),
            "{refused}"
        );
        // The snapshot still exists.
        assert_eq!(
            engine.snapshot_files().ids().unwrap(),
            std::slice::from_ref(&id)
        );
    }
    if other == EngineName::Gvisor
        && let Some(why) = missing(other)
    {
        return skip("a_snapshot_is_restored_by_the_engine_that_took_it", &why);
    }
    // New sandboxes use the other engine; the snapshot is restored by the engine that took it.
    let engine = place.open_with(other, programs()).await;
    let restored = place.restored(&engine, &id).await;
    assert_eq!(restored.guest.engine(), place.engine.to_string());
    restored.wait_count_above(restored.counted().await).await;
    restored.stop().await;
}

pub async fn invalid_names_are_rejected(place: &Place) {
    let engine = place.open().await;
    for bad in [
        "",
        "..",
        "a/b",
        "../snapshots",
        "UPPER",
        ".draft-1-1",
        "a b",
    ] {
        assert!(engine.restore(bad, None).await.is_err(), "{bad}");
        assert!(engine.snapshot_files().remove(bad).is_err(), "{bad}");
    }
    let none = engine.restore("nosuchsnapshot", None).await.err();
    assert!(none.unwrap().to_string().contains("nosuchsnapshot"));
    assert!(
        engine
            .boot("no-such-template", super::place::size())
            .await
            .is_err()
    );
}

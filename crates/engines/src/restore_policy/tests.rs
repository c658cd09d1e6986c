//! Tests of the choice of engine and memory policy from measured costs.
//!
//! A *policy* is the source of a restored guest's memory. `Map` maps the pages of the snapshot,
//! which are read when they are touched. `CopyWorkingSet` reads the pages that the guest touches
//! first before the start, and maps the others. `CopyAll` reads all memory before the start.

use super::*;

/// Returns measured costs of a policy: durations of creates in milliseconds, and own memory.
fn cost(policy: RestorePolicy, median: f64, p99: f64, own: f64) -> PolicyCost {
    let flat = |value| Percentiles {
        min: value,
        median: value,
        p99: value,
    };
    PolicyCost {
        policy,
        create_ms: flat(median),
        create_exec_ms: Percentiles {
            p99,
            ..flat(median)
        },
        own_mib: flat(own),
        snapshot_page_us: flat(1.0),
        fresh_page_us: flat(1.0),
    }
}

fn here() -> HostFingerprint {
    HostFingerprint {
        cpu: "A processor".to_owned(),
        kvm: "software".to_owned(),
        kernel: "6.1".to_owned(),
    }
}

#[test]
fn memory_is_copied_only_where_that_saves_time() {
    use RestorePolicy::{CopyAll, CopyWorkingSet, Map};
    // The arguments of `cost` are the median and the 99th percentile of create and exec in
    // milliseconds, and the private memory in MiB. `Map` needs the least memory. `CopyWorkingSet`
    // needs 11 MiB, less than the limit for an idle sandbox, and must save 10 % of the time.
    // `CopyAll` needs 40 MiB, more than the limit, and must at least halve the time.
    let map = cost(Map, 20.0, 30.0, 4.0);
    let chosen = |all: f64, all_p99: f64, set: f64| {
        choose(&[
            cost(CopyAll, all, all_p99, 40.0),
            map.clone(),
            cost(CopyWorkingSet, set, 30.0, 11.0),
        ])
    };
    assert_eq!(chosen(20.0, 30.0, 20.0), Some(Map));
    // A small gain does not justify ten times the memory of `Map`.
    assert_eq!(chosen(12.0, 20.0, 19.0), Some(Map));
    // A large gain does not justify a slow 99th percentile.
    assert_eq!(chosen(9.0, 90.0, 20.0), Some(Map));
    assert_eq!(chosen(9.0, 20.0, 20.0), Some(CopyAll));
    assert_eq!(chosen(12.0, 20.0, 17.0), Some(CopyWorkingSet));
    // `CopyAll` is compared with the best policy so far, `CopyWorkingSet`: 9 ms are more than half
    // of its 17 ms.
    assert_eq!(chosen(9.0, 20.0, 17.0), Some(CopyWorkingSet));
    assert_eq!(choose(&[]), None);
}

#[test]
fn measurements_apply_to_the_measured_host_only() {
    let home = tempfile::tempdir().unwrap();
    let find = |host: &HostFingerprint| PolicyInForce::find(home.path(), host);
    assert_eq!(find(&here()).why, PolicyReason::NeverMeasured);
    let costs = vec![cost(RestorePolicy::CopyAll, 9.0, 9.0, 9.0)];
    let file = HostFile::new(here(), costs, None).unwrap();
    file.write(home.path()).unwrap();
    // The second call replaces the file, and leaves no temporary file (counted below).
    file.write(home.path()).unwrap();
    let found = find(&here());
    assert_eq!(found.policy, RestorePolicy::CopyAll);
    assert_eq!(found.why, PolicyReason::Measured(Box::new(file)));
    let others = [
        HostFingerprint {
            cpu: "Another".to_owned(),
            ..here()
        },
        HostFingerprint {
            kvm: "hardware".to_owned(),
            ..here()
        },
        HostFingerprint {
            kernel: "6.2".to_owned(),
            ..here()
        },
    ];
    for other in others {
        let found = find(&other);
        assert_eq!(found.policy, RestorePolicy::Map, "{other:?}");
        assert_eq!(found.why, PolicyReason::OtherHost { there: here() });
    }
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
}

#[test]
fn engines_are_compared_by_measurements_of_both_on_this_host() {
    let home = tempfile::tempdir().unwrap();
    let costs = vec![
        cost(RestorePolicy::Map, 20.0, 20.0, 4.0),
        cost(RestorePolicy::CopyAll, 15.0, 20.0, 40.0),
    ];
    let flat = |value| Percentiles {
        min: value,
        median: value,
        p99: value,
    };
    let gvisor = EngineCost {
        create_ms: flat(30.0),
        create_exec_ms: flat(35.0),
    };
    let stored = |gvisor| {
        let file = HostFile::new(here(), costs.clone(), gvisor).unwrap();
        file.write(home.path()).unwrap();
        HostFile::of_host(home.path(), &here()).unwrap()
    };
    // 20 ms is the time of `Map`. This policy was selected, because `CopyAll` needs much more
    // memory and does not halve the time. 35 ms is the time of gVisor.
    assert_eq!(stored(Some(gvisor)).engines_ms(), Some((20.0, 35.0)));
    let elsewhere = HostFingerprint {
        kernel: "6.2".to_owned(),
        ..here()
    };
    assert_eq!(HostFile::of_host(home.path(), &elsewhere), None);
    // Files written by versions without gVisor have no cost of it.
    assert_eq!(stored(None).engines_ms(), None);
    let text = fs::read_to_string(home.path().join(HOST_FILE)).unwrap();
    assert!(!text.contains("gvisor"), "{text}");
}

#[test]
fn a_damaged_file_or_one_of_another_format_is_ignored() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join(HOST_FILE);
    let costs = vec![cost(RestorePolicy::CopyAll, 9.0, 9.0, 9.0)];
    HostFile::new(here(), costs, None)
        .unwrap()
        .write(home.path())
        .unwrap();
    let text = fs::read_to_string(&path).unwrap();
    for damaged in [
        text.replace("\"format\": 1", "\"format\": 2"),
        text.replace("copy_all", "teleport"),
        text[..text.len() / 2].to_owned(),
        String::new(),
    ] {
        fs::write(&path, damaged).unwrap();
        let found = PolicyInForce::find(home.path(), &here());
        assert_eq!(found.policy, RestorePolicy::Map);
        assert!(
            matches!(found.why, PolicyReason::Unusable { .. }),
            "{found:?}"
        );
    }
}

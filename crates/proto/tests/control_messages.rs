//! Tests of the serialized forms of the messages between host and `jiffy-vmm`. A daemon adopts VMMs
//! that an earlier version started, so these forms must not change.
#![allow(clippy::unwrap_used)]

use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::snapshot::{
    AfterSnapshot, CapturedSnapshot, DiskFreeze, DiskRollback, FileIdentity, FoldedLayers,
    FreezePhases, LaterPages, LayerFiles, MemorySource, PopulateMoment, RestoreConfig,
    RollbackConfig, RollbackReport, SnapshotConfig, SnapshotDecision, SnapshotLayerFiles,
    SnapshotReport,
};
use jiffy_proto::vm::{
    DiskConfig, DiskLimits, Event, FdIndex, NetConfig, Request, StartTimes, StopCause, VmConfig,
    VmStats, VsockConfig,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

/// Limits of a disk that has none.
const LIMITS: DiskLimits = DiskLimits {
    bytes_per_s: None,
    requests_per_s: None,
};

/// Serialized forms of the requests and events with many fields, with line breaks that [`check`]
/// removes. A number in the place of a file is the position of its descriptor in the message.
const START: &str = r#"{"op":"start","vcpus":2,"memory_mib":512,"kvm":0,"kernel":1,"initrd":null,"cmdline":"quiet",
"disks":[{"kind":"read_only","image":2},{"kind":"overlay","base":3,"overlay":4}],
"disk_limits":{"bytes_per_s":null,"requests_per_s":null},
"vsock":{"guest_cid":3,"host_ports":[7]},"net":{"tap":5,"mac":[2,0,0,0,0,1],"mtu":1500},
"rng":true,"balloon":false,"console":6}"#;
const RESTORE: &str = r#"{"op":"restore","kvm":0,"state":1,"memory":[{"file":2,"index":3}],
"source":{"kind":"copy","working_set":4},"populate":8,"populate_later":{"pages":9,"from":"start"},
"disks":[{"kind":"layered","base":5,"layers":[{"file":2,"index":3}],"overlay":6}],
"disk_limits":{"bytes_per_s":null,"requests_per_s":null},"vsock":null,"net":null,
"console":7,"paused":true}"#;
const SNAPSHOT: &str = r#"{"op":"snapshot","id":"abc","state":0,"memory":1,"disk_only":true,"direct":null,"index":2,"pagemap":null,
"disks":[{"overlay":3,"index":4}],"then":"stay","max_bytes":9,
"captured":true}"#;
const SNAPSHOTTED: &str = r#"{"event":"snapshotted","stopped_us":1,"total_us":2,
"phases":{"pause_us":0,"state_us":0,"scan_us":0,"copy_us":0},"candidates":3,"stored":4,
"zero":5,"cpu":"cpu","vcpus":2}"#;
// `recalled` and `undecided` are former names, which remain in the serialized form. So are `keep`,
// `kept`, `recall`, `settle` and `settled` below.
const REATTACHED: &str = r#"{"event":"recalled","protocol":1,"running":true,"undecided":"abc",
"captured":{"id":"abc","report":null},"rollback":true,"fold":true,"disk_only":true,"memory_layers":1,
"console":0,"overlays":[1]}"#;
const ROLLBACK: &str = r#"{"op":"rollback","state":0,"memory":[{"file":1,"index":2}],"source":{"kind":"map"},
"populate":3,"populate_later":{"pages":8,"from":"frame"},
"pagemap":4,"disks":[{"layers":[{"file":5,"index":6}],"overlay":7}]}"#;
const FOLD_LAYERS: &str = r#"{"op":"fold_layers","lower":{"memory":{"device":1,"inode":2},"disks":[{"device":1,"inode":3}]},
"upper":{"memory":{"device":1,"inode":4},"disks":[{"device":1,"inode":5}]}}"#;
const ROLLED_BACK: &str = r#"{"event":"rolled_back","read_us":1,"stopped_us":2,"pause_us":3,"scan_us":4,"memory_us":5,
"state_us":6,"pages":7}"#;

/// Checks that each message is serialized as the given text without its line breaks, and that the
/// text is deserialized to the message.
fn check<T: Debug + PartialEq + Serialize + DeserializeOwned>(forms: Vec<(T, &str)>) {
    for (message, form) in forms {
        let form = form.replace('\n', "");
        assert_eq!(serde_json::to_string(&message).unwrap(), form);
        assert_eq!(serde_json::from_str::<T>(&form).unwrap(), message);
    }
}

/// Returns the message with the form [`START`].
fn boot() -> Request {
    Request::Start(Box::new(VmConfig {
        vcpus: 2,
        memory_mib: 512,
        kvm: FdIndex(0),
        kernel: FdIndex(1),
        initrd: None,
        cmdline: "quiet".to_owned(),
        disks: vec![
            DiskConfig::ReadOnly { image: FdIndex(2) },
            DiskConfig::Overlay {
                base: FdIndex(3),
                overlay: FdIndex(4),
            },
        ],
        disk_limits: LIMITS,
        vsock: Some(VsockConfig {
            guest_cid: 3,
            host_ports: vec![7],
        }),
        net: Some(NetConfig {
            tap: FdIndex(5),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
        }),
        rng: true,
        balloon: false,
        cpu_level: CpuLevel::default(),
        console: FdIndex(6),
    }))
}

/// Returns the message with the form [`RESTORE`].
fn restore() -> Request {
    let layer = LayerFiles {
        file: FdIndex(2),
        index: FdIndex(3),
    };
    Request::Restore(Box::new(RestoreConfig {
        kvm: FdIndex(0),
        state: FdIndex(1),
        memory: vec![layer],
        source: MemorySource::Copy {
            working_set: Some(FdIndex(4)),
        },
        populate: Some(FdIndex(8)),
        populate_later: Some(LaterPages {
            pages: FdIndex(9),
            from: PopulateMoment::Start,
        }),
        disks: vec![DiskConfig::Layered {
            base: FdIndex(5),
            layers: vec![layer],
            overlay: FdIndex(6),
        }],
        disk_limits: LIMITS,
        vsock: None,
        net: None,
        console: FdIndex(7),
        paused: true,
        lazy: None,
    }))
}

/// Returns the message with the form [`SNAPSHOT`].
fn snapshot() -> Request {
    Request::Snapshot(SnapshotConfig {
        id: "abc".to_owned(),
        state: FdIndex(0),
        memory: FdIndex(1),
        disk_only: true,
        direct: None,
        index: FdIndex(2),
        pagemap: None,
        working_set: None,
        disks: vec![DiskFreeze {
            overlay: FdIndex(3),
            index: FdIndex(4),
        }],
        then: AfterSnapshot::Stay,
        max_bytes: Some(9),
        captured: true,
    })
}

/// Returns the message with the form [`ROLLBACK`].
fn rollback() -> Request {
    let layer = |file| LayerFiles {
        file: FdIndex(file),
        index: FdIndex(file + 1),
    };
    Request::Rollback(Box::new(RollbackConfig {
        state: FdIndex(0),
        memory: vec![layer(1)],
        source: MemorySource::Map,
        populate: Some(FdIndex(3)),
        populate_later: Some(LaterPages {
            pages: FdIndex(8),
            from: PopulateMoment::Frame,
        }),
        pagemap: FdIndex(4),
        disks: vec![DiskRollback {
            layers: vec![layer(5)],
            overlay: FdIndex(7),
        }],
    }))
}

/// Returns the message with the form [`FOLD_LAYERS`].
fn fold_layers() -> Request {
    let files = |inode| SnapshotLayerFiles {
        memory: FileIdentity { device: 1, inode },
        disks: vec![FileIdentity {
            device: 1,
            inode: inode + 1,
        }],
    };
    Request::FoldLayers(Box::new(FoldedLayers {
        lower: files(2),
        upper: files(4),
    }))
}

#[test]
fn requests_keep_their_serialized_forms() {
    check(vec![
        (boot(), START),
        (restore(), RESTORE),
        (Request::Pause, r#"{"op":"pause"}"#),
        (Request::Resume, r#"{"op":"resume"}"#),
        (snapshot(), SNAPSHOT),
        (rollback(), ROLLBACK),
        (
            Request::FinishRollback {
                greeting: Some(FdIndex(0)),
            },
            r#"{"op":"finish_rollback","greeting":0}"#,
        ),
        (
            Request::WorkingSet {
                index: FdIndex(0),
                pagemap: FdIndex(1),
                written: FdIndex(2),
            },
            r#"{"op":"working_set","index":0,"pagemap":1,"written":2}"#,
        ),
        (Request::Connect { port: 7 }, r#"{"op":"connect","port":7}"#),
        (
            Request::Balloon { target_mib: 64 },
            r#"{"op":"balloon","target_mib":64}"#,
        ),
        (Request::Stats, r#"{"op":"stats"}"#),
        (
            Request::Detach {
                listener: FdIndex(0),
                log: Some(FdIndex(1)),
                greeting: None,
                request_id: None,
            },
            r#"{"op":"keep","listener":0,"log":1,"greeting":null}"#,
        ),
        (
            Request::Detach {
                listener: FdIndex(0),
                log: None,
                greeting: None,
                request_id: Some("r1".to_owned()),
            },
            r#"{"op":"keep","listener":0,"log":null,"greeting":null,"request_id":"r1"}"#,
        ),
        (Request::Reattach, r#"{"op":"recall"}"#),
        (
            Request::ResolveSnapshot {
                decision: SnapshotDecision::Commit,
            },
            r#"{"op":"settle","happened":true}"#,
        ),
        (
            Request::ResolveSnapshot {
                decision: SnapshotDecision::Abort,
            },
            r#"{"op":"settle","happened":false}"#,
        ),
        (
            Request::Prepare {
                kvm: FdIndex(0),
                memory_mib: 512,
            },
            r#"{"op":"prepare","kvm":0,"memory_mib":512}"#,
        ),
        (Request::AbortCapture, r#"{"op":"abort_capture"}"#),
        (fold_layers(), FOLD_LAYERS),
        (Request::Stop, r#"{"op":"stop"}"#),
    ]);
}

#[test]
fn events_keep_their_serialized_forms() {
    check(vec![
        (
            Event::Started(StartTimes {
                config_us: 1,
                loaded_us: 2,
                running_us: 3,
            }),
            r#"{"event":"started","config_us":1,"loaded_us":2,"running_us":3}"#,
        ),
        (
            Event::GuestConnect { port: 7 },
            r#"{"event":"guest_connect","port":7}"#,
        ),
        (
            Event::DeviceFailed {
                device: "net".to_owned(),
                reason: "why".to_owned(),
            },
            r#"{"event":"device_failed","device":"net","reason":"why"}"#,
        ),
        (
            Event::DiskFailed {
                reason: "why".to_owned(),
            },
            r#"{"event":"disk_failed","reason":"why"}"#,
        ),
        (
            Event::Stats(VmStats {
                mmio_exits: 1,
                pio_exits: 2,
                balloon_mib: 3,
                exits: Some(4),
            }),
            r#"{"event":"stats","mmio_exits":1,"pio_exits":2,"balloon_mib":3,"exits":4}"#,
        ),
        (
            Event::Paused { stopped_us: 1 },
            r#"{"event":"paused","stopped_us":1}"#,
        ),
        (Event::Resumed, r#"{"event":"resumed"}"#),
        (
            Event::Captured { stopped_us: 1 },
            r#"{"event":"captured","stopped_us":1}"#,
        ),
        (
            Event::Snapshotted(SnapshotReport {
                stopped_us: 1,
                total_us: 2,
                phases: FreezePhases::default(),
                candidates: 3,
                stored: 4,
                zero: 5,
                cpu: "cpu".to_owned(),
                vcpus: 2,
            }),
            SNAPSHOTTED,
        ),
        (
            Event::SnapshotFailed {
                reason: "why".to_owned(),
                needed_bytes: Some(5),
            },
            r#"{"event":"snapshot_failed","reason":"why","needed_bytes":5}"#,
        ),
        (
            Event::RollbackRefused {
                reason: "why".to_owned(),
            },
            r#"{"event":"rollback_refused","reason":"why"}"#,
        ),
        (Event::RollbackBegun, r#"{"event":"rollback_begun"}"#),
        (
            Event::RolledBack(RollbackReport {
                read_us: 1,
                stopped_us: 2,
                pause_us: 3,
                scan_us: 4,
                memory_us: 5,
                state_us: 6,
                pages: 7,
            }),
            ROLLED_BACK,
        ),
        (
            Event::WorkingSet { chunks: Some(1) },
            r#"{"event":"working_set","chunks":1}"#,
        ),
        (Event::Detached, r#"{"event":"kept"}"#),
        (
            Event::Reattached {
                protocol: 1,
                running: true,
                prepared_snapshot: Some("abc".to_owned()),
                captured: Some(Box::new(CapturedSnapshot {
                    id: "abc".to_owned(),
                    report: None,
                })),
                rollback: true,
                fold: true,
                disk_only: true,
                memory_layers: Some(1),
                console: FdIndex(0),
                overlays: vec![FdIndex(1)],
            },
            REATTACHED,
        ),
        (
            Event::SnapshotResolved { failure: None },
            r#"{"event":"settled","failure":null}"#,
        ),
        (
            Event::Stopped(StopCause::HostError {
                reason: "why".to_owned(),
            }),
            r#"{"event":"stopped","cause":"host_error","reason":"why"}"#,
        ),
        (
            Event::Stopped(StopCause::MissingMemory {
                reason: "why".to_owned(),
            }),
            r#"{"event":"stopped","cause":"missing_memory","reason":"why"}"#,
        ),
        (
            Event::Stopped(StopCause::GuestReset),
            r#"{"event":"stopped","cause":"guest_reset"}"#,
        ),
    ]);
}

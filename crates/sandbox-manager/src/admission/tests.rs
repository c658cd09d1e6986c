//! Tests of admission: which shortage of the host rejects a sandbox, with figures instead of a
//! host.
//!
//! A *reserve* is the part of a resource that guests may not use. [`BOOT_MIB`] is the memory that a
//! guest is expected to use while it starts.

use super::*;

/// Host whose figures never change.
#[derive(Debug)]
struct FakeFigures(HostFigures);

impl HostReader for FakeFigures {
    fn read(&self) -> HostFigures {
        self.0
    }
}

/// Returns the figures of a host with enough of every resource.
fn ample() -> HostFigures {
    HostFigures {
        memory_total_mib: Some(16_384),
        memory_available_mib: Some(12_000),
        disk_free_mib: Some(100_000),
        disk_total_mib: Some(200_000),
        tasks_free: Some(100_000),
        descriptors_free: Some(100_000),
        pressure: Some(Pressure::default()),
    }
}

fn admission(limits: HostLimits, figures: HostFigures) -> Admission {
    Admission::new(limits, Arc::new(FakeFigures(figures)))
}

fn size(memory_mib: u32) -> SandboxSize {
    SandboxSize {
        memory_mib,
        ..SandboxSize::default()
    }
}

/// Requests the admission of one sandbox, and returns the shortage that rejects it.
fn refusal(limits: HostLimits, figures: HostFigures) -> Shortage {
    let admission = admission(limits, figures);
    let refusal = admission.admit(Occupant::Sandbox, size(512)).unwrap_err();
    assert_eq!(
        admission.reservations().rejections,
        [(refusal.short_of, 1)].into()
    );
    assert_eq!(admission.reservations().memory_mib, 0);
    refusal.short_of
}

#[test]
fn each_shortage_rejects_and_is_named() {
    let limits = HostLimits::default();
    assert!(
        admission(limits, ample())
            .admit(Occupant::Sandbox, size(512))
            .is_ok()
    );
    // The default reserve is 5 % of 16,384 MiB, which is 819 MiB.
    let memory = |available| HostFigures {
        memory_available_mib: Some(available),
        ..ample()
    };
    assert_eq!(
        refusal(limits, memory(819 + BOOT_MIB - 1)),
        Shortage::Memory
    );
    assert!(
        admission(limits, memory(819 + BOOT_MIB))
            .admit(Occupant::Sandbox, size(512))
            .is_ok()
    );
    let disk = HostFigures {
        // The default reserve is 2,000 MiB.
        disk_free_mib: Some(1_999),
        ..ample()
    };
    assert_eq!(refusal(limits, disk), Shortage::Disk);
    let tasks = HostFigures {
        tasks_free: Some(100),
        ..ample()
    };
    assert_eq!(refusal(limits, tasks), Shortage::Tasks);
    let descriptors = HostFigures {
        descriptors_free: Some(100),
        ..ample()
    };
    assert_eq!(refusal(limits, descriptors), Shortage::Descriptors);
    let disks = HostFigures {
        pressure: Some(Pressure {
            io_full: 91.0,
            ..Pressure::default()
        }),
        ..ample()
    };
    assert_eq!(refusal(limits, disks), Shortage::Pressure);
    let no_sandboxes = HostLimits {
        sandboxes: Some(0),
        ..limits
    };
    assert_eq!(refusal(no_sandboxes, ample()), Shortage::Sandboxes);
}

#[test]
fn free_resources_are_those_that_the_admission_grants() {
    let limits = HostLimits {
        memory_overcommit: 1.0,
        ..HostLimits::default()
    };
    let admission = admission(limits, ample());
    let before = admission.free();
    let held = admission.admit(Occupant::Sandbox, size(512)).unwrap();
    let after = admission.free();
    assert_eq!(before.memory_mib.unwrap() - after.memory_mib.unwrap(), 512);
    assert_eq!((before.starting, after.starting), (0, 1));
    drop(held);
    assert_eq!(admission.free(), before);
    let full = HostFigures {
        tasks_free: Some(0),
        ..ample()
    };
    let free = Admission::new(limits, Arc::new(FakeFigures(full))).free();
    assert_eq!((free.memory_mib, free.cpu_percent), (Some(0), 0));
}

#[test]
fn pressure_on_memory_rejects_only_while_memory_is_scarce() {
    let limits = HostLimits::default();
    let under = |pressure, available| HostFigures {
        memory_available_mib: available,
        pressure: Some(pressure),
        ..ample()
    };
    let some = Pressure {
        memory_some: 54.0,
        ..Pressure::default()
    };
    let full = Pressure {
        memory_some: 54.0,
        memory_full: 30.0,
        ..Pressure::default()
    };
    let admits = |figures| {
        let admission = admission(limits, figures);
        let admitted = admission.admit(Occupant::Sandbox, size(512));
        admitted.is_ok() && admission.check_replacement().is_ok()
    };
    for pressure in [some, full] {
        // A quarter of 16,384 MiB is 4,096 MiB: the kernel can reclaim enough page cache.
        for available in [8_192, 4_096] {
            assert!(admits(under(pressure, Some(available))), "{available}");
        }
        for available in [Some(4_095), Some(1_000), None] {
            let figures = under(pressure, available);
            assert_eq!(refusal(limits, figures), Shortage::Pressure);
        }
        let unknown = HostFigures {
            memory_total_mib: None,
            ..under(pressure, Some(8_192))
        };
        assert_eq!(refusal(limits, unknown), Shortage::Pressure);
    }
    let below = Pressure {
        memory_some: 40.0,
        memory_full: 10.0,
        ..Pressure::default()
    };
    assert!(
        admits(under(below, Some(1_000))),
        "a pressure equal to its limit is permitted"
    );
    let rejection = admission(limits, under(some, Some(1_000)))
        .admit(Occupant::Sandbox, size(512))
        .unwrap_err();
    let error = OperationError::from(rejection).to_string();
    for part in ["54 %", "40 %", "1000 of 16384 MiB", "4096 MiB"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // Neither scarce nor ample memory hides the pressure on other resources.
    let disks = Pressure {
        io_full: 91.0,
        ..some
    };
    assert_eq!(
        refusal(limits, under(disks, Some(8_192))),
        Shortage::Pressure
    );
}

#[test]
fn without_figures_only_reservations_reject_guests() {
    let admission = admission(
        HostLimits {
            sandboxes: Some(1),
            ..HostLimits::default()
        },
        HostFigures::default(),
    );
    let _place = admission.admit(Occupant::Sandbox, size(512)).unwrap();
    let refusal = admission.admit(Occupant::Sandbox, size(512)).unwrap_err();
    assert_eq!(refusal.short_of, Shortage::Sandboxes);
}

#[test]
fn reserved_memory_is_counted_until_guests_have_exited() {
    let limits = HostLimits {
        memory_overcommit: 2.0,
        ..HostLimits::default()
    };
    let admission = admission(limits, ample());
    let reservations: Vec<_> = (0..8)
        .map(|_| admission.admit(Occupant::Sandbox, size(4096)).unwrap())
        .collect();
    let refusal = admission.admit(Occupant::Sandbox, size(128)).unwrap_err();
    assert_eq!(refusal.short_of, Shortage::ReservedMemory);
    let error = OperationError::from(refusal);
    assert!(matches!(error, OperationError::Busy { .. }), "{error}");
    // The limit is twice the memory of the host.
    assert!(error.to_string().contains("32768 MiB"), "{error}");
    drop(reservations);
    let reservations = admission.reservations();
    assert_eq!(
        (
            reservations.sandboxes,
            reservations.memory_mib,
            reservations.starting
        ),
        (0, 0, 0)
    );
}

#[test]
fn requests_larger_than_the_host_are_not_retryable() {
    let admission = admission(HostLimits::default(), ample());
    // The host has 16,384 MiB. Without the reserve of 819 MiB, 15,565 MiB remain.
    let error = OperationError::from(
        admission
            .admit(Occupant::Sandbox, size(16_000))
            .unwrap_err(),
    );
    assert!(matches!(error, OperationError::TooLarge { .. }), "{error}");
    assert!(admission.admit(Occupant::Sandbox, size(15_000)).is_ok());
}

#[test]
fn starting_guests_count_with_their_expected_memory() {
    let figures = HostFigures {
        memory_available_mib: Some(819 + 3 * BOOT_MIB),
        ..ample()
    };
    let admission = admission(HostLimits::default(), figures);
    let mut reservations: Vec<_> = (0..3)
        .map(|_| admission.admit(Occupant::Sandbox, size(512)).unwrap())
        .collect();
    let refusal = admission.admit(Occupant::Sandbox, size(512)).unwrap_err();
    assert_eq!(refusal.short_of, Shortage::Memory);
    assert!(admission.check_replacement().is_err());
    reservations[0].mark_started();
    // A second call has no effect.
    reservations[0].mark_started();
    assert!(admission.admit(Occupant::Sandbox, size(512)).is_ok());
}

#[test]
fn a_thousand_concurrent_reservations_stay_within_the_limit() {
    let limits = HostLimits {
        sandboxes: Some(100),
        ..HostLimits::default()
    };
    let admission = Arc::new(admission(limits, ample()));
    let threads: Vec<_> = (0..20)
        .map(|_| {
            let admission = admission.clone();
            std::thread::spawn(move || {
                let mut reservations = Vec::new();
                for _ in 0..50 {
                    reservations.extend(admission.admit(Occupant::Sandbox, size(128)).ok());
                    assert!(admission.reservations().sandboxes <= 100);
                }
                reservations
            })
        })
        .collect();
    let reservations: Vec<_> = threads
        .into_iter()
        .flat_map(|t| t.join().unwrap())
        .collect();
    assert_eq!(reservations.len(), 100);
    assert_eq!(
        admission.reservations().rejections[&Shortage::Sandboxes],
        900
    );
}

#[test]
fn reserved_disk_is_counted_until_guests_have_exited() {
    let disk = |disk_mib| SandboxSize {
        disk_mib,
        ..size(128)
    };
    let limits = HostLimits {
        disk_overcommit: 1.0,
        ..HostLimits::default()
    };
    // Of 100,000 free MiB, 2,000 MiB are the reserve.
    let strict = admission(limits, ample());
    let refusal = strict.admit(Occupant::Sandbox, disk(98_001)).unwrap_err();
    assert_eq!(refusal.short_of, Shortage::ReservedDisk);
    let large = strict.admit(Occupant::Sandbox, disk(90_000)).unwrap();
    let rest = strict.admit(Occupant::Sandbox, disk(8_000)).unwrap();
    assert_eq!(
        strict.writable_disk_mib(),
        Some(0),
        "guests may write all free disk space, so nothing else may be written"
    );
    let refusal = strict.admit(Occupant::Sandbox, disk(1)).unwrap_err();
    let error = OperationError::from(refusal);
    assert!(matches!(error, OperationError::Busy { .. }), "{error}");
    assert!(error.to_string().contains("limit of 98000 MiB"), "{error}");
    drop(large);
    assert_eq!(strict.writable_disk_mib(), Some(90_000));
    drop(rest);
    assert_eq!(strict.reservations().disk_mib, 0);
    // With overcommit, guests are expected to write only a part of their disks.
    let defaults = HostLimits::default();
    let written = (98_001.0 / defaults.disk_overcommit) as u64;
    let overcommitted = admission(defaults, ample());
    let _large = overcommitted
        .admit(Occupant::Sandbox, disk(98_001))
        .unwrap();
    assert_eq!(overcommitted.writable_disk_mib(), Some(98_000 - written));
}

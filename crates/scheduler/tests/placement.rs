//! Placement of sandboxes: filters, best fit, locality and reservations.
//!
//! `resources` takes thousandths of a processor, MiB of memory and MiB of disk.

use crate::support::{Random, report, request, resources, spec, with_template};
use jiffy_scheduler::{
    CpuLevel, EngineSet, HostId, HostReport, HostSpec, Label, MAX_CONSIDERED, PlacementError,
    PlacementRequest, RESERVATION_TIME_MS, Rejection, Resource, Scheduler, TemplateId, Verdict,
};

const NOW: u64 = 1_000_000;

fn label(name: &str, value: &str) -> Label {
    Label {
        name: name.into(),
        value: value.into(),
    }
}

/// Returns a scheduler with hosts of 64 processors, 256 GiB of memory and 1 TiB of disk. Host N has
/// the Nth amount of free memory.
fn fleet(free_memory_mib: &[u32]) -> Scheduler {
    let mut scheduler = Scheduler::new();
    for (number, &memory_mib) in (1..).zip(free_memory_mib) {
        let capacity = resources(64_000, 262_144, 1 << 20);
        let free = resources(64_000, memory_mib, 1 << 20);
        scheduler.add_host(HostId(number), spec(capacity), report(free));
    }
    scheduler
}

/// Places a sandbox and returns the number of its host.
fn place(scheduler: &mut Scheduler, request: &PlacementRequest) -> Result<u32, PlacementError> {
    scheduler
        .place(request, NOW)
        .map(|placement| placement.host.0)
}

#[test]
fn the_tightest_host_with_room_is_selected() {
    let mut scheduler = fleet(&[200_000, 3_000, 900, 50_000]);
    let small = request(resources(0, 2048, 1024));
    assert_eq!(place(&mut scheduler, &small), Ok(2));
    // Host 2 has less than 1,024 MiB left.
    assert_eq!(place(&mut scheduler, &small), Ok(4));
}

#[test]
fn each_requirement_excludes_hosts_without_it() {
    let mut scheduler = Scheduler::new();
    let capacity = resources(8000, 16_384, 100_000);
    let weak = HostSpec {
        engines: EngineSet::GVISOR,
        cpu_level: CpuLevel(2),
        cpu_features: 0,
        ..spec(capacity)
    };
    let strong = HostSpec {
        labels: vec![label("zone", "eu"), label("disk", "nvme")],
        ..spec(capacity)
    };
    let offline = HostReport {
        is_store_reachable: false,
        ..report(resources(900, 1000, 1000))
    };
    scheduler.add_host(HostId(1), weak, offline);
    let with_template = HostReport {
        templates: vec![TemplateId(7)],
        ..report(resources(2000, 4000, 9000))
    };
    scheduler.add_host(HostId(2), strong, with_template);

    let any = PlacementRequest {
        needs: resources(0, 512, 100),
        ..PlacementRequest::default()
    };
    assert_eq!(place(&mut scheduler, &any), Ok(1));
    // Each request differs from `any` in one requirement, which only host 2 meets.
    let strict = [
        PlacementRequest {
            engines: EngineSet::MICROVM,
            ..any.clone()
        },
        PlacementRequest {
            cpu_level: CpuLevel(3),
            ..any.clone()
        },
        PlacementRequest {
            cpu_features: 0b100,
            ..any.clone()
        },
        PlacementRequest {
            labels: vec![label("disk", "nvme")],
            ..any.clone()
        },
        PlacementRequest {
            needs_store: true,
            ..any.clone()
        },
        PlacementRequest {
            excluded: vec![HostId(1)],
            ..any.clone()
        },
        PlacementRequest {
            template: Some(TemplateId(7)),
            requires_template: true,
            ..any.clone()
        },
        PlacementRequest {
            needs: resources(1000, 10, 10),
            ..any.clone()
        },
        PlacementRequest {
            needs: resources(10, 10, 2000),
            ..any.clone()
        },
    ];
    for request in &strict {
        let placement = scheduler.place(request, NOW).unwrap();
        assert_eq!(placement.host, HostId(2), "{request:?}");
        assert!(scheduler.reject(placement.reservation));
    }
    let elsewhere = PlacementRequest {
        labels: vec![label("zone", "us")],
        ..any.clone()
    };
    assert_eq!(
        place(&mut scheduler, &elsewhere),
        Err(PlacementError::NoMatch)
    );
    let large = PlacementRequest {
        needs: resources(100, 5000, 100),
        ..any
    };
    assert_eq!(place(&mut scheduler, &large), Err(PlacementError::NoRoom));
}

#[test]
fn a_sandbox_with_volumes_is_placed_on_their_host_only() {
    let mut scheduler = fleet(&[200_000, 3_000, 900]);
    let on = |host: u32, memory_mib| PlacementRequest {
        volume_host: Some(HostId(host)),
        ..request(resources(1000, memory_mib, 1024))
    };
    // Without volumes, the tightest host would be selected.
    assert_eq!(place(&mut scheduler, &on(1, 2048)), Ok(1));
    assert_eq!(place(&mut scheduler, &on(3, 512)), Ok(3));
    let full = on(3, 2048);
    assert_eq!(place(&mut scheduler, &full), Err(PlacementError::NoRoom));
    let explained = scheduler.explain(&full).to_string();
    assert!(
        explained.contains("h1: the volumes of the sandbox are on h3"),
        "{explained}"
    );
    assert!(
        explained.contains("h3: 388 MiB of memory free"),
        "{explained}"
    );
    scheduler.set_draining(HostId(3), true);
    assert!(place(&mut scheduler, &on(3, 1)).is_err());
    assert!(place(&mut scheduler, &on(9, 1)).is_err());
}

#[test]
fn draining_and_removed_hosts_are_not_selected() {
    let mut scheduler = fleet(&[4096, 8192]);
    let draining = HostReport {
        is_draining: true,
        ..report(resources(64_000, 4096, 1 << 20))
    };
    assert!(scheduler.report(HostId(1), draining));
    let small = request(resources(0, 1, 1));
    assert_eq!(place(&mut scheduler, &small), Ok(2));
    scheduler.remove_host(HostId(2));
    assert_eq!(place(&mut scheduler, &small), Err(PlacementError::NoHosts));
    assert!(!scheduler.report(HostId(2), HostReport::default()));
    assert!(scheduler.report(HostId(1), report(resources(64_000, 4096, 1 << 20))));
    assert_eq!(place(&mut scheduler, &small), Ok(1));
}

#[test]
fn a_host_with_the_template_is_preferred_if_it_is_hardly_emptier() {
    // A host with the template may have more free memory by 5 % of the capacity. 5 % of 262,144 MiB
    // are 13,107 MiB.
    let mut scheduler = fleet(&[10_000, 23_000, 24_000]);
    let mut add = |host: u32, memory: u32, template: u64| {
        let free = resources(64_000, memory, 1 << 20);
        let state = HostReport {
            templates: vec![TemplateId(template)],
            ..report(free)
        };
        assert!(scheduler.report(HostId(host), state));
    };
    add(2, 23_000, 5);
    add(3, 24_000, 6);
    let near = with_template(request(resources(0, 1024, 1)), 5);
    let far = with_template(request(resources(0, 1024, 1)), 6);
    assert_eq!(place(&mut scheduler, &near), Ok(2));
    assert_eq!(place(&mut scheduler, &far), Ok(1));
}

#[test]
fn a_template_on_many_hosts_is_found_on_one_of_the_tightest() {
    // 150 hosts have the template: too many to compare all of them (`MAX_SCANNED` is 64).
    let mut scheduler = fleet(&vec![100_000; 300]);
    for host in (2..=300).step_by(2) {
        let free = resources(64_000, 100_000 + host, 1 << 20);
        let state = HostReport {
            templates: vec![TemplateId(9)],
            ..report(free)
        };
        assert!(scheduler.report(HostId(host), state));
    }
    let request = with_template(request(resources(1000, 1024, 1)), 9);
    for _ in 0..100 {
        assert!(scheduler.place(&request, NOW).unwrap().has_template);
    }
    let required = PlacementRequest {
        requires_template: true,
        ..request
    };
    assert!(scheduler.place(&required, NOW).unwrap().has_template);
}

#[test]
fn the_scarcer_resource_orders_the_hosts() {
    let mut scheduler = Scheduler::new();
    let capacity = resources(64_000, 262_144, 1 << 20);
    // Little processor time is free in the fleet, and much memory.
    scheduler.add_host(
        HostId(1),
        spec(capacity),
        report(resources(9000, 100_000, 1 << 20)),
    );
    scheduler.add_host(
        HostId(2),
        spec(capacity),
        report(resources(3000, 200_000, 1 << 20)),
    );
    // The scarcer resource does not matter to a sandbox that does not need it.
    for (cpu, memory, resource, host) in
        [(1000, 0, Resource::Cpu, 2), (0, 1024, Resource::Memory, 1)]
    {
        let request = request(resources(cpu, memory, 1));
        assert_eq!(scheduler.scarce_resource(&request), resource);
        assert_eq!(place(&mut scheduler, &request), Ok(host));
    }
    let both = request(resources(1000, 1024, 1));
    assert_eq!(scheduler.scarce_resource(&both), Resource::Cpu);
}

#[test]
fn a_sandbox_is_placed_on_a_host_with_its_ratio_of_memory_and_processors() {
    let mut scheduler = Scheduler::new();
    // Free processors are scarcer than free memory.
    let capacity = resources(64_000, 200_000, 1 << 20);
    let hosts = [
        (4000, 8000),
        (3000, 24_000),
        (20_000, 40_000),
        (2000, 64_000),
    ];
    for (number, (cpu, memory)) in (1..).zip(hosts) {
        let free = report(resources(cpu, memory, 1 << 20));
        scheduler.add_host(HostId(number), spec(capacity), free);
    }
    let mut place = |cpu, memory| place(&mut scheduler, &request(resources(cpu, memory, 1)));
    // Hosts 1 and 3 have 2 MiB for each thousandth of a processor; host 1 is tighter.
    assert_eq!(place(1000, 2048), Ok(1));
    assert_eq!(place(1000, 8192), Ok(2));
    assert_eq!(place(1000, 32_000), Ok(4));
    // The host with this ratio is full, so one with more memory is used.
    assert_eq!(place(1000, 20_000), Ok(4));
    assert_eq!(place(4000, 8000), Ok(3));
    // Only hosts with less memory for each processor have room.
    assert_eq!(place(1000, 30_000), Ok(3));
    assert_eq!(place(1000, 30_000), Err(PlacementError::NoRoom));
}

#[test]
fn reservations_are_confirmed_rejected_or_expire() {
    let mut scheduler = fleet(&[4096]);
    let needs = resources(1000, 1024, 10);
    let full = resources(64_000, 4096, 1 << 20);
    let first = scheduler.place(&request(needs), NOW).unwrap();
    let second = scheduler.place(&request(needs), NOW + 1).unwrap();
    let third = scheduler.place(&request(needs), NOW + 2).unwrap();
    assert_eq!(
        scheduler.free(HostId(1)),
        Some(full.minus(&resources(3000, 3072, 30)))
    );

    assert!(scheduler.confirm(first.reservation));
    assert!(
        !scheduler.confirm(first.reservation),
        "a reservation ends once"
    );
    assert!(scheduler.reject(second.reservation));
    assert_eq!(
        scheduler.free(HostId(1)),
        Some(full.minus(&resources(2000, 2048, 20)))
    );

    scheduler.expire(NOW + 2 + RESERVATION_TIME_MS - 1);
    assert_eq!(scheduler.reservation_count(), 1);
    scheduler.expire(NOW + 2 + RESERVATION_TIME_MS);
    assert_eq!(scheduler.reservation_count(), 0);
    assert_eq!(scheduler.free(HostId(1)), Some(full.minus(&needs)));
    assert!(
        !scheduler.confirm(third.reservation),
        "an expired reservation cannot be confirmed"
    );

    // The report contains the confirmed sandbox.
    assert!(scheduler.report(HostId(1), report(full.minus(&needs))));
    assert_eq!(scheduler.free(HostId(1)), Some(full.minus(&needs)));
}

#[test]
fn a_silent_host_is_not_selected_until_its_next_report() {
    let mut scheduler = fleet(&[4096, 8192]);
    let small = request(resources(0, 1, 1));
    let open = scheduler.place(&small, NOW).unwrap();
    assert_eq!(open.host, HostId(1));
    // A repeated exclusion and an unknown host change nothing.
    for host in [1, 1, 9] {
        scheduler.set_silent(HostId(host));
    }
    assert_eq!(place(&mut scheduler, &small), Ok(2));
    assert!(scheduler.reject(open.reservation));
    let explanation = scheduler.explain(&small).to_string();
    assert!(
        explanation.ends_with("h1: no recent heartbeat"),
        "{explanation}"
    );
    scheduler.set_silent(HostId(2));
    assert_eq!(place(&mut scheduler, &small), Err(PlacementError::NoRoom));
    assert!(scheduler.report(HostId(1), report(resources(64_000, 4096, 1 << 20))));
    assert_eq!(place(&mut scheduler, &small), Ok(1));
}

#[test]
fn a_drained_host_is_not_selected_before_its_next_report() {
    let mut scheduler = fleet(&[4096, 8192]);
    let small = request(resources(0, 1, 1));
    assert_eq!(place(&mut scheduler, &small), Ok(1));
    // A repeated command and an unknown host change nothing.
    for host in [1, 1, 9] {
        scheduler.set_draining(HostId(host), true);
    }
    assert_eq!(place(&mut scheduler, &small), Ok(2));
    scheduler.set_draining(HostId(1), false);
    assert_eq!(place(&mut scheduler, &small), Ok(1));
    // A silent host stays excluded.
    scheduler.set_silent(HostId(1));
    scheduler.set_draining(HostId(1), false);
    assert_eq!(place(&mut scheduler, &small), Ok(2));
}

#[test]
fn a_host_that_joins_again_has_no_reservations() {
    let mut scheduler = fleet(&[4096]);
    let placement = scheduler
        .place(&request(resources(1000, 1024, 10)), NOW)
        .unwrap();
    let full = resources(64_000, 4096, 1 << 20);
    scheduler.add_host(HostId(1), spec(full), report(full));
    assert_eq!(scheduler.free(HostId(1)), Some(full));
    assert!(!scheduler.reject(placement.reservation));
    assert_eq!(scheduler.free(HostId(1)), Some(full));
}

#[test]
fn an_explanation_names_the_selected_host_and_the_reasons_of_the_others() {
    let mut scheduler = fleet(&[4096, 900, 8192]);
    let draining = HostReport {
        is_draining: true,
        ..report(resources(64_000, 8192, 1 << 20))
    };
    assert!(scheduler.report(HostId(3), draining));
    let explanation = scheduler.explain(&request(resources(1000, 1024, 10)));
    assert_eq!(explanation.hosts[0].host, HostId(1));
    assert_eq!(explanation.hosts[0].verdict, Verdict::Selected);
    let shortage = Rejection::Resource {
        resource: Resource::Memory,
        free: 900,
        needed: 1024,
    };
    assert_eq!(explanation.hosts[1].verdict, Verdict::Rejected(shortage));
    assert_eq!(
        explanation.to_string(),
        "h1: 1 of 3 hosts have room, compared by memory; \
         h2: 900 MiB of memory free, 1024 required; h3: draining"
    );
    let large = scheduler.explain(&request(resources(1000, 100_000, 10)));
    assert!(
        large
            .to_string()
            .starts_with("no host: no suitable host has room"),
        "{large}"
    );

    let many = fleet(&vec![4096; 1000]).explain(&request(resources(1, 1, 1)));
    assert_eq!(many.hosts.len(), MAX_CONSIDERED);
    // Of 1,000 hosts, the explanation names 50 (`MAX_CONSIDERED`).
    assert!(many.to_string().ends_with("950 further hosts"), "{many}");
}

/// The free amounts of a scheduler agree with a simple model. A placement succeeds if and only if a
/// host has room. The scheduler groups hosts in buckets, whose free amounts differ by at most 1/32.
/// For a sandbox that needs one resource, the selected host is in the bucket of the tightest host
/// with room.
#[test]
fn random_operations_agree_with_a_linear_model() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let mut scheduler = Scheduler::new();
        let mut free = Vec::new();
        for host in 0..1 + random.below(40) {
            let capacity = resources(
                8000 + random.below(64_000),
                1 + random.below(500_000),
                1 << 20,
            );
            scheduler.add_host(HostId(host), spec(capacity), report(capacity));
            free.push(capacity);
        }
        let mut open = Vec::new();
        for step in 0..2000 {
            match random.below(10) {
                0..=5 => {
                    let mut needs =
                        resources(random.below(4000), random.below(16_000), random.below(2000));
                    match random.below(3) {
                        0 => needs.cpu_milli = 0,
                        1 => needs.memory_mib = 0,
                        _ => {}
                    }
                    let resource = scheduler.scarce_resource(&request(needs));
                    let fits = free.iter().filter(|free| free.missing(&needs).is_none());
                    let best = fits.map(|free| free.get(resource)).min();
                    let placement = scheduler.place(&request(needs), NOW);
                    assert_eq!(placement.is_ok(), best.is_some(), "seed {seed} step {step}");
                    let (Ok(placement), Some(best)) = (placement, best) else {
                        continue;
                    };
                    let host = placement.host.0 as usize;
                    assert!(
                        free[host].missing(&needs).is_none(),
                        "seed {seed} step {step}"
                    );
                    let selected = free[host].get(resource);
                    let needs_both = needs.cpu_milli > 0 && needs.memory_mib > 0;
                    assert!(
                        needs_both || selected <= best + best / 32 + 1,
                        "{selected} instead of {best}"
                    );
                    free[host] = free[host].minus(&needs);
                    open.push((placement, needs));
                }
                6..=7 if !open.is_empty() => {
                    let index = random.below(open.len() as u32) as usize;
                    let (placement, needs) = open.swap_remove(index);
                    let host = placement.host.0 as usize;
                    if random.below(2) == 0 {
                        assert!(scheduler.reject(placement.reservation));
                        free[host] = free[host].plus(&needs);
                    } else {
                        assert!(scheduler.confirm(placement.reservation));
                    }
                }
                _ => {
                    let host = random.below(free.len() as u32);
                    assert_eq!(scheduler.free(HostId(host)), Some(free[host as usize]));
                }
            }
        }
        assert_eq!(scheduler.reservation_count(), open.len());
        for (placement, needs) in open {
            assert!(scheduler.reject(placement.reservation));
            let host = placement.host.0 as usize;
            free[host] = free[host].plus(&needs);
        }
        for (host, free) in (0..).zip(free) {
            assert_eq!(scheduler.free(HostId(host)), Some(free), "seed {seed}");
        }
    }
}

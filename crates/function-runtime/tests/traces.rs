//! Tests that a request leaves no traces for later requests, however it ends, and even while the
//! kernel moves or swaps memory. Each request searches its state for *marks*, which are values that
//! requests leave in it.
//!
//! The number of functions exceeds the number of memories in the pool, so that functions reuse
//! slots of other functions.
//!
//! A *slot* is address space for the memory of one instance, which requests use one after the
//! other. The *reset* cleans a slot after a request.
#![allow(clippy::unwrap_used, clippy::panic)]

mod pressure;
mod search;
mod trace_guest;

use crate::skip::skip;
use crate::swap::Swap;
use jiffy_function_runtime::engine::{self, RESETS};
use jiffy_proto::function::{SlotReset, TenantLimits, World};
use nix::unistd::Uid;
use pressure::{kernel_count, status_kib};
use search::{SLOTS, Search, tenant};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use trace_guest::{FUNCTIONS, TraceGuest};
use wasmtime::{Instance, Module, Store};

/// Interval of late requests during a search under memory pressure. Other requests complete
/// earlier.
const PRESSED_LATE_INTERVAL: u32 = 8;
/// Number of requests of a search under memory pressure.
const PRESSED_REQUESTS: u32 = 250;

fn worlds_and_resets() -> impl Iterator<Item = (World, SlotReset)> {
    let worlds = [World::Core, World::Http].into_iter();
    worlds.flat_map(|world| RESETS.iter().map(move |reset| (world, *reset)))
}

/// The other tests rely on this reuse: without it, no request could find a mark of another
/// function.
#[test]
fn a_memory_of_a_slot_serves_one_function_after_another() {
    for &reset in RESETS {
        let limits = TenantLimits {
            reset,
            slots: SLOTS,
            ..TenantLimits::default()
        };
        let (running, compiling) = (engine::running(&limits).unwrap(), engine::compiling());
        let compiling = compiling.unwrap();
        let modules = (0..FUNCTIONS).map(|pages| {
            let text = format!("(module (memory (export \"memory\") {pages}))");
            let code = Module::new(&compiling, wat::parse_str(text).unwrap()).unwrap();
            // SAFETY: the line above compiled the code.
            unsafe { Module::deserialize(&running, code.serialize().unwrap()) }.unwrap()
        });
        let mut users = BTreeMap::<usize, BTreeSet<usize>>::new();
        let modules: Vec<_> = modules.collect();
        for number in 0..FUNCTIONS * 3 {
            let mut store = Store::new(&running, ());
            let module = &modules[number % FUNCTIONS];
            let instance = Instance::new(&mut store, module, &[]).unwrap();
            let memory = instance.get_memory(&mut store, "memory").unwrap();
            let users = users.entry(memory.data_ptr(&store).addr()).or_default();
            users.insert(number % FUNCTIONS);
        }
        // There are fewer memories than functions, and each memory has served several functions.
        assert!(users.len() < FUNCTIONS, "{users:?}");
        assert!(users.values().all(|users| users.len() > 1), "{users:?}");
    }
}

/// A repeated call in the same instance finds the marks of the first call.
#[test]
fn a_guest_finds_marks_in_memory_data_globals_tables_and_sizes() {
    let engine = engine::compiling().unwrap();
    for guest in TraceGuest::all() {
        let binary = wat::parse_bytes(&guest.core()).unwrap().into_owned();
        let module = Module::new(&engine, binary).unwrap();
        let mut store = Store::new(&engine, ());
        // The guest is never interrupted.
        store.set_epoch_deadline(1 << 40);
        let instance = Instance::new(&mut store, &module, &[]).unwrap();
        let memory = instance.get_memory(&mut store, "memory").unwrap();
        let buffer = instance.get_typed_func::<u32, u32>(&mut store, "jiffy_buf");
        let handle = instance.get_typed_func::<(u32, u32), u32>(&mut store, "jiffy_handle");
        let (buffer, handle) = (buffer.unwrap(), handle.unwrap());
        let mut ask = || {
            let request = b"GET /xa";
            // The request has seven bytes.
            let at = buffer.call(&mut store, 7).unwrap();
            let start = usize::try_from(at).unwrap();
            memory.write(&mut store, start, request).unwrap();
            handle.call(&mut store, (at, 7)).unwrap();
            // The byte follows the status and the end of the head.
            memory.data(&store)[5]
        };
        assert_eq!(ask(), b'@', "{guest:?}");
        assert_eq!(ask(), guest.marked(), "{guest:?}");
    }
}

/// Also checks that the process retains more memory with the reset `fast`. If the jail denied the
/// page scans of this reset, no pages would be retained.
#[test]
fn no_request_finds_a_mark_of_another() {
    let resident = RESETS.iter().map(|&reset| {
        let tenant = tenant(World::Core, reset);
        let search = Search {
            world: World::Core,
            requests: 5000,
            late_interval: 100,
        };
        search.run(&tenant);
        status_kib(tenant.process.id(), "RssAnon")
    });
    let resident: Vec<_> = resident.collect();
    println!("resident KiB with {RESETS:?}: {resident:?}");
    if let [strict, fast] = resident[..] {
        // The retained pages amount to more than 400 KiB.
        assert!(fast > strict + 400, "{fast} KiB, strict {strict} KiB");
    }
}

/// Environments and handles of other requests are not visible either.
#[test]
fn no_request_of_a_component_finds_a_mark_of_another() {
    for &reset in RESETS {
        let search = Search {
            world: World::Http,
            requests: 2000,
            late_interval: 100,
        };
        search.run(&tenant(World::Http, reset));
    }
}

#[test]
fn no_request_finds_a_mark_of_another_tenant() {
    let tenants = [
        (World::Core, SlotReset::Strict),
        (World::Http, RESETS[RESETS.len() - 1]),
    ];
    let tenants = tenants.map(|(world, reset)| (world, tenant(world, reset)));
    std::thread::scope(|scope| {
        for (world, tenant) in &tenants {
            scope.spawn(|| {
                let search = Search {
                    world: *world,
                    requests: 500,
                    late_interval: 100,
                };
                search.run(tenant);
            });
        }
    });
}

#[test]
fn no_request_finds_a_mark_while_memory_is_swapped_out() {
    let swap = match Swap::on() {
        Ok(swap) => swap,
        Err(error) => {
            let reason = format!("cannot enable swap space: {error}");
            return skip(
                "no_request_finds_a_mark_while_memory_is_swapped_out",
                &reason,
            );
        }
    };
    for (world, reset) in worlds_and_resets() {
        let tenant = tenant(world, reset);
        let search = Search {
            world,
            requests: PRESSED_REQUESTS,
            late_interval: PRESSED_LATE_INTERVAL,
        };
        let before = ["pswpout", "pswpin"].map(kernel_count);
        let most = pressure::while_swapping(&tenant, || search.run(&tenant));
        let after = ["pswpout", "pswpin"].map(kernel_count);
        println!("{world:?} {reset:?}: {most} KiB at once, {before:?} {after:?}");
        assert!(most > 0, "no memory of the process was swapped out");
        assert!(after[0] > before[0] && after[1] > before[1]);
    }
    drop(swap);
}

#[test]
fn no_request_finds_a_mark_while_memory_is_compacted() {
    if !Uid::effective().is_root() || !Path::new(pressure::COMPACT).exists() {
        return skip(
            "no_request_finds_a_mark_while_memory_is_compacted",
            "compaction requires root and kernel support",
        );
    }
    let moved = kernel_count("pgmigrate_success");
    for (world, reset) in worlds_and_resets() {
        let tenant = tenant(world, reset);
        let search = Search {
            world,
            requests: PRESSED_REQUESTS,
            late_interval: PRESSED_LATE_INTERVAL,
        };
        let before = kernel_count("compact_migrate_scanned");
        pressure::while_compacting(|| search.run(&tenant));
        assert!(kernel_count("compact_migrate_scanned") > before);
    }
    // The kernel has moved pages in at least one of the rounds.
    assert!(kernel_count("pgmigrate_success") > moved);
}

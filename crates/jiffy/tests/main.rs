//! End-to-end tests: `jiffy` and its daemon with real guests.
//!
//! One program, because each test program is linked with the whole product. A file that is not
//! listed here is not compiled; the test below reports it.
//!
//! The attribute `jiffy_test` states the requirements of a test, which is skipped if one is not
//! met: the engine (`each` for one run on each engine), root, or a *lab*. A lab is a simulated host
//! and internet ([`support::lab`]).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

mod adoption;
mod attacks;
mod attacks_network;
mod bad_input;
mod build_mounts;
mod builds;
mod clones;
mod commands;
mod comparison;
mod confinement;
mod connection_record;
mod conntrack_limits;
mod daemon;
mod direct_connections;
mod directory_copy;
mod disk_limits;
mod disk_snapshots;
mod egress_proxy;
mod endurance;
mod events;
mod exits;
mod fleet;
mod full_disk;
mod functions;
mod guest;
mod guest_hooks;
mod guest_kernel;
mod gvisor_kills;
mod headers;
mod idle;
mod images;
mod incompatible_snapshots;
mod interpreter;
mod lazy_restore;
mod leaks;
mod load;
mod named_ports;
mod network;
mod network_ipv6;
mod ports;
mod private_network;
mod registry_builds;
mod remote;
mod reported_results;
mod rootless;
mod run;
mod run_daemon;
mod run_network;
mod s3_store;
mod sandboxes;
mod seccomp;
mod secrets;
mod shared_store;
mod signals;
mod site_settings;
mod slot_namespaces;
mod slots;
mod snapshot;
mod soak;
mod startup;
mod stock_templates;
mod store_command;
mod template_layers;
mod tenants;
mod top;
mod uploads;
mod veth;
mod vmm_kills;
mod vmm_process;
mod volumes;

#[test]
fn every_file_is_a_module_of_this_program() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    let modules = include_str!("main.rs");
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let is_module = path.extension().is_some_and(|e| e == "rs") || path.join("mod.rs").exists();
        if is_module && name != "main" {
            let listed = modules.contains(&format!("\nmod {name};\n"));
            assert!(listed, "tests/main.rs does not list {name}");
        }
    }
}

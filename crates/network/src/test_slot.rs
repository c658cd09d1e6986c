//! Network namespaces for tests of slots.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.
#![allow(clippy::unwrap_used)]

use crate::device;
use crate::policy::{EgressPolicy, HostReachability};
use crate::program;
use crate::slot_layout::TAP;
use jiffy_engine_api::NetworkRules;
use nix::sched::{CloneFlags, unshare};
use std::thread;

/// Runs `work` on a thread in a new network namespace with the devices of a slot. `None` if the
/// machine or user does not permit that.
pub(crate) fn in_slot<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let able = nix::unistd::Uid::effective().is_root() && program::find("nft").is_some();
    if !able {
        eprintln!("skipped: network namespaces and `nft` are needed");
        return None;
    }
    thread::scope(|scope| {
        let inside = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let _tap = device::tap(TAP).unwrap();
            work()
        };
        Some(scope.spawn(inside).join().unwrap())
    })
}

/// Returns a policy with these rules, on a host with or without IPv6.
pub(crate) fn policy(rules: &NetworkRules, ipv6: bool) -> EgressPolicy {
    let reach = HostReachability {
        ipv6,
        ..HostReachability::default()
    };
    EgressPolicy::new(rules, &reach).unwrap()
}

/// Returns the ruleset as listed by `nft`, without handles, which differ between slots.
pub(crate) fn list() -> String {
    let list = program::run("nft", &["-j", "list", "ruleset"], "").unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&list).unwrap();
    for object in value["nftables"].as_array_mut().unwrap() {
        for (_, object) in object.as_object_mut().unwrap() {
            object.as_object_mut().unwrap().remove("handle");
        }
    }
    serde_json::to_string_pretty(&value).unwrap()
}

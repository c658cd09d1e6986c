//! The guest's end of a slot whose guest has no virtual machine: a network namespace with `lo` and
//! `eth0`, which is one end of a veth pair. An engine with a network stack of its own reads the
//! configuration of its interface there.

use crate::error::NetError;
use crate::guest::{
    self, ADDRESS, ADDRESS6, GATEWAY, GATEWAY_MAC, GATEWAY6, MAC, MTU, PREFIX, PREFIX6,
};
use crate::namespace;
use crate::program;
use crate::slot_layout::{IPV6_SYSCTL_DIR, TAP, set};
use nix::unistd::Pid;
use std::path::Path;

/// The guest's interface, named as in a virtual machine.
const GUEST_INTERFACE: &str = "eth0";

/// Makes namespace `name` with an interface whose other end is in the namespace of thread `slot`.
/// Removes it again on failure.
pub(crate) fn make(name: &str, slot: Pid) -> Result<(), NetError> {
    namespace::create(name, || {
        if Path::new(IPV6_SYSCTL_DIR).exists() {
            // A namespace may start with any value; the host configures the addresses.
            for (path, value) in [
                ("all/disable_ipv6", "0"),
                ("default/accept_ra", "0"),
                ("default/autoconf", "0"),
            ] {
                set(&format!("{IPV6_SYSCTL_DIR}/conf/{path}"), value)?;
            }
        }
        program::ip(&[format!(
            "link add {GUEST_INTERFACE} address {} mtu {MTU} type veth peer name {TAP} mtu {MTU} netns {slot}",
            guest::text(MAC)
        )])
    })
}

/// Gives the interface in namespace `name` its addresses and default route; its other end is on.
pub(crate) fn configure(name: &str) -> Result<(), NetError> {
    let gateway = guest::text(GATEWAY_MAC);
    namespace::enter(name, || {
        let mut commands = vec![
            "link set lo up".to_owned(),
            format!("link set {GUEST_INTERFACE} addrgenmode none up"),
            format!("addr add {ADDRESS}/{PREFIX} dev {GUEST_INTERFACE}"),
            // The host's address needs no resolution.
            format!("neigh add {GATEWAY} lladdr {gateway} dev {GUEST_INTERFACE} nud permanent"),
            format!("route add default via {GATEWAY} dev {GUEST_INTERFACE}"),
        ];
        if Path::new(IPV6_SYSCTL_DIR).exists() {
            commands.extend([
                format!("addr add {ADDRESS6}/{PREFIX6} dev {GUEST_INTERFACE} nodad"),
                format!(
                    "neigh add {GATEWAY6} lladdr {gateway} dev {GUEST_INTERFACE} nud permanent"
                ),
                format!("route add default via {GATEWAY6} dev {GUEST_INTERFACE}"),
            ]);
        }
        program::ip(&commands)
    })
}

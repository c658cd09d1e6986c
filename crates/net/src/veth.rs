//! The guest's end of a slot whose guest has no virtual machine: a network namespace with `lo` and `eth0`, which is one end of a veth pair.
//! What is in it are the words by which an engine with a network stack of its own learns what to configure there.

use crate::error::NetError;
use crate::guest::{
    self, ADDRESS, ADDRESS6, GATEWAY, GATEWAY_MAC, GATEWAY6, MAC, MTU, PREFIX, PREFIX6,
};
use crate::namespace;
use crate::program;
use crate::slot::{KNOWS_V6, TAP, set};
use nix::unistd::Pid;
use std::path::Path;

/// The guest's card, as in a virtual machine.
const CARD: &str = "eth0";

/// Makes namespace `name` with a card whose other end is in the namespace of thread `slot`. If that fails there is none.
pub(crate) fn make(name: &str, slot: Pid) -> Result<(), NetError> {
    namespace::create(name, || {
        if Path::new(KNOWS_V6).exists() {
            // A namespace may begin with anything; the host says what is where.
            for (path, value) in [
                ("all/disable_ipv6", "0"),
                ("default/accept_ra", "0"),
                ("default/autoconf", "0"),
            ] {
                set(&format!("{KNOWS_V6}/conf/{path}"), value)?;
            }
        }
        program::ip(&[format!(
            "link add {CARD} address {} mtu {MTU} type veth peer name {TAP} mtu {MTU} netns {slot}",
            guest::text(MAC)
        )])
    })
}

/// Gives the card in namespace `name` its addresses and the way out; its other end is on.
pub(crate) fn configure(name: &str) -> Result<(), NetError> {
    let gateway = guest::text(GATEWAY_MAC);
    namespace::enter(name, || {
        let mut commands = vec![
            "link set lo up".to_owned(),
            format!("link set {CARD} addrgenmode none up"),
            format!("addr add {ADDRESS}/{PREFIX} dev {CARD}"),
            // Nobody has to ask the host where it is.
            format!("neigh add {GATEWAY} lladdr {gateway} dev {CARD} nud permanent"),
            format!("route add default via {GATEWAY} dev {CARD}"),
        ];
        if Path::new(KNOWS_V6).exists() {
            commands.extend([
                format!("addr add {ADDRESS6}/{PREFIX6} dev {CARD} nodad"),
                format!("neigh add {GATEWAY6} lladdr {gateway} dev {CARD} nud permanent"),
                format!("route add default via {GATEWAY6} dev {CARD}"),
            ]);
        }
        program::ip(&commands)
    })
}

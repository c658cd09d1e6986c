//! `GET /guest/{id}/ports`: TCP ports of a guest on which a process listens, from the tables of the
//! guest's kernel.

use crate::Console;
use crate::files::{DEFAULT_USER, limited, open};
use crate::refusal::Refusal;
use axum::extract::{Path, State};
use axum::{Extension, Json};
use bytes::Bytes;
use jiffy_api::Caller;
use jiffy_proto::agent::ENVD_PORT;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Maximum length of a table in bytes.
const MAX_TABLE: usize = 1024 * 1024;
/// Maximum number of ports in a response.
const MAX_PORTS: usize = 1000;
/// State of a listening socket in the tables (`TCP_LISTEN`).
const LISTEN: &str = "0A";

/// A listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Listener {
    port: u16,
    address: IpAddr,
}

/// Returns the listening ports of a sandbox.
pub(crate) async fn list(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<serde_json::Value>, Refusal> {
    let guest = open(&console.app, &caller, &id)?;
    let mut ports = BTreeSet::new();
    // A guest without IPv6 has no second table.
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let read = async {
            match guest
                .client
                .read(table, Some(DEFAULT_USER), MAX_TABLE)
                .await
            {
                Err(e) if e.is_not_found() => Ok(Bytes::new()),
                read => read,
            }
        };
        let text = limited(read).await?;
        ports.extend(listeners(&String::from_utf8_lossy(&text)));
    }
    // The agent is not a server of the user.
    ports.retain(|listener| u32::from(listener.port) != ENVD_PORT);
    let ports: Vec<Listener> = ports.into_iter().take(MAX_PORTS).collect();
    Ok(Json(json!({ "ports": ports })))
}

/// Returns the listening sockets in a table of the kernel. Lines with another form are skipped.
fn listeners(table: &str) -> impl Iterator<Item = Listener> {
    table.lines().filter_map(|line| {
        // Columns of a line: number of the socket, local address, remote address, state.
        let mut columns = line.split_whitespace().skip(1);
        let (local, _, state) = (columns.next()?, columns.next()?, columns.next()?);
        let (address, port) = local.split_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        let address = parse_address(address)?;
        (state == LISTEN).then_some(Listener { port, address })
    })
}

/// Parses an address: words of 32 bits in the byte order of the guest, which is little-endian.
fn parse_address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let digits = text.get(at * 8..at * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_le_bytes())
    };
    match text.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let mut bytes = [0; 16];
            for (at, bytes) in bytes.chunks_exact_mut(4).enumerate() {
                bytes.copy_from_slice(&word(at)?);
            }
            Some(IpAddr::V6(Ipv6Addr::from(bytes)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_are_read_from_the_tables_of_the_kernel() {
        // Lines 0 and 2 are listening sockets at port 8080 (0x1f90) of 127.0.0.1 and at port 80
        // (0x50) of ::1. The socket in line 1 is connected, and the other lines are invalid.
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n\
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 0\n\
            1: 0100007F:A000 0100007F:1F90 01 00000000:00000000 00:00000000 0\n\
            2: 00000000000000000000000001000000:0050 0000:0000 0A 0\n\
            3: 0100007F:XYZ0 00000000:0000 0A\n4: 01:0050 0:0 0A\nnonsense \u{202e}";
        let found: Vec<String> = listeners(table)
            .map(|l| format!("{} {}", l.address, l.port))
            .collect();
        assert_eq!(found, ["127.0.0.1 8080", "::1 80"]);
    }
}

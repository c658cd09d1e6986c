//! IP forwarding of the host: for sandboxes, and, if it was off before, for no others.

use crate::NetError;
use crate::claim::RangeClaims;
use crate::device;
use crate::program;
use std::fs;
use std::path::{Path, PathBuf};

/// A version of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IpVersion {
    V4,
    V6,
}

const FORWARD_V4: &str = "/proc/sys/net/ipv4/ip_forward";
const CONF_V6: &str = "/proc/sys/net/ipv6/conf";
/// Enables IPv6 forwarding of one device and changes nothing else about it (Linux 6.17).
const FORCE: &str = "force_forwarding";

impl IpVersion {
    fn name(self) -> &'static str {
        match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        }
    }

    /// Table that keeps a host that did not forward before from forwarding for others.
    fn table(self) -> &'static str {
        match self {
            Self::V4 => "jiffy_no_router",
            Self::V6 => "jiffy_no_router6",
        }
    }

    /// File with the former values of the settings that this changed: a path and the value on each
    /// line.
    fn note(self, claims: &RangeClaims) -> PathBuf {
        claims.file(match self {
            Self::V4 => "forwarding",
            Self::V6 => "forwarding6",
        })
    }

    /// That table, if it exists.
    fn listed(self) -> Option<String> {
        program::run("nft", &["list", "table", "inet", self.table()], "").ok()
    }

    fn is_on(self) -> Result<bool, NetError> {
        let path = match self {
            Self::V4 => FORWARD_V4.to_owned(),
            Self::V6 => format!("{CONF_V6}/all/forwarding"),
        };
        let value = fs::read_to_string(&path).map_err(NetError::host(format!("reading {path}")))?;
        Ok(value.trim() != "0")
    }

    /// Settings and their values. The host's default route is through `uplink`.
    fn settings(self, uplink: &str, devices: &[String]) -> Vec<(String, &'static str)> {
        let of = |device: &str, name: &str| format!("{CONF_V6}/{device}/{name}");
        if self == Self::V4 {
            return vec![(FORWARD_V4.to_owned(), "1")];
        }
        if Path::new(&of(uplink, FORCE)).exists() {
            return vec![(of(uplink, FORCE), "1")];
        }
        // A router ignores router advertisements unless it is configured to accept them, and would
        // lose the default route that it has learned.
        let learning = devices.iter().map(|device| of(device, "accept_ra"));
        let learning =
            learning.filter(|path| fs::read_to_string(path).is_ok_and(|value| value.trim() == "1"));
        let mut settings: Vec<_> = learning.map(|path| (path, "2")).collect();
        settings.push((of("all", "forwarding"), "1"));
        settings
    }
}

/// Device of the host's route into the IPv6 internet, if there is one.
pub(crate) fn uplink6() -> Option<String> {
    let off = fs::read_to_string(format!("{CONF_V6}/all/disable_ipv6")).ok()?;
    if off.trim() != "0" {
        return None;
    }
    let routes = program::run("ip", &["-6", "route", "show", "default"], "").ok()?;
    let route = routes
        .lines()
        .find(|line| line.starts_with("default via "))?;
    let device = route.split_whitespace().skip_while(|w| *w != "dev").nth(1);
    device.map(str::to_owned)
}

/// Enables IPv6 forwarding of a slot's device in the host, if that is a setting of devices.
pub(crate) fn let_forward6(device: &str) -> Result<(), NetError> {
    let path = format!("{CONF_V6}/{device}/{FORCE}");
    if !Path::new(&path).exists() {
        return Ok(());
    }
    fs::write(&path, "1").map_err(NetError::host(format!("setting {path}")))
}

fn devices() -> Result<Vec<String>, NetError> {
    let mut names = device::names().map_err(NetError::host("listing network devices"))?;
    // Devices of slots that are gone may still be in the list.
    names.retain(|name| !name.starts_with("jf"));
    Ok(names)
}

/// Enables forwarding. If it was off, the present devices still do not forward from one to another.
pub(crate) fn start(
    claims: &RangeClaims,
    version: IpVersion,
    uplink: &str,
) -> Result<(), NetError> {
    let note = version.note(claims);
    // A file without the table that was made with it is stale.
    let ours = note.exists() && version.listed().is_some();
    if version.is_on()? && !ours {
        return Ok(());
    }
    let devices = devices()?;
    let settings = version.settings(uplink, &devices);
    // An earlier daemon's table and file hold the original values.
    if !ours {
        keep_others_from_it(version, &devices)?;
        let mut before = String::new();
        for (path, _) in &settings {
            let value =
                fs::read_to_string(path).map_err(NetError::host(format!("reading {path}")))?;
            before += &format!("{path} {}\n", value.trim());
        }
        fs::write(&note, before).map_err(NetError::host(format!("writing {}", note.display())))?;
    }
    for (path, value) in &settings {
        fs::write(path, value).map_err(NetError::host(format!("setting {path}")))?;
        tracing::info!("{path} is {value} from now on, for sandboxes only");
    }
    Ok(())
}

fn keep_others_from_it(version: IpVersion, devices: &[String]) -> Result<(), NetError> {
    let names: Vec<String> = devices
        .iter()
        .filter(|name| !name.contains('"'))
        .map(|name| format!("\"{name}\""))
        .collect();
    let (names, table, protocol) = (names.join(", "), version.table(), version.name());
    program::nft(&format!(
        r#"table inet {table}
delete table inet {table}
table inet {table} {{
  chain passing {{
    type filter hook forward priority filter; policy accept;
    meta nfproto {protocol} iifname {{ {names} }} oifname {{ {names} }} drop
  }}
}}
"#
    ))
}

/// Restores the former values if this changed them and no other program has come to rely on
/// forwarding: containers bring devices of their own.
pub(crate) fn stop(claims: &RangeClaims, version: IpVersion) {
    let note = version.note(claims);
    let (Ok(before), Some(known)) = (fs::read_to_string(&note), version.listed()) else {
        return;
    };
    let others = devices().is_ok_and(|devices| {
        devices
            .iter()
            .any(|name| !known.contains(&format!("\"{name}\"")))
    });
    if others {
        // The table stays: without it the host would forward for everyone.
        tracing::info!("forwarding stays on: devices came that may need it");
        return;
    }
    // In reverse order: a host that does not forward accepts router advertisements again.
    for line in before.lines().rev() {
        let Some((path, value)) = line.split_once(' ') else {
            continue;
        };
        if !path.starts_with("/proc/sys/net/") {
            continue;
        }
        if let Err(e) = fs::write(path, value) {
            tracing::warn!("cannot set {path} back to {value}: {e}");
            return;
        }
    }
    let table = version.table();
    let _ = program::nft(&format!("table inet {table}\ndelete table inet {table}\n"));
    let _ = fs::remove_file(note);
}

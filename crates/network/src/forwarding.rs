//! IP forwarding of the host, which sandboxes need. If forwarding was off before, a table prevents
//! the host from forwarding between its other devices.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest.

use crate::NetError;
use crate::claim::RangeClaims;
use crate::device;
use crate::program;
use std::fs;
use std::path::{Path, PathBuf};

/// IP version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IpVersion {
    V4,
    V6,
}

/// Setting that enables IPv4 forwarding of all devices.
const FORWARD_V4: &str = "/proc/sys/net/ipv4/ip_forward";
/// Directory with the IPv6 settings of devices.
const CONF_V6: &str = "/proc/sys/net/ipv6/conf";
/// Setting that enables IPv6 forwarding of a single device without other effects (Linux 6.17).
const FORCE: &str = "force_forwarding";

impl IpVersion {
    /// Returns the name of the version in the language of `nft`.
    fn name(self) -> &'static str {
        match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        }
    }

    /// Returns the name of the table that prevents forwarding between other devices of the host.
    fn table(self) -> &'static str {
        match self {
            Self::V4 => "jiffy_no_router",
            Self::V6 => "jiffy_no_router6",
        }
    }

    /// Returns the path of the file with the original values of the changed settings. Each line has
    /// a path and a value.
    fn saved_values_path(self, claims: &RangeClaims) -> PathBuf {
        claims.file(match self {
            Self::V4 => "forwarding",
            Self::V6 => "forwarding6",
        })
    }

    /// Returns the content of [`Self::table`] as listed by `nft`. `None` if the table does not
    /// exist.
    fn listed_table(self) -> Option<String> {
        program::run("nft", &["list", "table", "inet", self.table()], "").ok()
    }

    /// Returns whether the kernel of the host forwards packets of this IP version.
    fn is_on(self) -> Result<bool, NetError> {
        let path = match self {
            Self::V4 => FORWARD_V4.to_owned(),
            Self::V6 => format!("{CONF_V6}/all/forwarding"),
        };
        let value = fs::read_to_string(&path).map_err(NetError::host(format!("reading {path}")))?;
        Ok(value.trim() != "0")
    }

    /// Returns the required settings with their values. `uplink` is the device of the host's
    /// default route, and `devices` lists the host's devices. Both matter only for IPv6.
    fn settings(self, uplink: &str, devices: &[String]) -> Vec<(String, &'static str)> {
        let of = |device: &str, name: &str| format!("{CONF_V6}/{device}/{name}");
        if self == Self::V4 {
            return vec![(FORWARD_V4.to_owned(), "1")];
        }
        if Path::new(&of(uplink, FORCE)).exists() {
            return vec![(of(uplink, FORCE), "1")];
        }
        // A router ignores router advertisements unless it is configured to accept them, and would
        // lose its learned default route.
        let learning = devices.iter().map(|device| of(device, "accept_ra"));
        let learning =
            learning.filter(|path| fs::read_to_string(path).is_ok_and(|value| value.trim() == "1"));
        let mut settings: Vec<_> = learning.map(|path| (path, "2")).collect();
        settings.push((of("all", "forwarding"), "1"));
        settings
    }
}

/// Returns the device of the host's default IPv6 route, if the host has one.
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

/// Enables IPv6 forwarding of a slot's device in the host, if the kernel has a setting per device.
pub(crate) fn enable_forwarding6(device: &str) -> Result<(), NetError> {
    let path = format!("{CONF_V6}/{device}/{FORCE}");
    if !Path::new(&path).exists() {
        return Ok(());
    }
    fs::write(&path, "1").map_err(NetError::host(format!("setting {path}")))
}

/// Returns the names of the host's devices, without the devices of slots.
fn devices() -> Result<Vec<String>, NetError> {
    let mut names = device::names().map_err(NetError::host("listing network devices"))?;
    // The list may still contain devices of removed slots.
    names.retain(|name| !name.starts_with("jf"));
    Ok(names)
}

/// Enables forwarding. If it was off, the host's existing devices still do not forward to each
/// other.
pub(crate) fn start(
    claims: &RangeClaims,
    version: IpVersion,
    uplink: &str,
) -> Result<(), NetError> {
    let saved_values_path = version.saved_values_path(claims);
    // A file without the table that was created with it is stale.
    let is_own = saved_values_path.exists() && version.listed_table().is_some();
    if version.is_on()? && !is_own {
        return Ok(());
    }
    let devices = devices()?;
    let settings = version.settings(uplink, &devices);
    // The table and the file of an earlier daemon hold the original devices and values. Reading
    // them again would record this program's own changes.
    if !is_own {
        // Block other devices and save the original values before changing any setting. After a
        // crash, a later daemon can then restore them.
        block_other_devices(version, &devices)?;
        let mut before = String::new();
        for (path, _) in &settings {
            let value =
                fs::read_to_string(path).map_err(NetError::host(format!("reading {path}")))?;
            before += &format!("{path} {}\n", value.trim());
        }
        fs::write(&saved_values_path, before).map_err(NetError::host(format!(
            "writing {}",
            saved_values_path.display()
        )))?;
    }
    for (path, value) in &settings {
        fs::write(path, value).map_err(NetError::host(format!("setting {path}")))?;
        tracing::info!(path, value, "enabled forwarding for sandboxes");
    }
    Ok(())
}

/// Drops packets that the host would forward between its own devices, after forwarding was enabled
/// for sandboxes.
fn block_other_devices(version: IpVersion, devices: &[String]) -> Result<(), NetError> {
    let names: Vec<String> = devices
        .iter()
        // A quotation mark would end the string in the script.
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

/// Restores the original values if this program changed them and no new devices exist. New devices,
/// for example of containers, may rely on forwarding.
pub(crate) fn stop(claims: &RangeClaims, version: IpVersion) {
    let saved_values_path = version.saved_values_path(claims);
    let (Ok(before), Some(table)) = (
        fs::read_to_string(&saved_values_path),
        version.listed_table(),
    ) else {
        return;
    };
    let has_new_devices = devices().is_ok_and(|devices| {
        devices
            .iter()
            .any(|name| !table.contains(&format!("\"{name}\"")))
    });
    if has_new_devices {
        // Leave the table in place: without it, the host would forward for all devices. The saved
        // values remain as well, so that a later call can restore them.
        tracing::info!("left forwarding enabled: new network devices may need it");
        return;
    }
    // The settings are restored in reverse order: forwarding is disabled before `accept_ra` is
    // restored.
    for line in before.lines().rev() {
        let Some((path, value)) = line.split_once(' ') else {
            continue;
        };
        // Write only network settings, even if the file contains other paths.
        if !path.starts_with("/proc/sys/net/") {
            continue;
        }
        if let Err(e) = fs::write(path, value) {
            tracing::warn!(path, value, error = %e, "cannot restore a setting");
            return;
        }
    }
    let table = version.table();
    // Ignore errors: a table without its file has no effect once forwarding is off, and a file
    // without its table is ignored.
    let _ = program::nft(&format!("table inet {table}\ndelete table inet {table}\n"));
    let _ = fs::remove_file(saved_values_path);
}

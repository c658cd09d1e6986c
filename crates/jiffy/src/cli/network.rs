//! Options for the network of sandboxes.

use clap::{Args, ValueEnum};
use jiffy_daemon::{FeatureMode, NetworkOptions};
use jiffy_network::{IpNet, Ipv4Net};
use std::net::IpAddr;

/// Use of a feature that some hosts lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum FeatureSwitch {
    /// Enabled if the host supports it
    #[default]
    Auto,
    /// Required: fail without it
    On,
    /// Disabled
    // Accepts `--network none`, as `docker run` does.
    #[value(alias = "none")]
    Off,
}

impl From<FeatureSwitch> for FeatureMode {
    fn from(switch: FeatureSwitch) -> Self {
        match switch {
            FeatureSwitch::Auto => Self::Auto,
            FeatureSwitch::On => Self::On,
            FeatureSwitch::Off => Self::Off,
        }
    }
}

/// Options of `jiffy serve` for the network of sandboxes.
#[derive(Debug, Clone, Default, Args)]
pub struct NetworkArgs {
    /// Network access of sandboxes. Needs `nft`, `ip`, /dev/net/tun, and root or `pasta`
    #[arg(
        long,
        value_enum,
        default_value_t,
        env = "JIFFY_NETWORK",
        value_name = "WHEN"
    )]
    pub network: FeatureSwitch,
    /// Private address or CIDR range that sandboxes may access. Can be repeated
    #[arg(
        long,
        env = "JIFFY_ALLOW_PRIVATE",
        value_name = "CIDR",
        value_delimiter = ',',
        value_parser = cidr
    )]
    pub allow_private: Vec<IpNet>,
    /// Address range between this host and its sandboxes, two addresses for each sandbox [default:
    /// a free part of 198.18.0.0/15]
    #[arg(long, value_name = "CIDR", value_parser = range)]
    pub network_range: Option<Ipv4Net>,
    /// Maximum number of sandboxes with a network
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub network_slots: u32,
    /// Maximum number of concurrent connections of a sandbox
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pub connections: u32,
    /// Number of entries in the connection table of this host at which new connections of sandboxes
    /// are throttled [default: three quarters of net.netfilter.nf_conntrack_max]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(64..))]
    pub connections_total: Option<u32>,
}

/// Parses an address or a range. An address is a range of one address.
fn cidr(text: &str) -> Result<IpNet, String> {
    let net = text.parse::<IpNet>().ok();
    let net = net.or_else(|| text.parse().ok().map(|ip: IpAddr| ip.into()));
    net.map(|net| net.trunc()).ok_or_else(|| {
        format!("`{text}` is neither an IP address nor a CIDR range such as 10.1.0.0/16")
    })
}

/// Parses an IPv4 range.
fn range(text: &str) -> Result<Ipv4Net, String> {
    match cidr(text)? {
        // Each sandbox needs two addresses.
        IpNet::V4(net) if net.prefix_len() > 31 => Err(format!(
            "`{text}` is a single address: use a range such as 10.1.0.0/16"
        )),
        IpNet::V4(net) => Ok(net),
        IpNet::V6(_) => Err(format!("`{text}` is not an IPv4 range such as 10.1.0.0/16")),
    }
}

impl NetworkArgs {
    /// Returns the options of the daemon.
    pub fn options(&self) -> NetworkOptions {
        NetworkOptions {
            mode: self.network.into(),
            allow_private: self.allow_private.clone(),
            range: self.network_range,
            slots: self.network_slots,
            connections: self.connections,
            connections_total: self.connections_total,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{cidr, range};

    #[test]
    fn private_ranges_are_named_by_address_or_cidr() {
        assert_eq!(
            cidr("10.1.2.3").map(|n| n.to_string()),
            Ok("10.1.2.3/32".into())
        );
        assert_eq!(
            cidr("10.1.2.3/16").map(|n| n.to_string()),
            Ok("10.1.0.0/16".into())
        );
        assert_eq!(
            cidr("fd00::1/8").map(|n| n.to_string()),
            Ok("fd00::/8".into())
        );
        for bad in ["", "10.1", "10.0.0.0/33", "fd00::/129", "a.example"] {
            assert!(cidr(bad).is_err(), "{bad}");
        }
        assert!(range("10.1.2.2/31").is_ok());
        for bad in ["10.1.2.3", "10.1.2.3/32", "fd00::/8"] {
            assert!(range(bad).is_err(), "{bad}");
        }
    }
}

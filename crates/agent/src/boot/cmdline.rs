//! Parameters of the agent on the kernel's command line.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Values of `jiffy.net=<ip>/<prefix>,<gateway>`, of the IPv6 equivalent `jiffy.net6=`, and of
/// `jiffy.dns=<ip>[,<ip>...]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNetConfig {
    /// Address of `eth0`.
    pub address: Ipv4Addr,
    /// Length of the network part, 0 to 32.
    pub prefix: u8,
    /// Default gateway.
    pub gateway: Ipv4Addr,
    /// Name servers. Defaults to public servers.
    pub dns: Vec<Ipv4Addr>,
    /// IPv6 configuration. `None` without `jiffy.net6`.
    pub ipv6: Option<Ipv6Config>,
}

/// Value of `jiffy.net6`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Config {
    /// Address of `eth0`.
    pub address: Ipv6Addr,
    /// Length of the network part, 0 to 128.
    pub prefix: u8,
    /// Default gateway.
    pub gateway: Ipv6Addr,
}

impl Ipv6Config {
    /// Parses `ADDRESS/PREFIX,GATEWAY`.
    fn parse(word: &str) -> Option<Self> {
        let (network, gateway) = word.split_once(',')?;
        let (address, prefix) = network.split_once('/')?;
        Some(Self {
            address: address.parse().ok()?,
            prefix: prefix.parse().ok().filter(|p| *p <= 128)?,
            gateway: gateway.parse().ok()?,
        })
    }
}

/// Parses comma-separated addresses. Invalid addresses are skipped.
pub fn addresses(list: &str) -> Vec<Ipv4Addr> {
    list.split(',').filter_map(|ip| ip.parse().ok()).collect()
}

impl GuestNetConfig {
    /// Parses the parameters. Returns `None` without a well-formed `jiffy.net`.
    pub fn parse(cmdline: &str) -> Option<Self> {
        let word = |name: &str| {
            cmdline
                .split_whitespace()
                .find_map(|w| w.strip_prefix(name))
        };
        let (network, gateway) = word("jiffy.net=")?.split_once(',')?;
        let (address, prefix) = network.split_once('/')?;
        let dns = word("jiffy.dns=").map_or_else(
            || vec![Ipv4Addr::new(1, 1, 1, 1), Ipv4Addr::new(8, 8, 8, 8)],
            addresses,
        );
        Some(Self {
            address: address.parse().ok()?,
            prefix: prefix.parse().ok().filter(|p| *p <= 32)?,
            gateway: gateway.parse().ok()?,
            dns,
            ipv6: word("jiffy.net6=").and_then(Ipv6Config::parse),
        })
    }

    /// Returns the network mask as an address.
    pub fn netmask(&self) -> Ipv4Addr {
        // For the prefix 0, the shift of 32 bits is invalid, and the mask is 0.
        Ipv4Addr::from(
            u32::MAX
                .checked_shl(32 - u32::from(self.prefix))
                .unwrap_or(0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_parameter_is_parsed_or_ignored() {
        let net = GuestNetConfig::parse("quiet jiffy.net=10.0.0.2/30,10.0.0.1 panic=-1").unwrap();
        assert_eq!(net.address, Ipv4Addr::new(10, 0, 0, 2));
        assert_eq!(net.netmask(), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(net.gateway, Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(net.dns.len(), 2);
        assert_eq!(net.ipv6, None);
        let both = "jiffy.net6=fd00::2/126,fd00::1 jiffy.net=10.0.0.2/30,10.0.0.1";
        let six = GuestNetConfig::parse(both).unwrap().ipv6.unwrap();
        let (address, gateway) = ("fd00::2".parse(), "fd00::1".parse());
        assert_eq!((Ok(six.address), Ok(six.gateway)), (address, gateway));
        assert_eq!(six.prefix, 126);
        for bad in [
            "",
            "jiffy.net=",
            "jiffy.net=10.0.0.2/33,10.0.0.1",
            "jiffy.net=x/24,y",
        ] {
            assert_eq!(GuestNetConfig::parse(bad), None);
        }
    }
}

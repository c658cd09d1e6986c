//! Logs the certificate authorities and the proxy of all sandboxes at the start of the daemon.

use jiffy_network::IpNet;
use jiffy_proto::agent::SiteSettings;
use std::net::IpAddr;

/// Logs the settings. Warns if the proxy has a private address that sandboxes may not access.
pub fn log_settings(site: &SiteSettings, granted: &[IpNet]) {
    if !site.authorities.is_empty() {
        let count = site.authorities.len();
        tracing::info!(count, "added certificate authorities to sandboxes");
    }
    let Some(proxy) = &site.proxy else {
        return;
    };
    let url = proxy.public_url();
    tracing::info!(%url, "set the proxy of sandboxes");
    if let Some(address) =
        private_address(&url).filter(|a| !granted.iter().any(|net| net.contains(a)))
    {
        tracing::warn!(
            %address,
            "sandboxes cannot access the private address of the proxy: add it to --allow-private"
        );
    }
}

/// Returns the address of the host in a URL. `None` if the host is a name or not a private address.
fn private_address(url: &str) -> Option<IpAddr> {
    let host = url.split_once("://")?.1;
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.0,
        None => host.split(':').next()?,
    };
    let address: IpAddr = bare.parse().ok()?;
    let is_private = match address {
        IpAddr::V4(ip) => ip.is_private() || ip.is_loopback() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unique_local() || ip.is_loopback(),
    };
    is_private.then_some(address)
}

#[cfg(test)]
mod tests {
    use super::private_address;

    #[test]
    fn private_proxy_addresses_are_found() {
        for url in [
            "http://10.1.2.3:3128",
            "http://[fd00::1]:1",
            "https://192.168.0.1",
        ] {
            assert!(private_address(url).is_some(), "{url}");
        }
        for url in [
            "http://9.9.9.9:3128",
            "http://proxy.corp:1",
            "http://[2a00::1]",
        ] {
            assert!(private_address(url).is_none(), "{url}");
        }
    }
}

//! Validation of network rules in requests, and their conversion to the form of the network
//! component.

use crate::error::ApiError;
use jiffy_api_types::{
    HeaderRule, MAX_EGRESS_MBPS, MAX_NETWORK_ENTRIES, NetworkBody, NetworkSettings, NetworkUpdate,
    TemplateNetwork,
};
use jiffy_proto::agent::ENVD_PORT;
use std::net::IpAddr;

/// Maximum length of a host name in bytes.
const MAX_NAME: usize = 253;

/// Checks a change of some network rules (`PATCH /sandboxes/{id}/network`). Returns a function that
/// applies the change to the settings of a sandbox. Absent fields are retained. The caller changes
/// the rules for headers and the egress proxy itself.
pub(crate) fn check_change(
    update: NetworkUpdate,
) -> Result<impl FnOnce(&mut NetworkSettings) + Send + 'static, ApiError> {
    let has_allow_out = update.allow_out.is_some();
    let has_deny_out = update.deny_out.is_some();
    let has_dns_servers = update.dns_servers.is_some();
    let restrict_traffic = update.allow_public_traffic.map(|allowed| !allowed);
    let mask = update.mask_request_host.clone();
    let has_https_ports = update.https_ports.is_some();
    let internet = update.allow_internet_access;
    let new = checked(update)?;
    Ok(move |network: &mut NetworkSettings| {
        if has_allow_out {
            network.allow_out = new.allow_out;
        }
        if has_deny_out {
            network.deny_out = new.deny_out;
        }
        if has_dns_servers {
            network.dns_servers = new.dns_servers;
        }
        if mask.is_some() {
            network.mask_request_host = new.mask_request_host;
        }
        if has_https_ports {
            network.https_ports = new.https_ports;
        }
        network.egress_mbps = new.egress_mbps.or(network.egress_mbps);
        network.allow_internet_access = internet.or(network.allow_internet_access);
        network.restrict_traffic = restrict_traffic.unwrap_or(network.restrict_traffic);
    })
}

/// Checks rules that replace all network rules (`PUT /sandboxes/{id}/network`). Returns a function
/// that applies them and the checked rules for headers to the settings of a sandbox. It removes the
/// egress proxy. The caller sets the new one.
pub(crate) fn check_update(
    update: NetworkUpdate,
) -> Result<impl FnOnce(&mut NetworkSettings, Vec<HeaderRule>) + Send + 'static, ApiError> {
    let restrict_traffic = update.allow_public_traffic.map(|allowed| !allowed);
    // An empty name removes the mask, and an absent name retains it. The checked rules have `None`
    // in both cases, so that `mask` is needed to distinguish them.
    let mask = update.mask_request_host.clone();
    let has_https_ports = update.https_ports.is_some();
    let new = checked(update)?;
    // Absent egress rules are cleared. An absent `maskRequestHost`, `allowPublicTraffic` or
    // `httpsPorts` retains the previous setting.
    Ok(
        move |network: &mut NetworkSettings, rules: Vec<HeaderRule>| {
            let before = std::mem::take(network);
            *network = NetworkSettings {
                restrict_traffic: restrict_traffic.unwrap_or(before.restrict_traffic),
                mask_request_host: match mask {
                    Some(_) => new.mask_request_host,
                    None => before.mask_request_host,
                },
                https_ports: if has_https_ports {
                    new.https_ports
                } else {
                    before.https_ports
                },
                rules,
                join: before.join,
                address: before.address,
                ..new
            };
        },
    )
}

/// Validates the rules of an update.
fn checked(update: NetworkUpdate) -> Result<NetworkSettings, ApiError> {
    let body = NetworkBody {
        allow_out: update.allow_out,
        deny_out: update.deny_out,
        dns_servers: update.dns_servers,
        egress_mbps: update.egress_mbps,
        egress_proxy: update.egress_proxy,
        rules: update.rules,
        // A sandbox joins a network when it is created.
        join: None,
        https_ports: update.https_ports,
        allow_public_traffic: update.allow_public_traffic,
        // `check_rules` rejects an empty host name.
        mask_request_host: update.mask_request_host.filter(|host| !host.is_empty()),
    };
    check_rules(Some(body), update.allow_internet_access)
}

/// Adds the rules of a template to the rules of a create. The lists of the create take precedence,
/// but the create cannot allow the internet access that the template denies: older clients of E2B
/// always send `allow_internet_access: true`.
pub(crate) fn with_template(
    network: Option<NetworkBody>,
    allow_internet_access: Option<bool>,
    template: &TemplateNetwork,
) -> (Option<NetworkBody>, Option<bool>) {
    if template.is_empty() {
        return (network, allow_internet_access);
    }
    let of_create = network.unwrap_or_default();
    let list = |of_create: Option<Vec<String>>, of_template: &[String]| {
        let of_create = of_create.filter(|entries| !entries.is_empty());
        of_create.or_else(|| Some(of_template.to_vec()))
    };
    let network = NetworkBody {
        allow_out: list(of_create.allow_out, &template.allow_out),
        deny_out: list(of_create.deny_out, &template.deny_out),
        dns_servers: list(of_create.dns_servers, &template.dns),
        ..of_create
    };
    let denied = template.allow_internet_access.filter(|allowed| !allowed);
    let allowed = denied.or(allow_internet_access);
    (Some(network), allowed.or(template.allow_internet_access))
}

/// Validates the network rules of a template.
pub(crate) fn check_template(template: &TemplateNetwork) -> Result<(), ApiError> {
    let (network, allowed) = with_template(None, None, template);
    check_rules(network, allowed).map(drop)
}

/// Validates network rules.
pub(crate) fn check_rules(
    network: Option<NetworkBody>,
    allow_internet_access: Option<bool>,
) -> Result<NetworkSettings, ApiError> {
    let network = network.unwrap_or_default();
    let https_ports = https_ports(network.https_ports)?;
    let allow_out = list("allowOut", network.allow_out, |entry| {
        is_cidr(entry) || is_name_with_port(entry)
    })?;
    let deny_out = list("denyOut", network.deny_out, is_cidr)?;
    let dns_servers = list("dnsServers", network.dns_servers, is_address)?;
    if network
        .egress_mbps
        .is_some_and(|mbps| !(1..=MAX_EGRESS_MBPS).contains(&mbps))
    {
        return Err(ApiError::invalid(format!(
            "`egressMbps` must be 1 to {MAX_EGRESS_MBPS}"
        )));
    }
    if let Some(host) = &network.mask_request_host
        && !is_host(host)
    {
        return Err(ApiError::invalid(
            "`network.maskRequestHost` must be a host name, with `${PORT}` for the port",
        ));
    }
    if let Some(name) = &network.join
        && !is_network_name(name)
    {
        return Err(ApiError::invalid(
            "`network.join` must be the name of a private network: 1 to 63 lower-case letters, \
             digits and `-`, not starting or ending with `-`",
        ));
    }
    Ok(NetworkSettings {
        allow_internet_access,
        allow_out,
        deny_out,
        dns_servers,
        egress_mbps: network.egress_mbps,
        restrict_traffic: network.allow_public_traffic == Some(false),
        mask_request_host: network.mask_request_host,
        https_ports,
        // The callers check rules for headers and the egress proxy themselves, and add them.
        rules: Vec::new(),
        egress_proxy: None,
        join: network.join,
        // Assigned when the sandbox is created.
        address: None,
    })
}

/// Checks the number of entries, and each entry with `good`.
fn list(
    name: &str,
    entries: Option<Vec<String>>,
    good: fn(&str) -> bool,
) -> Result<Vec<String>, ApiError> {
    let entries = entries.unwrap_or_default();
    if entries.len() > MAX_NETWORK_ENTRIES {
        return Err(ApiError::invalid(format!(
            "`{name}` has more than {MAX_NETWORK_ENTRIES} entries"
        )));
    }
    if let Some(bad) = entries.iter().find(|e| !good(e)) {
        let what = match name {
            "allowOut" => "an address, a CIDR, a name, `*.name` or one of the latter with `:port`",
            "denyOut" => "an address or a CIDR (names can only be allowed)",
            _ => "an address",
        };
        return Err(ApiError::invalid(format!(
            "`{name}`: `{}` is not {what}",
            crate::lookup::short(bad)
        )));
    }
    Ok(entries)
}

/// Checks the ports whose servers use TLS. Returns them in ascending order.
fn https_ports(ports: Option<Vec<u16>>) -> Result<Vec<u16>, ApiError> {
    let mut ports = ports.unwrap_or_default();
    if ports.len() > MAX_NETWORK_ENTRIES {
        return Err(ApiError::invalid(format!(
            "`httpsPorts` has more than {MAX_NETWORK_ENTRIES} entries"
        )));
    }
    // The agent uses plain HTTP, so that all its calls would fail.
    if let Some(bad) = ports
        .iter()
        .find(|port| **port == 0 || u32::from(**port) == ENVD_PORT)
    {
        return Err(ApiError::invalid(format!(
            "`httpsPorts`: {bad} is not a port of a server: use 1 to 65535, except {ENVD_PORT}"
        )));
    }
    ports.sort_unstable();
    ports.dedup();
    Ok(ports)
}

fn is_address(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok()
}

/// Returns whether `text` is an address, optionally with a prefix length.
fn is_cidr(text: &str) -> bool {
    let Some((address, length)) = text.split_once('/') else {
        return is_address(text);
    };
    let max_length = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    // Stricter than `parse`, which accepts a sign.
    length.len() <= 3
        && length.bytes().all(|b| b.is_ascii_digit())
        && length.parse::<u8>().is_ok_and(|l| l <= max_length)
}

/// Returns whether `text` is a host name or `*.` and a host name.
pub(crate) fn is_name(text: &str) -> bool {
    let name = text.strip_prefix("*.").unwrap_or(text);
    // A numeric name is an invalid address rather than a host name.
    let numeric = name.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    !name.is_empty() && name.len() <= MAX_NAME && !numeric && name.split('.').all(is_label)
}

/// Returns whether `text` is a name like in [`is_name`], optionally with a port.
fn is_name_with_port(text: &str) -> bool {
    let Some((name, port)) = text.split_once(':') else {
        return is_name(text);
    };
    // Stricter than `parse`, which accepts a sign.
    is_name(name)
        && port.bytes().all(|b| b.is_ascii_digit())
        && port.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_label(label: &str) -> bool {
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (1..=63).contains(&label.len())
        && label.bytes().all(good)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Returns whether `text` is a name of a private network.
fn is_network_name(text: &str) -> bool {
    let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    is_label(text) && text.bytes().all(good)
}

/// Returns whether `text` is valid in a `Host` header. `${PORT}` stands for the port.
fn is_host(text: &str) -> bool {
    // Any valid port serves to check the rest.
    let plain = text.replace("${PORT}", "1");
    let (name, port) = plain.rsplit_once(':').unwrap_or((&plain, "1"));
    !name.is_empty()
        && name.len() <= MAX_NAME
        && name.split('.').all(is_label)
        && port.parse::<u16>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(body: serde_json::Value) -> Result<NetworkSettings, ApiError> {
        check_rules(serde_json::from_value(body).unwrap(), None)
    }

    #[test]
    fn rules_are_addresses_and_names_and_denials_are_addresses() {
        let good = json!({
            "allowOut": ["1.1.1.1", "10.0.0.0/8", "example.com", "*.example.com:22", "fd00::/8"],
            "denyOut": ["0.0.0.0/0", "::1"], "dnsServers": ["8.8.8.8"],
            "maskRequestHost": "localhost:${PORT}", "rules": {}, "httpsPorts": [8443, 443, 443],
            "allowPublicTraffic": false, "join": "lab-1",
        });
        let network = check(good).unwrap();
        assert!(network.restrict_traffic && network.allow_out.len() == 5);
        assert_eq!(network.https_ports, [443, 8443]);
        for bad in [
            json!({"denyOut": ["example.com"]}),
            json!({"allowOut": ["10.0.0.0/33"]}),
            json!({"allowOut": ["1.2.3.4/+8"]}),
            json!({"allowOut": ["300.1.1.1"]}),
            json!({"allowOut": ["a..b"]}),
            json!({"allowOut": ["-a.b"]}),
            json!({"allowOut": [""]}),
            json!({"allowOut": ["a.example:"]}),
            json!({"allowOut": ["a.example:0"]}),
            json!({"allowOut": ["a.example:+1"]}),
            json!({"allowOut": ["a.example:65536"]}),
            json!({"allowOut": ["1.2.3.4:22"]}),
            json!({"dnsServers": ["dns.example"]}),
            json!({"egressMbps": 0}),
            json!({"egressMbps": 100_001}),
            json!({"join": ""}),
            json!({"join": "Lab"}),
            json!({"join": "a.b"}),
            json!({"join": "-a"}),
            json!({"join": "a/b"}),
            json!({"join": "a".repeat(64)}),
            json!({"maskRequestHost": "a b"}),
            json!({"maskRequestHost": "a\r\nX: y"}),
            json!({"allowOut": vec!["1.1.1.1"; 257]}),
            json!({"httpsPorts": [0]}),
            json!({"httpsPorts": [49_983]}),
            json!({"httpsPorts": vec![1; 257]}),
        ] {
            let status = check(bad.clone()).unwrap_err().status;
            assert_eq!(status.as_u16(), 400, "{bad}");
        }
    }

    #[test]
    fn a_create_completes_the_rules_of_its_template_and_cannot_lift_them() {
        let template = |body| serde_json::from_value::<TemplateNetwork>(body).unwrap();
        let closed = template(json!({
            "allowInternetAccess": false, "allowOut": ["a.example"], "dns": ["1.1.1.1"],
        }));
        let merged = |body: serde_json::Value, allowed, template: &TemplateNetwork| {
            let body = serde_json::from_value(body).unwrap();
            let (network, allowed) = with_template(Some(body), allowed, template);
            check_rules(network, allowed).unwrap()
        };
        let network = merged(json!({ "allowOut": [] }), Some(true), &closed);
        assert_eq!(network.allow_internet_access, Some(false));
        assert_eq!(network.allow_out, ["a.example"]);
        assert_eq!(network.dns_servers, ["1.1.1.1"]);
        let own = json!({ "allowOut": ["b.example"], "denyOut": ["192.0.2.1"] });
        let network = merged(own, None, &closed);
        assert_eq!(network.allow_internet_access, Some(false));
        assert_eq!(network.allow_out, ["b.example"]);
        assert_eq!(network.deny_out, ["192.0.2.1"]);
        let open = template(json!({ "allowInternetAccess": true }));
        let network = merged(json!({}), Some(false), &open);
        assert_eq!(network.allow_internet_access, Some(false));
        assert_eq!(
            with_template(None, None, &TemplateNetwork::default()),
            (None, None)
        );
        for bad in [
            json!({ "denyOut": ["a.example"] }),
            json!({ "dns": ["dns.example"] }),
        ] {
            assert!(check_template(&template(bad)).is_err());
        }
    }

    #[test]
    fn ports_of_tls_servers_change_only_if_a_request_names_them() {
        let update = |body| serde_json::from_value::<NetworkUpdate>(body).unwrap();
        let mut network = check(json!({ "httpsPorts": [8443] })).unwrap();
        check_update(update(json!({}))).unwrap()(&mut network, Vec::new());
        assert_eq!(network.https_ports, [8443]);
        check_change(update(json!({}))).unwrap()(&mut network);
        assert_eq!(network.https_ports, [8443]);
        check_change(update(json!({ "httpsPorts": [3000] }))).unwrap()(&mut network);
        assert_eq!(network.https_ports, [3000]);
        check_update(update(json!({ "httpsPorts": [] }))).unwrap()(&mut network, Vec::new());
        assert!(network.https_ports.is_empty());
    }
}

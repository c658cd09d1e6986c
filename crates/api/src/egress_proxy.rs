//! Validation of egress proxies in requests. An egress proxy is a SOCKS5 proxy through which all
//! TCP connections of a sandbox leave.

use crate::app::App;
use crate::error::ApiError;
use crate::lookup::short;
use crate::network::is_name;
use jiffy_api_types::{
    EgressProxy, EgressProxyTls, MAX_PROXY_CERTIFICATES, NewEgressProxy, NewEgressProxyTls,
};
use jiffy_egress_proxy::{MAX_CREDENTIAL, ProxyCredentials};
use jiffy_sandbox_manager::{EgressProxySecrets, authorities};
use std::net::IpAddr;

fn invalid(message: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("`egressProxy`: {message}"))
}

/// Returns whether `text` is an address or a host name without a wildcard.
fn is_host(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || (is_name(text) && !text.starts_with("*."))
}

impl App {
    /// Checks a proxy for a sandbox of `owner`, and encrypts its credentials with the key of the
    /// host. Returns the parts that the API shows, and the parts that it never returns.
    pub(crate) fn egress_proxy(
        &self,
        owner: Option<&str>,
        proxy: Option<NewEgressProxy>,
    ) -> Result<Option<(EgressProxy, EgressProxySecrets)>, ApiError> {
        // Clients send empty values for options that they do not use.
        let Some(proxy) = proxy.filter(|proxy| !proxy.is_empty()) else {
            return Ok(None);
        };
        let (shown, ca_certificates, credentials) = checked(proxy)?;
        let seal = |credentials: ProxyCredentials| {
            let key = self.secrets()?.host_key();
            let sealed = credentials.seal(key, owner.unwrap_or_default());
            sealed.map_err(|e| ApiError::internal(e.to_string()))
        };
        let secrets = EgressProxySecrets {
            sealed_credentials: credentials.map(seal).transpose()?,
            ca_certificates,
        };
        Ok(Some((shown, secrets)))
    }
}

type CheckedProxy = (EgressProxy, Option<String>, Option<ProxyCredentials>);

/// Checks a proxy. Returns its visible parts, the certificates of its authorities, and the
/// credentials.
fn checked(proxy: NewEgressProxy) -> Result<CheckedProxy, ApiError> {
    let address = jiffy_engine_api::EgressProxy::split_address(&proxy.address);
    if !address.is_some_and(|(host, _)| is_host(host)) {
        // The address is not repeated: it may be a URL with a password.
        return Err(invalid(
            "`address` must be `host:port` of a SOCKS5 proxy, without a scheme and credentials",
        ));
    }
    let is_valid = |text: &str| (1..=MAX_CREDENTIAL).contains(&text.len());
    let credentials = match (proxy.username, proxy.password) {
        (None, None) => None,
        (Some(username), Some(password)) if is_valid(&username) && is_valid(&password) => {
            Some(ProxyCredentials { username, password })
        }
        // The message does not contain the values.
        _ => {
            return Err(invalid(format!(
                "`username` and `password` must be given together, with 1 to {MAX_CREDENTIAL} bytes \
                 each"
            )));
        }
    };
    let tls = proxy.tls.filter(|tls| tls.enabled);
    let (tls, ca_certificates) = match tls {
        None => (None, None),
        Some(tls) => checked_tls(tls).map(|(tls, pem)| (Some(tls), pem))?,
    };
    let address = proxy.address.to_ascii_lowercase();
    Ok((EgressProxy { address, tls }, ca_certificates, credentials))
}

/// Checks the TLS settings of a proxy. Returns the part that the API shows, and the certificates of
/// the authorities.
fn checked_tls(tls: NewEgressProxyTls) -> Result<(EgressProxyTls, Option<String>), ApiError> {
    if let Some(name) = tls.server_name.as_deref().filter(|name| !is_host(name)) {
        let name = short(name);
        return Err(invalid(format!(
            "`serverName`: `{name}` is not a host name or an address"
        )));
    }
    let pem = tls.ca_cert.filter(|pem| !pem.trim().is_empty());
    let certificates = pem.map(|pem| {
        let parsed = authorities(&pem, MAX_PROXY_CERTIFICATES);
        let parsed = parsed.map_err(|e| invalid(format!("`caCert`: {e}")))?;
        if parsed.is_empty() {
            return Err(invalid("`caCert` contains no certificate in PEM"));
        }
        Ok(parsed.into_iter().map(|authority| authority.pem).collect())
    });
    let shown = EgressProxyTls {
        enabled: true,
        server_name: tls.server_name,
    };
    Ok((shown, certificates.transpose()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(proxy: Value) -> Result<CheckedProxy, ApiError> {
        checked(serde_json::from_value(proxy).unwrap())
    }

    #[test]
    fn credentials_are_separated_from_the_visible_parts() {
        let (shown, ca_certificates, credentials) = check(json!({
            "address": "Proxy.example:1080", "username": "u", "password": "p",
            "tls": { "enabled": true, "serverName": "proxy.example" },
        }))
        .unwrap();
        let shown = serde_json::to_value(shown).unwrap();
        let tls = json!({ "enabled": true, "serverName": "proxy.example" });
        assert_eq!(
            shown,
            json!({ "address": "proxy.example:1080", "tls": tls })
        );
        assert!(ca_certificates.is_none());
        let credentials = credentials.unwrap();
        assert_eq!((&*credentials.username, &*credentials.password), ("u", "p"));
        let plain = check(json!({ "address": "[2600::1]:1080", "tls": { "enabled": false } }));
        let (shown, _, credentials) = plain.unwrap();
        assert!(shown.tls.is_none() && credentials.is_none());
        let empty: NewEgressProxy = serde_json::from_value(json!({})).unwrap();
        assert!(empty.is_empty());
    }

    #[test]
    fn invalid_proxies_are_rejected_without_repeating_credentials() {
        let long = "secret-".repeat(50);
        for bad in [
            json!({ "address": "proxy.example" }),
            json!({ "address": "proxy.example:0" }),
            json!({ "address": "proxy.example:+1" }),
            json!({ "address": "*.example:1080" }),
            json!({ "address": "2600::1:1080" }),
            json!({ "address": "socks5://proxy.example:1080" }),
            json!({ "address": "secret-user:secret-pass@proxy.example:1080" }),
            json!({ "username": "secret-user" }),
            json!({ "address": "a.example:1", "username": "secret-user" }),
            json!({ "address": "a.example:1", "password": "secret-pass" }),
            json!({ "address": "a.example:1", "username": "", "password": "secret-pass" }),
            json!({ "address": "a.example:1", "username": "u", "password": long }),
            json!({ "address": "a.example:1", "tls": { "enabled": true, "serverName": "a b" } }),
            json!({ "address": "a.example:1", "tls": { "enabled": true, "caCert": "x" } }),
        ] {
            let error = check(bad.clone()).unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{bad}");
            assert!(!format!("{error:?}").contains("secret-"), "{error:?}");
        }
    }
}

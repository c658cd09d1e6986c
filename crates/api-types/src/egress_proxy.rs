//! Proxy for the outgoing connections of a sandbox.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum length in bytes of a user name and of a password for a proxy (RFC 1929).
pub const MAX_PROXY_CREDENTIAL: usize = 255;
/// Maximum length in bytes of the certificates for a proxy.
pub const MAX_PROXY_CERTIFICATES: usize = 64 * 1024;

/// Pattern of addresses in the OpenAPI document. It is narrower than the daemon's parser, so that
/// requests generated from the document contain valid addresses only.
const ADDRESS: &str = "^([a-z][a-z0-9]{0,30}\\.){1,3}[a-z]{2,30}:([1-9][0-9]{0,3}|[1-5][0-9]{4})$";
const SERVER_NAME: &str = "^([a-z][a-z0-9]{0,30}\\.){1,3}[a-z]{2,30}$";

/// SOCKS5 proxy through which all TCP connections of a new sandbox leave. An empty object means no
/// proxy.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NewEgressProxy {
    /// Address of the proxy: `host:port`.
    #[schemars(required, regex(pattern = ADDRESS))]
    pub address: String,
    /// User name. It is encrypted, and no call returns it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = MAX_PROXY_CREDENTIAL))]
    pub username: Option<String>,
    /// Password. It is encrypted, and no call returns it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = MAX_PROXY_CREDENTIAL))]
    pub password: Option<String>,
    /// TLS settings of connections to the proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<NewEgressProxyTls>,
}

impl std::fmt::Debug for NewEgressProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The user name and the password are omitted.
        f.debug_struct("NewEgressProxy")
            .field("address", &self.address)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl NewEgressProxy {
    /// Returns whether the value means no proxy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// TLS settings of connections to the proxy of a new sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NewEgressProxyTls {
    /// True if connections to the proxy use TLS.
    pub enabled: bool,
    /// Name in the proxy's certificate. Defaults to the host of the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = SERVER_NAME))]
    pub server_name: Option<String>,
    /// Certificates of the authorities that may sign the proxy's certificate, in PEM. Defaults to
    /// the authorities of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = MAX_PROXY_CERTIFICATES))]
    pub ca_cert: Option<String>,
}

/// SOCKS5 proxy through which all TCP connections of a sandbox leave, without user name, password
/// and certificates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressProxy {
    /// Address of the proxy: `host:port`.
    pub address: String,
    /// TLS settings of connections to the proxy. Absent if they are not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<EgressProxyTls>,
}

/// TLS settings of connections to the proxy of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressProxyTls {
    /// Always true.
    pub enabled: bool,
    /// Name in the proxy's certificate. Absent if it is the host of the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
}

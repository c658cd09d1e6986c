//! [`SandboxSettings`]: the settings that the creator of a sandbox chose. They are a part of its
//! record.

use crate::MountedVolume;
use jiffy_api_types::{
    HeaderRule, IdentityTokens, NetworkSettings, OnTimeout, SandboxTerms, SnapshotContent,
    VolumeMount,
};
use jiffy_engine_api::{
    EgressProxy, EgressProxyTls, HeaderRules, NetworkMembership, NetworkRules, now_ms,
};
use jiffy_proto::agent::{Authority, SiteSettings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// Time for which a repeated create with an idempotency key returns the same sandbox.
const IDEMPOTENCY_LIFETIME_MS: u64 = 24 * 3600 * 1000;

/// Settings chosen by a sandbox's creator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxSettings {
    /// API key with which the sandbox was created. `None` for the owner of this host.
    pub owner: Option<String>,
    /// Metadata chosen by the creator, for filters.
    pub metadata: BTreeMap<String, String>,
    /// Timeout that was set last, in seconds. `None` if there is no limit.
    pub timeout_s: Option<u64>,
    /// Action at the timeout.
    pub on_timeout: OnTimeout,
    /// Content of a pause at the timeout.
    #[serde(skip_serializing_if = "SnapshotContent::is_full")]
    pub pause_content: SnapshotContent,
    /// Time without use after which the sandbox is paused, in seconds. `None` if it never is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u64>,
    /// True if traffic resumes the paused sandbox.
    pub auto_resume: bool,
    /// True if the agent requires an access token.
    pub secure: bool,
    /// Egress rules, and rules for traffic to the sandbox.
    pub network: NetworkSettings,
    /// Certificate authorities and proxy, in addition to the host's.
    #[serde(skip_serializing_if = "SiteSettings::is_empty")]
    pub site: SiteSettings,
    /// Certificate authority with which the host intercepts TLS requests to add headers to them
    /// (`network.rules`). It remains if the rules are removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header_authority: Option<HeaderAuthority>,
    /// Parts of the egress proxy in `network` that the API does not return.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_proxy_secrets: Option<EgressProxySecrets>,
    /// Identity tokens that headers in `network` may contain, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub identity_tokens: IdentityTokens,
    /// Mounted volumes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<MountedVolume>,
    /// Request that created the sandbox, if it had an idempotency key. In a fleet only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation: Option<Creation>,
}

/// Certificate authority that only the sandbox and its clones trust.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderAuthority {
    /// Certificate.
    pub certificate: Authority,
    /// Private key, encrypted with the key of the host.
    pub sealed_key: String,
}

/// Parts of an egress proxy that the API does not return.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EgressProxySecrets {
    /// User name and password, encrypted with the key of the host.
    pub sealed_credentials: Option<String>,
    /// Authorities that may sign the proxy's certificate (PEM).
    pub ca_certificates: Option<String>,
}

/// Idempotency key of a create, and the request with which it was used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Creation {
    /// Key.
    pub key: String,
    /// Digest of the request, in hexadecimal.
    pub request: String,
    /// Time of the request, in milliseconds since 1970.
    pub at_ms: u64,
}

impl Creation {
    /// Records a request that was received now.
    #[must_use]
    pub fn new(key: &str, request: &[u8; 32]) -> Self {
        Self {
            key: key.to_owned(),
            request: Self::digest_text(request),
            at_ms: now_ms(),
        }
    }

    /// Returns the text of a digest.
    #[must_use]
    pub fn digest_text(request: &[u8; 32]) -> String {
        request.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns whether the key may be used for another request.
    #[must_use]
    pub fn is_expired(&self) -> bool {
        now_ms().saturating_sub(self.at_ms) > IDEMPOTENCY_LIFETIME_MS
    }
}

impl SandboxSettings {
    /// Returns whether the sandbox is paused without a request: at its timeout or when it is idle.
    pub fn pauses(&self) -> bool {
        self.on_timeout == OnTimeout::Pause || self.idle_timeout_s.is_some()
    }

    /// Returns the egress rules of the sandbox `id` with this name. A new sandbox has no id and no
    /// address in a private network yet: its rules may be checked, but not applied. Identity tokens
    /// are added by [`Sandbox::network_rules`](crate::Sandbox::network_rules).
    pub fn rules(&self, id: &str, name: Option<&str>) -> NetworkRules {
        let network = &self.network;
        // The addresses were checked before they were stored.
        let servers = network.dns_servers.iter().filter_map(|s| s.parse().ok());
        NetworkRules {
            internet: network.allow_internet_access != Some(false),
            allow_out: network.allow_out.clone(),
            deny_out: network.deny_out.clone(),
            dns_servers: servers.collect(),
            egress_mbps: network.egress_mbps,
            owner: self.owner.clone(),
            headers: self.header_rules(),
            egress_proxy: self.egress_proxy(),
            membership: self.membership(id, name),
        }
    }

    /// Returns the membership in the private network that the sandbox joins. `None` if it joins
    /// none.
    fn membership(&self, id: &str, name: Option<&str>) -> Option<NetworkMembership> {
        let network = self.network.join.clone()?;
        let address = self.network.address.as_deref();
        Some(NetworkMembership {
            network,
            address: address
                .and_then(|address| address.parse().ok())
                .unwrap_or(Ipv4Addr::UNSPECIFIED),
            id: id.to_owned(),
            name: name.map(str::to_owned),
        })
    }

    /// Returns the egress proxy with its encrypted secrets. `None` if the sandbox has none.
    fn egress_proxy(&self) -> Option<EgressProxy> {
        let proxy = self.network.egress_proxy.clone()?;
        let secrets = self.egress_proxy_secrets.clone().unwrap_or_default();
        Some(EgressProxy {
            address: proxy.address,
            tls: proxy.tls.map(|tls| EgressProxyTls {
                server_name: tls.server_name,
                ca_certificates: secrets.ca_certificates,
            }),
            sealed_credentials: secrets.sealed_credentials,
        })
    }

    /// Returns the rules for headers. `None` if there are none.
    fn header_rules(&self) -> Option<HeaderRules> {
        let rules = &self.network.rules;
        let authority = self.header_authority.as_ref()?;
        (!rules.is_empty()).then(|| HeaderRules {
            rules: rules.clone(),
            certificate: authority.certificate.pem.clone(),
            sealed_key: authority.sealed_key.clone(),
            workload: None,
        })
    }

    /// Returns the authorities and the proxy of the sandbox, in addition to the host's.
    pub fn guest_site(&self) -> SiteSettings {
        let mut site = self.site.clone();
        if let Some(authority) = &self.header_authority {
            site.authorities.push(authority.certificate.clone());
        }
        site
    }
}

impl From<SandboxSettings> for SandboxTerms {
    /// Omits certificates, which are long, and the proxy, whose URL may contain a password.
    fn from(settings: SandboxSettings) -> Self {
        Self {
            owner: settings.owner,
            metadata: settings.metadata,
            timeout_s: settings.timeout_s,
            on_timeout: settings.on_timeout,
            pause_mode: settings.pause_content,
            idle_timeout_s: settings.idle_timeout_s,
            auto_resume: settings.auto_resume,
            secure: settings.secure,
            network: NetworkSettings {
                rules: settings
                    .network
                    .rules
                    .iter()
                    .map(HeaderRule::masked)
                    .collect(),
                ..settings.network
            },
            identity_tokens: settings.identity_tokens,
            volumes: settings.volumes.iter().map(VolumeMount::from).collect(),
        }
    }
}

//! Protocol of host and guest agent: ports, and the greeting that makes a sandbox ready.
//!
//! The agent connects to [`HELLO_PORT`] on the host and both sides write one JSON object per line:
//! agent [`Hello`], host [`Identity`], agent [`Ready`]. After that the connection stays open; when
//! it breaks (the VM was restored elsewhere) the agent greets again. Everything else is the envd
//! protocol on [`ENVD_PORT`]. A sandbox without vsock has [`LINK_SOCKET`] instead.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// vsock port on the host for the agent's greeting.
pub const HELLO_PORT: u32 = 1024;
/// vsock port in the guest that speaks the envd protocol (HTTP/1.1).
pub const ENVD_PORT: u32 = 49_983;
/// vsock port in the guest that joins a stream to a TCP port: the host writes `<port> ` (decimal),
/// the agent answers [`TCP_OK`] and then only passes bytes, or answers `ERR <reason> ` and closes.
pub const TCP_PORT: u32 = 49_984;
/// Answer on [`TCP_PORT`] once the connection to the guest's TCP port is established.
pub const TCP_OK: &str = "OK\n";
/// Version of envd whose protocol the agent speaks; clients switch features on by it.
pub const ENVD_VERSION: &str = "0.6.13";
/// Id of the team that owns all sandboxes of a host: clients of E2B expect one.
pub const TEAM_ID: &str = "local";
/// Longest line of the greeting, in bytes. The certificate authorities of a [`SiteSettings`] take
/// most of a long one.
pub const MAX_GREETING: usize = 1024 * 1024;
/// Parameter of the kernel's command line: number of images of the root file system, if there are
/// several. Without a dot in it, so that the kernel passes it on as an environment variable, which
/// can be read before anything is mounted.
pub const IMAGES: &str = "jiffy_images";
/// Parameter of the kernel's command line: the last disk holds the modules of the kernel.
pub const MODULES: &str = "jiffy_modules";
/// Prefix, followed by a port's number, of the abstract Unix socket that stands for one of the
/// ports above in a sandbox without vsock. To [`HELLO_PORT`] it is the host that connects.
/// Connections of programs of the sandbox are closed without an answer: the kernel gives the agent
/// their credentials.
pub const LINK_SOCKET: &str = "jiffy-agent-";
/// Argument of the agent as process 1 of a gVisor sandbox.
pub const GVISOR: &str = "gvisor";
/// Variable of the agent's environment in gVisor: number of images of the root file system.
pub const GVISOR_IMAGES: &str = "JIFFY_IMAGES";
/// Variable of the agent's environment in gVisor: limit of the sandbox's writes, in MiB.
pub const GVISOR_DISK_MIB: &str = "JIFFY_DISK_MIB";
/// Variable of the agent's environment in gVisor: comma-separated addresses of the name servers, if
/// there is a network.
pub const GVISOR_DNS: &str = "JIFFY_DNS";
/// Line on the agent's standard output after which [`LINK_SOCKET`] accepts connections.
pub const LISTENING: &str = "jiffy-agent: listening";
/// Context id of every guest.
pub const GUEST_CID: u32 = 3;

/// Agent to host: the agent is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the agent.
    pub version: String,
    /// Kernel release of the guest.
    pub kernel: String,
    /// Guest clock (CLOCK_BOOTTIME, microseconds) when the agent's `main` began.
    pub init_us: u64,
    /// Guest clock (CLOCK_BOOTTIME, microseconds) when it sent this.
    pub hello_us: u64,
}

/// Host to agent: identity of the sandbox. Applied completely before [`Ready`] is sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Sandbox id; also the host name unless `hostname` is given. An id other than the agent's
    /// former one makes it a clone.
    pub id: String,
    /// The sandbox was rolled back to an earlier moment. Its peers have gone on since, so its TCP
    /// connections are reset, as a clone's are; those of a resumed sandbox are kept.
    #[serde(default)]
    pub rewound: bool,
    /// Host name inside the guest.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Wall clock of the host when this was sent, nanoseconds since the epoch.
    pub time_ns: u64,
    /// 32 or more random bytes from the host, base64, mixed into the guest's pool.
    pub entropy: String,
    /// Environment for every process.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Token that clients must send as `X-Access-Token`; none means open.
    #[serde(default)]
    pub access_token: Option<String>,
    /// User for processes that name none.
    #[serde(default)]
    pub default_user: Option<String>,
    /// Directory for processes that name none.
    #[serde(default)]
    pub default_workdir: Option<String>,
    /// Id of the sandbox's template, for programs in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
    /// Id of the team that owns the sandbox, for programs in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
    /// Authorities and proxy of the network that the sandbox is in.
    #[serde(default, skip_serializing_if = "SiteSettings::is_empty")]
    pub site: SiteSettings,
}

/// Certificate authorities and proxy of the guests' network, for example a company's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SiteSettings {
    /// Authorities that programs of the guest trust in addition to those of its template.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub authorities: Vec<Authority>,
    /// Proxy; none: the template's and the caller's environment decide alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<ProxySettings>,
}

impl SiteSettings {
    /// Returns true if there are no settings.
    pub fn is_empty(&self) -> bool {
        self.authorities.is_empty() && self.proxy.is_none()
    }
}

/// Certificate of an authority, checked by the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// The certificate in PEM: lines of 64 characters, with a line feed after the last.
    pub pem: String,
    /// OpenSSL's hash of its subject, 8 hexadecimal digits: its file name in a directory of
    /// certificates.
    pub subject_hash: String,
}

/// Proxy of a network.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxySettings {
    /// URL with scheme `http` or `https`; empty: no proxy, even if the host has one.
    pub url: String,
    /// Comma-separated hosts that are reached without it.
    #[serde(default)]
    pub no_proxy: String,
}

impl ProxySettings {
    /// The URL without user and password.
    pub fn public_url(&self) -> String {
        match self.url.split_once("://") {
            Some((scheme, rest)) => {
                let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
                format!("{scheme}://{host}")
            }
            None => self.url.clone(),
        }
    }
}

impl fmt::Debug for ProxySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxySettings")
            .field("url", &self.public_url())
            .field("no_proxy", &self.no_proxy)
            .finish()
    }
}

/// Agent to host: the identity is in force and requests are served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Guest clock (CLOCK_BOOTTIME, microseconds) when it sent this.
    pub ready_us: u64,
    /// The setting that could not be applied; the host must then not hand the sandbox out.
    #[serde(default)]
    pub error: Option<String>,
}
/// Paths on [`ENVD_PORT`] that only the host may call; a gateway must not let clients reach them.
pub const HOST_ONLY_PATHS: [&str; 6] = [
    "/init",
    "/freeze",
    "/unfreeze",
    "/fsfreeze",
    "/fsthaw",
    "/collapse",
];

//! Protocol between the host and the guest agent: ports, and the greeting that assigns an identity
//! to a sandbox.
//!
//! The agent connects to [`HELLO_PORT`] on the host, and each side writes one JSON object per line:
//! the agent [`Hello`], the host [`Identity`], the agent [`Ready`]. If the transfer took long, the
//! host then corrects the guest's clock with [`ClockStep`]. The connection remains open. If it
//! breaks, for example because the VM was restored on another host, the agent greets again. All
//! other communication uses the envd protocol on [`ENVD_PORT`]. A sandbox without vsock uses
//! [`LINK_SOCKET`] instead.
//!
//! A *hook* is an executable in the guest that the agent runs before the state of the guest is
//! stored, and after the guest continues.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// vsock port on the host for the agent's greeting.
pub const HELLO_PORT: u32 = 1024;
/// vsock port of the guest for the envd protocol (HTTP/1.1).
pub const ENVD_PORT: u32 = 49_983;
/// vsock port of the guest for connections to its TCP ports. The host writes the port number in
/// decimal and a line feed. The agent answers [`TCP_OK`] and then only passes bytes on, or it
/// answers `ERR <reason>` with a line feed and closes the connection.
///
/// Instead of a number, the host may write a [`SocketListener`] as JSON with a line feed. The agent
/// listens on this Unix socket and answers [`SOCKET_READY`]. When a program has connected to the
/// socket, the agent answers [`TCP_OK`] and passes bytes on. Several streams may name one socket:
/// each waits for one connection. The socket is removed when its last stream ends.
pub const TCP_PORT: u32 = 49_984;
/// Response on [`TCP_PORT`] after the connection to the guest's TCP port is established.
pub const TCP_OK: &str = "OK\n";
/// Response on [`TCP_PORT`] after the socket of a [`SocketListener`] exists.
pub const SOCKET_READY: &str = "READY\n";
/// Maximum length of a [`SocketListener`] in bytes.
pub const MAX_SOCKET_REQUEST: usize = 4096;
/// vsock port of the guest for volumes. The host writes a [`VolumeAttachment`] as JSON with a line
/// feed. The agent mounts the volume, or finds its mount, and answers [`VOLUME_OK`] or
/// `ERR <reason>` with a line feed. After [`VOLUME_OK`], the stream carries messages of the FUSE
/// protocol.
pub const VOLUME_PORT: u32 = 49_985;
/// Response on [`VOLUME_PORT`]: the stream serves the mount.
pub const VOLUME_OK: &str = "OK\n";
/// Response on [`VOLUME_PORT`] to [`VolumeAttachment::only_if_lost`]: the mount has a stream, or
/// the guest has removed it.
pub const VOLUME_ATTACHED: &str = "ATTACHED\n";
/// Maximum length of a [`VolumeAttachment`] in bytes.
pub const MAX_VOLUME_REQUEST: usize = 8192;
/// Version of envd whose protocol the agent implements. Clients enable features depending on this
/// version.
pub const ENVD_VERSION: &str = "0.6.13";
/// Id of the team that owns all sandboxes of a host. Clients of E2B require an id.
pub const TEAM_ID: &str = "local";
/// Maximum length of a line of the greeting in bytes. Long lines consist mostly of the certificate
/// authorities of a [`SiteSettings`].
pub const MAX_GREETING: usize = 1024 * 1024;
/// Parameter of the kernel's command line: number of images of the root file system, if there are
/// several. The name contains no dot, so that the kernel passes the parameter on as an environment
/// variable, which can be read before any file system is mounted.
pub const IMAGES: &str = "jiffy_images";
/// Parameter of the kernel's command line: set if the last disk contains the modules of the kernel.
pub const MODULES: &str = "jiffy_modules";
/// Prefix of the name of an abstract Unix socket that replaces one of the ports above in a sandbox
/// without vsock. The number of the port follows. The agent listens on all of these sockets, and
/// the host connects. This includes the socket for [`HELLO_PORT`], although the agent is the client
/// of this port if there is vsock. The agent closes connections of programs in the sandbox without
/// a response, based on the credentials that the kernel reports.
pub const LINK_SOCKET: &str = "jiffy-agent-";
/// First argument of the agent as process 1 of a gVisor sandbox.
pub const GVISOR: &str = "gvisor";
/// Environment variable of the agent in gVisor: number of images of the root file system.
pub const GVISOR_IMAGES: &str = "JIFFY_IMAGES";
/// Environment variable of the agent in gVisor: limit of the sandbox's writes in MiB.
pub const GVISOR_DISK_MIB: &str = "JIFFY_DISK_MIB";
/// Environment variable of the agent in gVisor: comma-separated addresses of the name servers. Set
/// if the sandbox has a network.
pub const GVISOR_DNS: &str = "JIFFY_DNS";
/// Line on the agent's standard output. After this line, [`LINK_SOCKET`] accepts connections.
pub const LISTENING: &str = "jiffy-agent: listening";
/// vsock context id of every guest.
pub const GUEST_CID: u32 = 3;

/// Unix socket in the guest whose connections lead to the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketListener {
    /// Absolute path of the socket. Its directory must exist.
    pub path: String,
    /// Owner of the socket.
    pub uid: u32,
    /// Group of the socket.
    pub gid: u32,
    /// Permissions of the socket. Programs that may write to the socket can connect.
    pub mode: u32,
    /// True if this stream only retains the socket, and waits for no connection.
    pub only_retains: bool,
}

/// Request to mount a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeAttachment {
    /// Id of the volume.
    pub volume: String,
    /// Absolute path of the directory, which is created if necessary.
    pub path: String,
    /// True if the guest must not change the volume. The host's server rejects changes as well.
    pub read_only: bool,
    /// Number of the process that will answer the requests.
    pub server: u64,
    /// True to replace only a stream of another server, on a mount that exists.
    pub only_if_lost: bool,
}

/// First message of the agent to the host: the agent is ready to receive an identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the agent.
    pub version: String,
    /// Kernel release of the guest.
    pub kernel: String,
    /// Guest clock (CLOCK_BOOTTIME, microseconds) at the start of the agent's `main`.
    pub init_us: u64,
    /// Guest clock (CLOCK_BOOTTIME, microseconds) when the message was sent.
    pub hello_us: u64,
    /// False if the guest has no directory [`HOOKS`]. If the directory is created later, the agent
    /// sends a byte on the connection of the greeting. Defaults to true: agents of earlier versions
    /// do not send this field, and their guests may have hooks.
    #[serde(default = "hooks_of_earlier_agents")]
    pub hooks: bool,
}

/// Directory with the hooks of a guest.
pub const HOOKS: &str = "/etc/jiffy";

fn hooks_of_earlier_agents() -> bool {
    true
}

/// Message of the host to the agent: identity of the sandbox. The agent applies all of it before it
/// sends [`Ready`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Sandbox id. Also the host name unless `hostname` is given. If the agent had another id
    /// before, the sandbox is a clone.
    pub id: String,
    /// Set if the sandbox was rolled back. Its peers do not share the earlier state, so its TCP
    /// connections are reset as in a clone. The connections of a resumed sandbox are not reset.
    #[serde(default)]
    pub rewound: bool,
    /// Host name of the guest.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Clock of the host when the message was sent, in nanoseconds since 1970.
    pub time_ns: u64,
    /// At least 32 random bytes of the host in base64. The agent adds them to the guest's entropy
    /// pool.
    pub entropy: String,
    /// Environment for every process.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Token that clients must send as `X-Access-Token`. If `None`, no token is required.
    #[serde(default)]
    pub access_token: Option<String>,
    /// User of processes for which the request specifies no user.
    #[serde(default)]
    pub default_user: Option<String>,
    /// Working directory of processes for which the request specifies no directory.
    #[serde(default)]
    pub default_workdir: Option<String>,
    /// Id of the sandbox's template, for programs in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_id: Option<String>,
    /// Id of the team that owns the sandbox, for programs in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team_id: Option<String>,
    /// Authorities and proxy of the network in which the sandbox runs.
    #[serde(default, skip_serializing_if = "SiteSettings::is_empty")]
    pub site: SiteSettings,
}

/// Certificate authorities and proxy of the guests' network, for example a company's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SiteSettings {
    /// Authorities that programs of the guest trust in addition to the template's authorities.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub authorities: Vec<Authority>,
    /// Proxy. If `None`, only the environments of the template and of the caller specify a proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<ProxySettings>,
}

impl SiteSettings {
    /// Returns whether there are no settings.
    pub fn is_empty(&self) -> bool {
        self.authorities.is_empty() && self.proxy.is_none()
    }
}

/// Certificate of an authority. The host has validated it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// Certificate in PEM format: lines of 64 characters, with a line feed after the last line.
    pub pem: String,
    /// OpenSSL's hash of the subject, 8 hexadecimal digits. It is the file name in a directory of
    /// certificates.
    pub subject_hash: String,
}

/// Proxy of a network.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxySettings {
    /// URL with the scheme `http` or `https`. If empty, no proxy is used, even if the host has a
    /// proxy.
    pub url: String,
    /// Comma-separated hosts that are reached without the proxy.
    #[serde(default)]
    pub no_proxy: String,
}

impl ProxySettings {
    /// Returns the URL without user and password.
    pub fn public_url(&self) -> String {
        // A password may contain `@`, but a host name cannot, so the host follows the last `@`.
        match self.url.split_once("://") {
            Some((scheme, rest)) => {
                let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
                format!("{scheme}://{host}")
            }
            None => self.url.clone(),
        }
    }
}

// This implementation is written by hand, so that the password does not appear in logs.
impl fmt::Debug for ProxySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxySettings")
            .field("url", &self.public_url())
            .field("no_proxy", &self.no_proxy)
            .finish()
    }
}

/// Last message of the agent in the greeting: the identity is applied, and requests are served.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Guest clock (CLOCK_BOOTTIME, microseconds) when the message was sent.
    pub ready_us: u64,
    /// Error of applying the identity. If set, the host must not use the sandbox.
    #[serde(default)]
    pub error: Option<String>,
    /// Time from the receipt of the identity until this message, in microseconds. Only set by
    /// agents that answer a [`ClockStep`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied_us: Option<u64>,
}

/// Message of the host to an agent after [`Ready`]: change of the guest's wall clock. The agent
/// answers at once with a [`ClockReading`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockStep {
    /// Number of nanoseconds by which the clock is advanced. Negative if the clock is set back.
    pub step_ns: i64,
}

/// Response of the agent to a [`ClockStep`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockReading {
    /// Wall clock of the guest after the change, in nanoseconds since 1970.
    pub time_ns: u64,
}

/// Maximum size in bytes of a keepalive of the agent's streams, with the framing of HTTP. All other
/// messages of a stream are larger.
pub const MAX_KEEPALIVE_BYTES: usize = 40;

/// Paths on [`ENVD_PORT`] for the host only. Gateways must reject requests of clients to these
/// paths.
pub const HOST_ONLY_PATHS: [&str; 6] = [
    "/init",
    "/freeze",
    "/unfreeze",
    "/fsfreeze",
    "/fsthaw",
    "/collapse",
];

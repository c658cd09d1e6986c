//! Arguments of `jiffy front`.
//!
//! A *front* is a process without sandboxes that passes connections of clients to the hosts of a
//! fleet.

use super::serve::LogFormat;
use clap::Args;
use jiffy_daemon::TlsOptions;
use std::net::SocketAddr;
use std::path::PathBuf;

/// `jiffy front`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy front --join https://10.0.0.11:7946 jft_c2eh... --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem
  jiffy front --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem      start it again")]
pub struct FrontArgs {
    /// Join a fleet before the start: address of a member, and a token of `jiffy fleet token`. Has
    /// no effect if this data directory already belongs to a front
    #[arg(long, num_args = 2, value_names = ["URL", "TOKEN"])]
    pub join: Option<Vec<String>>,
    /// Name of this front [default: host name of the system]
    #[arg(long, value_name = "NAME", requires = "join")]
    pub name: Option<String>,
    /// Address for clients
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3000")]
    pub listen: SocketAddr,
    /// Enable TLS with a generated certificate for the domains of the fleet
    #[arg(long)]
    pub tls: bool,
    /// Enable TLS with the certificate chain in this PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Format of the log on standard error. Set the level with JIFFY_LOG (debug, info, warn)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

impl FrontArgs {
    /// Returns the TLS of the listener.
    pub fn tls(&self) -> TlsOptions {
        tls_options(self.tls, self.tls_cert.as_ref(), self.tls_key.as_ref())
    }
}

/// Returns the TLS of a listener. The parser accepts the two files only together. With
/// `is_generated`, the certificate is generated.
pub(super) fn tls_options(
    is_generated: bool,
    certificate: Option<&PathBuf>,
    key: Option<&PathBuf>,
) -> TlsOptions {
    match (certificate, key) {
        (Some(certificate), Some(key)) => TlsOptions::Files {
            certificate: certificate.clone(),
            key: key.clone(),
        },
        _ if is_generated => TlsOptions::Generated,
        _ => TlsOptions::Off,
    }
}

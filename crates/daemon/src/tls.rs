//! TLS of listeners.

use crate::options::TlsOptions;
use jiffy_gateway::Tls;
use jiffy_image::Home;

/// Returns the TLS settings of a listener. `None` without TLS.
pub(crate) fn tls(
    options: &TlsOptions,
    domains: &[String],
    home: &Home,
) -> anyhow::Result<Option<Tls>> {
    Ok(match options {
        TlsOptions::Files { certificate, key } => Some(Tls::from_files(certificate, key)?),
        TlsOptions::Generated => {
            let directory = home.path().join("tls");
            Some(Tls::generated(&directory, domains)?)
        }
        TlsOptions::Off => None,
    })
}

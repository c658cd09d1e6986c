//! Errors of the listener's TLS configuration.

use std::io;
use std::path::PathBuf;
use thiserror::Error;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem;

/// Reason why TLS is unavailable.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A PEM file is unreadable or invalid.
    #[error("cannot read {}: {source}; provide a PEM file with {what}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// Expected contents.
        what: &'static str,
        /// Cause.
        source: pem::Error,
    },
    /// Certificate and key do not match, or their kind is unsupported.
    #[error("cannot use the certificate of {} with its key: {source}", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Cause.
        source: rustls::Error,
    },
    /// A generated certificate cannot be stored.
    #[error("cannot store a generated certificate in {}: {source}", path.display())]
    Store {
        /// File or directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The certificate cannot be generated for these names.
    #[error("cannot generate a certificate for {names}: {source}")]
    Generate {
        /// The names.
        names: String,
        /// Cause.
        source: rcgen::Error,
    },
}

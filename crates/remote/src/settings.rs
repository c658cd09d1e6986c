//! Settings of the shared store on a host.

use jiffy_store::StoreUrl;
use std::path::PathBuf;

/// Settings of the shared store on a host.
#[derive(Debug, Clone)]
pub struct RemoteSettings {
    /// Address.
    pub url: StoreUrl,
    /// File of master keys, which may name a command that wraps and unwraps; none:
    /// `<home>/store/keys.toml`, which is made if it is missing.
    pub keyring: Option<PathBuf>,
    /// Data directory of this host.
    pub home: PathBuf,
    /// Bytes that cached layers may take on disk.
    pub cache_bytes: u64,
    /// Bytes sent to the store per second; none: no limit.
    pub upload_bytes_per_second: Option<u64>,
}

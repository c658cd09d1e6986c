//! Connections of sandboxes through a SOCKS5 proxy that their creator chose.
//!
//! The network of a sandbox connects to the proxy. [`SocksConnector`] verifies the proxy's
//! certificate, authenticates with the credentials of the sandbox, and requests the connection to
//! the server. [`ProxyCredentials`] are encrypted with the key of the host in the record of the
//! sandbox. The guest receives neither credentials nor messages of the proxy.

mod proxy_credentials;
mod socks;
mod socks_connector;

pub use proxy_credentials::{MAX_CREDENTIAL, ProxyCredentials};
pub use socks::SocksError;
pub use socks_connector::SocksConnector;

//! Connect protocol, JSON codec: <https://connectrpc.com/docs/protocol>.

pub mod error;
pub mod frame;
pub mod json;
pub mod request;

pub use error::{RpcCode, RpcError};

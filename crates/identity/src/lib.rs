//! Identity tokens of sandboxes: JSON Web Tokens by which other services recognise a sandbox.
//!
//! The daemon is the issuer ([`TokenIssuer`]). It signs a token for each request that contains one,
//! and publishes the public keys, so that services can verify tokens without a shared secret. The
//! header proxy adds tokens to requests; guests never receive them. The keys are in a file of the
//! host, or are shared by several hosts ([`SharedIdentityKeys`]).

mod error;
mod issuer;
mod issuer_url;
mod key_file;
mod shared;
mod signing_key;

pub use error::IdentityError;
pub use issuer::TokenIssuer;
pub use issuer_url::{InvalidIssuer, IssuerUrl};
pub use shared::SharedIdentityKeys;
pub use signing_key::StoredKey;

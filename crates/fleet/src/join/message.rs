//! Messages of `jiffy fleet join`, as JSON: the request of a host that joins, and the answer of the
//! member that admits it. The member treats the request as hostile until it has checked the token.

use crate::HostFacts;
use jiffy_fleet_core::{FleetId, MESSAGE_FORMAT, MemberId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Maximum size of a request.
pub const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Maximum length of a field, other than the certificate request.
const MAX_FIELD_BYTES: usize = 256;
/// Maximum length of the certificate request.
const MAX_CERTIFICATE_BYTES: usize = 16 << 10;

/// Request of a host that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// Format of the message.
    pub format: u32,
    /// Token.
    pub token: String,
    /// Name of the host.
    pub name: String,
    /// Address (`HOST:PORT`) at which other members reach the host.
    pub address: String,
    /// Text that the host sends to connections at its address during the join.
    pub nonce: String,
    /// Random number of the data directory. It identifies a host whose earlier join was
    /// interrupted, so that the host receives the same member number again.
    pub installation: String,
    /// True if the host is a front: a machine without sandboxes that passes requests of clients to
    /// the members.
    #[serde(default)]
    pub is_front: bool,
    /// Properties of the host.
    pub facts: HostFacts,
    /// Certificate request (PEM).
    pub certificate_request: String,
    /// Time of the host in milliseconds since the epoch.
    pub unix_ms: u64,
}

impl JoinRequest {
    /// Returns the request with this JSON. Checks the lengths of all fields except the texts of
    /// `facts`, which [`MAX_REQUEST_BYTES`] limits.
    ///
    /// # Errors
    /// The reason why it cannot be used.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > MAX_REQUEST_BYTES {
            return Err(format!(
                "the join request exceeds {MAX_REQUEST_BYTES} bytes"
            ));
        }
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| format!("the join request is damaged: {error}"))?;
        // A request of another format may have other fields.
        let format = value.get("format").and_then(Value::as_u64).unwrap_or(0);
        if format != u64::from(MESSAGE_FORMAT) {
            let instead = if format > u64::from(MESSAGE_FORMAT) {
                "upgrade the members of the fleet"
            } else {
                "upgrade Jiffy on the host that joins"
            };
            return Err(format!(
                "the join request has format {format}, but the fleet has {MESSAGE_FORMAT}: {instead}"
            ));
        }
        let request: Self = serde_json::from_value(value)
            .map_err(|error| format!("the join request is damaged: {error}"))?;
        let fields = [
            &request.token,
            &request.name,
            &request.address,
            &request.nonce,
            &request.installation,
        ];
        let is_too_long = fields.iter().any(|field| field.len() > MAX_FIELD_BYTES)
            || request.certificate_request.len() > MAX_CERTIFICATE_BYTES;
        if is_too_long {
            return Err("a field of the join request is too long".to_owned());
        }
        Ok(request)
    }
}

/// Access to etcd, with the content of the files.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdFiles {
    /// URL of the cluster.
    pub url: String,
    /// User.
    pub user: Option<String>,
    /// Certificate of the authority, certificate, key and password.
    pub files: [Option<String>; 4],
}

impl std::fmt::Debug for EtcdFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdFiles")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// Answer of a member. It contains the master keys of the store, unless the new member is a front.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinAnswer {
    /// Fleet.
    pub fleet: FleetId,
    /// Number of the new member.
    pub member: MemberId,
    /// Number of the member that answers.
    pub admitted_by: MemberId,
    /// Certificate of the authority (PEM).
    pub authority: String,
    /// Certificate of the new member (PEM).
    pub certificate: String,
    /// URL of the store.
    pub store: String,
    /// Content of the file with the master keys of the store.
    pub store_keys: String,
    /// Domains of sandboxes.
    pub domains: Vec<String>,
    /// Processor level of microVMs, such as `x86-64-v3`. `None` for all features of the host.
    pub cpu_level: Option<String>,
    /// Access to etcd. `None` if the records are in the store.
    pub records: Option<EtcdFiles>,
    /// Stock templates of the fleet in the store.
    pub templates: Vec<String>,
}

impl std::fmt::Debug for JoinAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinAnswer")
            .field("fleet", &self.fleet)
            .field("member", &self.member)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_bounded_and_of_this_format() {
        let request = JoinRequest {
            format: MESSAGE_FORMAT,
            token: "t".to_owned(),
            name: "n".to_owned(),
            address: "a:1".to_owned(),
            nonce: "x".to_owned(),
            installation: "i".to_owned(),
            is_front: false,
            facts: HostFacts::new("0.1.0"),
            certificate_request: "c".to_owned(),
            unix_ms: 1,
        };
        let encode = |request: &JoinRequest| serde_json::to_vec(request).unwrap();
        assert_eq!(JoinRequest::decode(&encode(&request)), Ok(request.clone()));
        for (change, reason) in [
            (
                JoinRequest {
                    format: MESSAGE_FORMAT + 1,
                    ..request.clone()
                },
                "upgrade the members",
            ),
            (
                JoinRequest {
                    format: 0,
                    ..request.clone()
                },
                "upgrade Jiffy on the host",
            ),
            (
                JoinRequest {
                    name: "n".repeat(MAX_FIELD_BYTES + 1),
                    ..request.clone()
                },
                "too long",
            ),
            (
                JoinRequest {
                    certificate_request: "n".repeat(MAX_REQUEST_BYTES),
                    ..request.clone()
                },
                "exceeds",
            ),
        ] {
            let error = JoinRequest::decode(&encode(&change)).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        let bytes = encode(&request);
        for end in 0..bytes.len() {
            assert!(JoinRequest::decode(&bytes[..end]).is_err());
        }
    }
}

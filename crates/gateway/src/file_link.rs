//! Signed links to a file, as created by E2B's clients (`download_url`, `upload_url`). If all
//! sandboxes share one host name, such a link does not name its sandbox. The gateway selects the
//! sandbox whose access token signed the link: a matching signature proves knowledge of the token.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use hyper::Method;
use hyper::http::request::Parts;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use subtle::ConstantTimeEq;

/// Path at which the agent serves files.
const FILES_PATH: &str = "/files";

/// Contents of a signed link to a file. The signature is a digest of `before_token`, the token and
/// `after_token`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileLink {
    before_token: String,
    after_token: String,
    signature: String,
}

impl FileLink {
    /// Parses the signed link of a request. `None` if the request is not for a file or has no
    /// signature.
    #[must_use]
    pub fn of(parts: &Parts) -> Option<Self> {
        if parts.uri.path() != FILES_PATH {
            return None;
        }
        let operation = if parts.method == Method::POST {
            "write"
        } else if parts.method == Method::GET || parts.method == Method::HEAD {
            "read"
        } else {
            return None;
        };
        let query = parts.uri.query()?;
        let value = |name: &str| {
            form_urlencoded::parse(query.as_bytes())
                .find(|(key, _)| key == name)
                .map(|(_, value)| value)
        };
        let signature = value("signature")?.into_owned();
        // Missing parameters are signed as empty strings.
        let path = value("path").unwrap_or(Cow::Borrowed(""));
        let user = value("username").unwrap_or(Cow::Borrowed(""));
        let after_token =
            value("signature_expiration").map_or_else(String::new, |expiry| format!(":{expiry}"));
        Some(Self {
            before_token: format!("{path}:{operation}:{user}:"),
            after_token,
            signature,
        })
    }

    /// Returns true if the link was signed with `token`. The agent checks the signature again, and
    /// the expiry.
    #[must_use]
    pub fn is_signed_with(&self, token: &str) -> bool {
        // E2B's clients define the format: "path:operation:user:token" and ":expiry" if
        // present.
        let digest = Sha256::new()
            .chain_update(&self.before_token)
            .chain_update(token)
            .chain_update(&self.after_token)
            .finalize();
        let expected = format!("v1_{}", STANDARD_NO_PAD.encode(digest));
        expected.as_bytes().ct_eq(self.signature.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;

    fn link(method: Method, uri: &str) -> Option<FileLink> {
        let request = Request::builder().method(method).uri(uri).body(()).unwrap();
        FileLink::of(&request.into_parts().0)
    }

    // From E2B's Python client 2.63.0: get_signature("/tmp/a b+c", operation, user, "token", ...).
    const READ: &str =
        "/files?path=/tmp/a%20b%2Bc&signature=v1_8Sw8NblH4RkKJlIWihmdrX9U3tVS6Oj3IU6b8MJ%2Bf9A";
    const WRITE: &str = "/files?path=/tmp/a%20b%2Bc&username=root&signature=v1_6JV%2BNxa1KFRs0d06AL2TbNXTI0Ysk7CvXGyWmt%2B6aTQ&signature_expiration=1700000000";

    #[test]
    fn a_link_matches_only_its_token() {
        let read = link(Method::GET, READ).unwrap();
        assert!(read.is_signed_with("token"));
        assert!(!read.is_signed_with("another"));
        assert!(!read.is_signed_with(""));
        let write = link(Method::POST, WRITE).unwrap();
        assert!(write.is_signed_with("token"));
    }

    #[test]
    fn a_link_is_valid_only_for_the_signed_request() {
        assert!(!link(Method::POST, READ).unwrap().is_signed_with("token"));
        for (what, instead) in [
            ("a%20b", "ab"),
            ("root", "user"),
            ("1700000000", "1800000000"),
            ("&signature_expiration=1700000000", ""),
        ] {
            let changed = link(Method::POST, &WRITE.replace(what, instead)).unwrap();
            assert!(!changed.is_signed_with("token"), "{what}");
        }
    }

    #[test]
    fn other_requests_have_no_link() {
        assert_eq!(link(Method::GET, "/files?path=/tmp/a"), None);
        assert_eq!(link(Method::GET, "/other?signature=v1_x"), None);
        assert_eq!(link(Method::DELETE, READ), None);
        assert_eq!(link(Method::GET, "/files"), None);
    }
}

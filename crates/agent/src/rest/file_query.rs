//! [`FileQuery`]: the query of a `/files` request, with the file, the user and the authentication.

use super::error::RestError;
use super::signature::{self, SignatureClaim};
use crate::filesystem::request_path::RequestPath;
use crate::server::has_valid_token;
use crate::state::Agent;
use crate::users::UserLookup;
use hyper::{HeaderMap, StatusCode, Uri};
use percent_encoding::percent_decode;

/// A decoded query.
#[derive(Debug, Default)]
pub struct FileQuery {
    /// Parameter `path`, as text and as bytes, which may be invalid UTF-8.
    path: Option<(String, Vec<u8>)>,
    username: Option<String>,
    signature: Option<String>,
    expiry: Option<String>,
}

impl FileQuery {
    /// Decodes the known parameters.
    pub fn of(uri: &Uri) -> Self {
        let mut query = Self::default();
        for (name, value) in pairs(uri) {
            let slot = match name {
                // The signature covers the text, and the file has the bytes as its name.
                "path" => {
                    let path = (decode(value), decode_bytes(value));
                    query.path = Some(path).filter(|(text, _)| !text.is_empty());
                    continue;
                }
                "username" => &mut query.username,
                "signature" => &mut query.signature,
                "signature_expiration" => &mut query.expiry,
                _ => continue,
            };
            *slot = Some(decode(value)).filter(|v| !v.is_empty());
        }
        query
    }

    /// Returns the parameter `path`, if it is not empty.
    pub fn path(&self) -> Option<RequestPath> {
        let bytes = self.path.as_ref().map(|(_, bytes)| bytes.clone());
        bytes.map(RequestPath::from_bytes)
    }

    /// Checks the token or the signature. Returns the user, which must still be looked up.
    pub fn admit(
        &self,
        agent: &Agent,
        headers: &HeaderMap,
        operation: &str,
    ) -> Result<UserLookup, RestError> {
        // A browser cannot send the token in a header, and uses a signed URL instead.
        if !has_valid_token(agent, headers) {
            self.check_signature(agent, operation)
                .map_err(|e| RestError::new(StatusCode::UNAUTHORIZED, e))?;
        }
        Ok(agent.lookup(self.username.as_deref()))
    }

    /// Checks the signature of a link to a file, which replaces the access token. `operation` is
    /// `read` or `write`.
    fn check_signature(&self, agent: &Agent, operation: &str) -> Result<(), String> {
        let Some(signature) = &self.signature else {
            return Err("missing or wrong X-Access-Token, and no signature".to_owned());
        };
        let expiry = match &self.expiry {
            Some(text) => Some(
                text.parse()
                    .map_err(|_| "signature_expiration is not a number")?,
            ),
            None => None,
        };
        let settings = agent.settings.borrow();
        let claim = SignatureClaim {
            path: self.path.as_ref().map_or("", |(text, _)| text),
            operation,
            user: self.username.as_deref().unwrap_or_default(),
            expiry,
        };
        // The token is set: without a token, `has_valid_token` accepts all requests.
        let token = settings.access_token.as_deref().unwrap_or_default();
        // Plus signs that were not escaped are decoded as spaces.
        signature::verify(claim, token, &signature.replace(' ', "+")).map_err(str::to_owned)
    }
}

/// Returns the names and the encoded values of a query.
pub fn pairs(uri: &Uri) -> impl Iterator<Item = (&str, &str)> {
    let pairs = uri.query().unwrap_or_default().split('&');
    pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

/// Returns the decoded value of the parameter `name`. Returns `None` if it is missing or empty.
pub fn parameter(uri: &Uri, name: &str) -> Option<String> {
    let mut found = pairs(uri).filter(|(n, v)| *n == name && !v.is_empty());
    found.next().map(|(_, value)| decode(value))
}

/// Decodes percent escapes and plus signs.
pub fn decode(text: &str) -> String {
    String::from_utf8_lossy(&decode_bytes(text)).into_owned()
}

/// Decodes like [`decode`], but returns bytes, which may be invalid UTF-8.
pub fn decode_bytes(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for byte in &mut bytes {
        if *byte == b'+' {
            *byte = b' ';
        }
    }
    percent_decode(&bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        assert_eq!(decode("%2Ftmp%2Fa+b%C3%A4%"), "/tmp/a bä%");
        let uri: Uri = "/files?path=%2Fx&username=&signature=v1_a%2Bb"
            .parse()
            .unwrap();
        let query = FileQuery::of(&uri);
        assert_eq!(query.path(), Some(RequestPath::Text("/x".to_owned())));
        assert_eq!(query.username, None);
        assert_eq!(query.signature.as_deref(), Some("v1_a+b"));
    }
}

//! Authentication challenges of registries (RFC 9110 11.6.1, and the distribution project's token
//! protocol).

use std::collections::BTreeMap;

/// Maximum length of a challenge in bytes.
const MAX_CHALLENGE: usize = 8 << 10;

/// Authentication method requested by a registry.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// User and password.
    Basic,
    /// Token of a token server.
    Bearer {
        /// URL of the token server.
        realm: String,
        /// Name of the registry for the token server.
        service: Option<String>,
        /// Access that the token must grant, such as `repository:NAME:pull`.
        scope: Option<String>,
    },
}

impl Challenge {
    /// Parses a `WWW-Authenticate` header. `None` if its scheme is not supported.
    pub fn parse(header: &str) -> Option<Self> {
        if header.len() > MAX_CHALLENGE {
            return None;
        }
        // Some schemes have no parameters.
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut parameters = parameters(rest);
        Some(Self::Bearer {
            // Without a realm, the token server is unknown.
            realm: parameters.remove("realm")?,
            service: parameters.remove("service"),
            scope: parameters.remove("scope"),
        })
    }
}

/// Parses `name=value` and `name="value"`, separated by commas.
fn parameters(text: &str) -> BTreeMap<String, String> {
    let mut parameters = BTreeMap::new();
    let mut rest = text;
    while let Some((name, after)) = rest.split_once('=') {
        let name = name.trim_matches([' ', ',', '\t']).to_ascii_lowercase();
        let value;
        (value, rest) = match after.strip_prefix('"') {
            Some(quoted) => unquoted(quoted),
            None => {
                let (value, rest) = after.split_once(',').unwrap_or((after, ""));
                (value.trim().to_owned(), rest)
            }
        };
        parameters.insert(name, value);
    }
    parameters
}

/// Parses a quoted string after its opening quote. Returns the string and the remaining text.
fn unquoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return (value, text.get(at + 1..).unwrap_or_default()),
            // A backslash escapes the next character.
            '\\' => value.extend(characters.next().map(|(_, c)| c)),
            c => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed_in_any_order_and_quoting() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/alpine:pull,push""#;
        let expected = Challenge::Bearer {
            realm: "https://auth.docker.io/token".to_owned(),
            service: Some("registry.docker.io".to_owned()),
            scope: Some("repository:library/alpine:pull,push".to_owned()),
        };
        assert_eq!(Challenge::parse(hub), Some(expected));
        let bare = Challenge::parse(r#"bearer service=x , realm="a\"b""#);
        let expected = Challenge::Bearer {
            realm: "a\"b".to_owned(),
            service: Some("x".to_owned()),
            scope: None,
        };
        assert_eq!(bare, Some(expected));
        assert_eq!(
            Challenge::parse("Basic realm=\"x\""),
            Some(Challenge::Basic)
        );
        for unknown in ["Bearer scope=\"x\"", "Negotiate", "", "Bearer realm"] {
            assert_eq!(Challenge::parse(unknown), None, "{unknown}");
        }
        assert_eq!(
            Challenge::parse(&format!("Bearer realm=\"{}\"", "x".repeat(9000))),
            None
        );
    }
}

//! Value of a header in a rule: text with references to secrets and identity tokens.
//!
//! `Bearer ${e2b.secrets.NAME}` refers to a secret by name, and
//! `Bearer ${e2b.identity.tokens.NAME}` to an identity token of the sandbox.
//! `${jiffy.sealed.TEXT}` is a text that this host has encrypted for the record of a sandbox.
//! Clients cannot write the last form.

use crate::secret::{checked_name, is_header_text};
use crate::{HostKey, SecretError, Secrets};
use data_encoding::BASE64URL_NOPAD;
use zeroize::Zeroizing;

/// Maximum length in bytes of a value in a rule, before secrets are inserted.
const MAX_TEMPLATE: usize = 2048;
/// Maximum length in bytes of a header after secrets were inserted.
const MAX_HEADER_VALUE: usize = 16 * 1024;
const SECRET: &str = "e2b.secrets.";
const TOKEN: &str = "e2b.identity.tokens.";
const SEALED: &str = "jiffy.sealed.";

/// Reason why the value of a header is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The value is too long, or contains control characters.
    #[error("use at most {MAX_TEMPLATE} bytes without control characters")]
    Text,
    /// A reference is incomplete or unknown.
    #[error(
        "`${{{0}}}` is not a reference: use `${{e2b.secrets.NAME}}` or \
         `${{e2b.identity.tokens.NAME}}`"
    )]
    Reference(String),
    /// The owner has no secret with this name.
    #[error("the secret `{0}` does not exist")]
    Unknown(String),
    /// The sandbox has no identity token with this name.
    #[error("the sandbox has no identity token `{0}`: name it in `iam.tokens` of the create")]
    UnknownToken(String),
    /// A secret cannot be read, or a token cannot be issued.
    #[error("{0}")]
    Unreadable(String),
}

/// Part of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    /// Name of a secret, in lower case.
    Secret(String),
    /// Name of an identity token.
    Token(String),
    Sealed(Vec<u8>),
}

/// Value of a header in a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTemplate(Vec<Part>);

/// Returns the context with which a text of `owner` is encrypted. The text can only be decrypted
/// with the same context.
fn context(owner: &str) -> String {
    format!("header {owner}")
}

impl HeaderTemplate {
    /// Parses the value that a client has written.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let parsed = Self::parse_stored(text)?;
        let is_sealed = |part: &Part| matches!(part, Part::Sealed(_));
        if parsed.0.iter().any(is_sealed) {
            return Err(TemplateError::Reference(format!("{SEALED}...")));
        }
        if text.len() > MAX_TEMPLATE {
            return Err(TemplateError::Text);
        }
        Ok(parsed)
    }

    /// Parses a value in the record of a sandbox.
    pub fn parse_stored(text: &str) -> Result<Self, TemplateError> {
        // A stored value may be longer than a client's: encryption and base64 enlarge sealed texts.
        if text.len() > 2 * MAX_TEMPLATE + MAX_HEADER_VALUE || !is_header_text(text) {
            return Err(TemplateError::Text);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, reference)) = rest.split_once("${") {
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            let shown = || TemplateError::Reference(reference.chars().take(64).collect());
            let (name, after) = reference.split_once('}').ok_or_else(shown)?;
            let unknown = || TemplateError::Reference(name.chars().take(64).collect());
            let part = if let Some(name) = name.strip_prefix(SECRET) {
                Part::Secret(checked_name(name).map_err(|_| unknown())?)
            } else if let Some(name) = name.strip_prefix(TOKEN) {
                if name.is_empty() || name.contains(['{', '$']) {
                    return Err(unknown());
                }
                Part::Token(name.to_owned())
            } else if let Some(sealed) = name.strip_prefix(SEALED) {
                let sealed = BASE64URL_NOPAD.decode(sealed.as_bytes());
                Part::Sealed(sealed.map_err(|_| unknown())?)
            } else {
                return Err(unknown());
            };
            parts.push(part);
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Ok(Self(parts))
    }

    /// Returns the names of the secrets in the value.
    pub fn secrets(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Secret(name) => Some(name.as_str()),
            Part::Text(_) | Part::Token(_) | Part::Sealed(_) => None,
        })
    }

    /// Returns the names of the identity tokens in the value.
    pub fn tokens(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Token(name) => Some(name.as_str()),
            Part::Text(_) | Part::Secret(_) | Part::Sealed(_) => None,
        })
    }

    /// Returns whether the value is confidential: it refers to a secret or an identity token.
    #[must_use]
    pub fn is_confidential(&self) -> bool {
        self.secrets().chain(self.tokens()).next().is_some()
    }

    /// Encrypts a text for the record of a sandbox of `owner`, in the form of a value.
    pub fn seal(key: &HostKey, owner: &str, text: &str) -> Result<String, SecretError> {
        let sealed = key.seal(&context(owner), text.as_bytes())?;
        Ok(format!("${{{SEALED}{}}}", BASE64URL_NOPAD.encode(&sealed)))
    }

    /// Returns the value with the secrets of `owner`. `issue` issues the identity token with a
    /// name.
    pub fn resolve(
        &self,
        secrets: &Secrets,
        owner: &str,
        issue: impl Fn(&str) -> Result<Zeroizing<String>, TemplateError>,
    ) -> Result<Zeroizing<String>, TemplateError> {
        // Reserve the maximum length at once: a reallocation would leave a copy of a secret in
        // freed memory.
        let mut value = Zeroizing::new(String::with_capacity(MAX_HEADER_VALUE));
        for part in &self.0 {
            let text = match part {
                Part::Text(text) => Zeroizing::new(text.clone()),
                Part::Secret(name) => secrets
                    .value(owner, name)
                    .map_err(|e| TemplateError::Unreadable(e.to_string()))?
                    .ok_or_else(|| TemplateError::Unknown(name.clone()))?,
                Part::Token(name) => issue(name)?,
                Part::Sealed(sealed) => unsealed(secrets.host_key(), owner, sealed)?,
            };
            if value.len() + text.len() > MAX_HEADER_VALUE {
                return Err(TemplateError::Text);
            }
            value.push_str(&text);
        }
        if is_header_text(&value) {
            Ok(value)
        } else {
            Err(TemplateError::Text)
        }
    }
}

/// Decrypts a value of `owner`.
fn unsealed(key: &HostKey, owner: &str, sealed: &[u8]) -> Result<Zeroizing<String>, TemplateError> {
    let plain = key.open_sealed(&context(owner), sealed);
    let text = plain.and_then(|plain| {
        let text = std::str::from_utf8(&plain).ok()?;
        Some(Zeroizing::new(text.to_owned()))
    });
    text.ok_or_else(|| {
        TemplateError::Unreadable(
            "the value was written on another host or by another key: set the rules again"
                .to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::NewSecret;
    use std::collections::BTreeMap;

    /// Issues no identity token.
    fn none(name: &str) -> Result<Zeroizing<String>, TemplateError> {
        Err(TemplateError::UnknownToken(name.to_owned()))
    }

    #[test]
    fn identity_tokens_are_issued_for_each_value() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let template = HeaderTemplate::parse("Bearer ${e2b.identity.tokens.my aws}.").unwrap();
        assert_eq!(template.tokens().collect::<Vec<_>>(), ["my aws"]);
        assert!(template.is_confidential() && template.secrets().next().is_none());
        let issue = |name: &str| Ok(Zeroizing::new(format!("<{name}>")));
        let value = template.resolve(&secrets, "a", issue).unwrap();
        assert_eq!(value.as_str(), "Bearer <my aws>.");
        template.resolve(&secrets, "a", none).unwrap_err();
    }

    #[test]
    fn references_are_replaced_by_secrets_of_the_owner() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let new = NewSecret {
            name: "token".to_owned(),
            value: Zeroizing::new("abc".to_owned()),
            metadata: BTreeMap::new(),
        };
        secrets.create("a", &new).unwrap();
        let template = HeaderTemplate::parse("Bearer ${e2b.secrets.Token}!").unwrap();
        assert_eq!(template.secrets().collect::<Vec<_>>(), ["token"]);
        assert_eq!(
            template.resolve(&secrets, "a", none).unwrap().as_str(),
            "Bearer abc!"
        );
        let missing = template.resolve(&secrets, "b", none).unwrap_err();
        assert_eq!(missing, TemplateError::Unknown("token".to_owned()));
        // A value is not parsed again after a secret was inserted.
        secrets
            .update("a", "token", "${e2b.secrets.other}", None)
            .unwrap();
        let value = template.resolve(&secrets, "a", none).unwrap();
        assert_eq!(value.as_str(), "Bearer ${e2b.secrets.other}!");
    }

    #[test]
    fn sealed_texts_are_read_by_the_same_owner_and_never_accepted_from_clients() {
        let home = tempfile::tempdir().unwrap();
        let secrets = Secrets::open(home.path()).unwrap();
        let text = HeaderTemplate::seal(secrets.host_key(), "a", "literal").unwrap();
        assert!(!text.contains("literal"));
        HeaderTemplate::parse(&text).unwrap_err();
        let stored = HeaderTemplate::parse_stored(&text).unwrap();
        assert_eq!(
            stored.resolve(&secrets, "a", none).unwrap().as_str(),
            "literal"
        );
        stored.resolve(&secrets, "b", none).unwrap_err();
    }

    #[test]
    fn invalid_values_are_rejected() {
        for bad in [
            "a\r\nb: c",
            "a\nb",
            "a\0",
            "${e2b.secrets.}",
            "${e2b.secrets.a",
            "${e2b.secrets.a b}",
            "${e2b.identity.tokens.}",
            "${e2b.identity.tokens.a${b}",
            "${e2b.identity.x}",
            "${HOME}",
            &"a".repeat(MAX_TEMPLATE + 1),
        ] {
            assert!(HeaderTemplate::parse(bad).is_err(), "{bad:?}");
        }
        assert!(HeaderTemplate::parse("$5 {x} $").is_ok());
    }
}

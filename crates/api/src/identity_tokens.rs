//! Validation of the identity tokens that a client specifies when it creates a sandbox. An identity
//! token is a signed statement about the sandbox. The host adds the token to HTTP requests that
//! programs in the sandbox send.

use crate::app::App;
use crate::error::ApiError;
use crate::lookup::short;
use jiffy_api_types::{
    IdentityToken, IdentityTokens, MAX_AUDIENCE, MAX_IDENTITY_TOKENS, MAX_TOKEN_NAME, NewIdentity,
};
use jiffy_identity::TokenIssuer;
use std::sync::Arc;

fn invalid(message: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("`iam.tokens`: {message}"))
}

impl App {
    /// Adds the issuer of identity tokens. Without an issuer, the creation of a sandbox with such
    /// tokens is rejected.
    pub fn with_issuer(mut self, issuer: Option<Arc<TokenIssuer>>) -> Self {
        self.issuer = issuer;
        self
    }

    /// Returns the checked identity tokens of a new sandbox.
    pub(crate) fn identity_tokens(
        &self,
        identity: Option<NewIdentity>,
    ) -> Result<IdentityTokens, ApiError> {
        let tokens = identity.and_then(|identity| identity.tokens);
        let tokens = tokens.unwrap_or_default();
        if tokens.is_empty() {
            return Ok(tokens);
        }
        if self.issuer.is_none() {
            return Err(ApiError::unsupported_option(
                "`iam.tokens` is not supported: this host issues no identity tokens; its operator \
                 starts the daemon with `--identity-issuer URL`",
            ));
        }
        check(&tokens)?;
        Ok(tokens)
    }
}

/// Checks the number of tokens, their names and their audiences.
fn check(tokens: &IdentityTokens) -> Result<(), ApiError> {
    if tokens.len() > MAX_IDENTITY_TOKENS {
        return Err(invalid(format!(
            "at most {MAX_IDENTITY_TOKENS} are allowed"
        )));
    }
    for (name, IdentityToken { audience, .. }) in tokens {
        // Rules for headers refer to a token by its name in braces, so a name must not contain
        // braces or control characters.
        let is_valid = |c: char| !c.is_control() && !"{}".contains(c);
        if !(1..=MAX_TOKEN_NAME).contains(&name.chars().count()) || !name.chars().all(is_valid) {
            return Err(invalid(format!(
                "`{}` is not a name: use 1 to {MAX_TOKEN_NAME} characters without `{{`, `}}` and \
                 control characters",
                short(name)
            )));
        }
        if !(1..=MAX_AUDIENCE).contains(&audience.chars().count()) {
            return Err(invalid(format!(
                "the audience of `{}` must have 1 to {MAX_AUDIENCE} characters",
                short(name)
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `count` tokens for an audience. The first has the name `name`.
    fn tokens(name: &str, audience: &str, count: usize) -> IdentityTokens {
        let token = IdentityToken {
            audience: audience.to_owned(),
            token_type: Default::default(),
        };
        let names = (0..count).map(|number| match number {
            0 => name.to_owned(),
            number => format!("token{number}"),
        });
        names.map(|name| (name, token.clone())).collect()
    }

    #[test]
    fn names_audiences_and_their_number_are_bounded() {
        check(&tokens(
            "my aws\u{e9}",
            "sts.amazonaws.com",
            MAX_IDENTITY_TOKENS,
        ))
        .unwrap();
        let (long_name, long_audience) = ("a".repeat(129), "a".repeat(1025));
        for (name, audience, count) in [
            ("", "a", 1),
            ("a}b", "a", 1),
            ("{", "a", 1),
            ("a\n", "a", 1),
            ("a\u{85}", "a", 1),
            (&long_name, "a", 1),
            ("a", "", 1),
            ("a", &long_audience, 1),
            ("a", "a", MAX_IDENTITY_TOKENS + 1),
        ] {
            let error = check(&tokens(name, audience, count)).unwrap_err();
            assert_eq!(error.status.as_u16(), 400, "{name}");
        }
    }
}

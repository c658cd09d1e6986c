//! Identity tokens of sandboxes: signed statements about a sandbox that headers of its requests
//! contain.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

/// Maximum number of identity tokens of a sandbox.
pub const MAX_IDENTITY_TOKENS: usize = 16;
/// Maximum length of the name of an identity token in characters.
pub const MAX_TOKEN_NAME: usize = 128;
/// Maximum length of the audience of an identity token in characters.
pub const MAX_AUDIENCE: usize = 1024;

/// Format of an identity token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IdentityTokenType {
    /// JSON Web Token whose subject is a SPIFFE ID.
    #[default]
    #[serde(rename = "JWT-SVID")]
    JwtSvid,
}

/// Identity token of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IdentityToken {
    /// Service that the token is for: the claim `aud`.
    #[schemars(length(min = 1, max = MAX_AUDIENCE))]
    pub audience: String,
    /// Format of the token.
    pub token_type: IdentityTokenType,
}

/// Identity tokens of a sandbox by name.
pub type IdentityTokens = BTreeMap<String, IdentityToken>;

/// Returns the schema of the tokens in a request.
fn tokens_schema(generator: &mut SchemaGenerator) -> Schema {
    let token = generator.subschema_for::<IdentityToken>();
    let schema = json!({
        "type": ["object", "null"], "maxProperties": MAX_IDENTITY_TOKENS,
        "propertyNames": { "pattern": "^[^{}\\u0000-\\u001f\\u007f-\\u009f]+$", "maxLength": MAX_TOKEN_NAME },
        "additionalProperties": token,
    });
    // The value above is an object.
    schema.try_into().unwrap_or_default()
}

/// Identity of a new sandbox towards other services.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NewIdentity {
    /// Tokens by name. `${e2b.identity.tokens.NAME}` in a header of `network.rules` stands for the
    /// token. Requires `jiffy serve --identity-issuer`.
    #[schemars(schema_with = "tokens_schema")]
    pub tokens: Option<IdentityTokens>,
}

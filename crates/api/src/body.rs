//! Request bodies: extractors for JSON of bounded size.

mod spelling;

pub(crate) use spelling::folded;

use crate::error::ApiError;
use crate::ignored_fields::IgnoredFields;
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_path_to_error::Track;
use spelling::{Distinct, Spelled};

/// Maximum size of a request body in bytes.
pub(crate) const MAX_BODY: usize = 1 << 20;

/// A mandatory body.
pub(crate) struct Required<T>(pub T);

/// A body that may be absent, empty or `null`.
pub(crate) struct Optional<T>(pub T);

/// The bytes of a body, for handlers that parse it themselves. [`parse`] adds the names of unknown
/// fields to the ignored fields. The content type, if present, must be JSON.
pub(crate) struct Raw(pub Bytes, pub IgnoredFields);

impl<S: Send + Sync> FromRequest<S> for Raw {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let ignored = parts.extensions.remove().unwrap_or_default();
        let bytes = read(body).await?;
        // Clients often omit the content type of an empty body.
        if !bytes.is_empty() && !is_json(&parts.headers) {
            return Err(ApiError::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "unsupported_media_type",
                "the body must be `application/json`",
            ));
        }
        Ok(Self(bytes, ignored))
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Required<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let Raw(bytes, ignored) = Raw::from_request(request, state).await?;
        Ok(Self(parse(&bytes, &ignored)?))
    }
}

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for Optional<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let Raw(bytes, ignored) = Raw::from_request(request, state).await?;
        let text = bytes.trim_ascii();
        // Clients in some languages send `null` for absent options.
        if text.is_empty() || text == b"null" {
            return Ok(Self(T::default()));
        }
        Ok(Self(parse(text, &ignored)?))
    }
}

/// Parses a JSON object as `T`. Names of fields are accepted in camel case and in snake case. Adds
/// unknown fields to `ignored`.
pub(crate) fn parse<T: DeserializeOwned>(
    bytes: &[u8],
    ignored: &IgnoredFields,
) -> Result<T, ApiError> {
    let text = bytes.trim_ascii();
    if text.is_empty() {
        return Err(ApiError::invalid("the request needs a body: a JSON object"));
    }
    if !text.starts_with(b"{") {
        return Err(ApiError::invalid("the body must be a JSON object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    // Parse in two steps: duplicate names must be rejected before names are matched to fields.
    let Distinct(value) = Distinct::deserialize(&mut reader)
        .map_err(|e| ApiError::invalid(format!("the body is not valid JSON: {e}")))?;
    reader
        .end()
        .map_err(|e| ApiError::invalid(format!("the body has data after its JSON value: {e}")))?;
    // The path names the invalid field in the error.
    let mut track = Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(Spelled(value), &mut track);
    serde_ignored::deserialize(deserializer, |path| ignored.add(&path)).map_err(|e| {
        match track.path().to_string().as_str() {
            "." => ApiError::invalid(format!("the body is invalid: {e}")),
            path => ApiError::invalid(format!("`{path}` is invalid: {e}")),
        }
    })
}

/// Parses a JSON object whose unknown fields are rejected, or are reported by a later parser.
pub(crate) fn parse_part<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    parse(bytes, &IgnoredFields::default())
}

/// Reads a body of at most [`MAX_BODY`] bytes.
async fn read(body: Body) -> Result<Bytes, ApiError> {
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(e) if e.is::<LengthLimitError>() => Err(ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!("the body is longer than {MAX_BODY} bytes"),
        )),
        Err(e) => Err(ApiError::invalid(format!("the body cannot be read: {e}"))),
    }
}

/// Returns whether the content type is JSON or absent.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return true;
    };
    let value = value.to_str().unwrap_or_default();
    let kind = value.split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Thing {
        inner: BTreeMap<String, String>,
    }

    #[test]
    fn an_error_names_the_field() {
        let ignored = IgnoredFields::default();
        let parsed = |text: &str| parse::<Thing>(text.as_bytes(), &ignored);
        let message = |text: &str| parsed(text).unwrap_err().message;
        assert!(message(r#"{"inner":{"a":1}}"#).contains("`inner"));
        assert!(message("[]").contains("object"));
        assert!(message(r#"{"inner":[]}"#).contains("`inner"));
        assert!(message("").contains("needs a body"));
        assert!(message("{} x").contains("has data after its JSON value"));
        assert!(message("{").contains("not valid JSON"));
        assert!(parsed(" {} ").unwrap().inner.is_empty());
    }
}

//! Reads the answer of a host to a create.

use crate::error::ApiError;
use axum::body::{Body, to_bytes};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

/// Maximum size of the answer to a create.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Reads a response. Returns it again, with the value of its body.
async fn buffered(response: Response) -> (Response, Value) {
    let (parts, body) = response.into_parts();
    match to_bytes(body, MAX_ANSWER_BYTES).await {
        Ok(bytes) => {
            let value = serde_json::from_slice(&bytes).unwrap_or_default();
            (Response::from_parts(parts, Body::from(bytes)), value)
        }
        Err(error) => {
            let error = ApiError::internal(format!("cannot read the answer of a host: {error}"));
            (error.into_response(), Value::Null)
        }
    }
}

/// Returns a response with the id of the new sandbox.
pub(super) async fn read(response: Response) -> (Response, Option<String>) {
    let (response, value) = buffered(response).await;
    let id = value["sandboxID"].as_str().map(str::to_owned);
    (response, id)
}

/// Returns a response with its error code and message.
pub(super) async fn error_of(response: Response) -> (Response, String, String) {
    let (response, value) = buffered(response).await;
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    (response, text("error_code"), text("message"))
}

//! `GET /compare`: compares the files of two sandboxes or snapshots.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::page::{NEXT, unknown_token};
use crate::query::Query;
use crate::wire::comparison::{content, difference, summary};
use axum::Json;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiffy_api_types::{ComparedFile, Comparison};
use jiffy_engine_api::new_id;
use jiffy_sandbox_manager::ComparedFiles;
use std::sync::Arc;

/// Maximum number of differences on a page.
pub(crate) const MAX_DIFFERENCES: u64 = 10_000;
/// Default number of differences on a page.
pub(crate) const DEFAULT_DIFFERENCES: u64 = 1000;
/// Maximum length of a path in bytes, as in Linux.
pub(crate) const MAX_PATH: usize = 4096;
/// Maximum length of a token in bytes.
const MAX_TOKEN_BYTES: usize = 128;

/// Compares two objects, or returns both contents of a file with `path`.
pub(super) async fn compare(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    // A read-only caller cannot read files of sandboxes.
    if caller.is_read_only() {
        return Err(ApiError::read_only());
    }
    let (Some(a), Some(b)) = (query.get("a"), query.get("b")) else {
        return Err(ApiError::invalid(
            "specify two sandboxes or snapshots as `a` and `b`",
        ));
    };
    let limit = query.number("limit", 1..=MAX_DIFFERENCES)?;
    let limit = usize::try_from(limit.unwrap_or(DEFAULT_DIFFERENCES)).unwrap_or(usize::MAX);
    // `_held_a` and `_held_b` protect fetched snapshots from garbage collection until the
    // comparison is complete. A further page is part of a stored result and needs no object, but
    // the look-up still checks the caller's access.
    let (a, _held_a) = app.object_or_fetched(&caller, a).await?;
    let (b, _held_b) = app.object_or_fetched(&caller, b).await?;
    let owner = caller.owner_id();
    if let Some(path) = query.get("path") {
        if !path.starts_with('/') || path.len() > MAX_PATH || path.contains('\0') {
            return Err(ApiError::invalid(format!(
                "`path` must be absolute and have at most {MAX_PATH} bytes"
            )));
        }
        let contents = app.sandboxes.compare_file(owner, a, b, path.to_owned());
        let [a, b] = contents.await?;
        let answer = Comparison {
            summary: None,
            changes: Vec::new(),
            file: Some(ComparedFile {
                path: path.to_owned(),
                a: a.map(content),
                b: b.map(content),
            }),
            incomplete: false,
            start_ms: 0.0,
            compare_ms: 0.0,
        };
        return Ok(Json(answer).into_response());
    }
    let (id, from, result) = match query.get("nextToken") {
        Some(token) => {
            let (id, from) = parse_token(token).ok_or_else(unknown_token)?;
            let result = app.comparisons.get(&id, owner.as_deref());
            let expired =
                || ApiError::invalid("the result of the comparison has expired: repeat it");
            (id, from, result.ok_or_else(expired)?)
        }
        None => {
            let result = Arc::new(app.sandboxes.compare(owner.clone(), a, b).await?);
            let id = new_id().map_err(|e| ApiError::internal(e.to_string()))?;
            if result.differences.len() > limit {
                app.comparisons.add(id.clone(), owner, result.clone());
            }
            (id, 0, result)
        }
    };
    Ok(page(&id, from, limit, &result))
}

/// Returns a page of a result, which begins with the difference number `from`.
fn page(id: &str, from: usize, limit: usize, result: &ComparedFiles) -> Response {
    let all = &result.differences;
    let end = from.saturating_add(limit).min(all.len());
    let changes = all.get(from..end).unwrap_or_default();
    let answer = Comparison {
        summary: Some(summary(all)),
        changes: changes.iter().map(difference).collect(),
        file: None,
        incomplete: result.is_incomplete,
        start_ms: result.start_ms,
        compare_ms: result.compare_ms,
    };
    let mut response = Json(answer).into_response();
    let token = URL_SAFE_NO_PAD.encode(format!("{id}:{end}"));
    if end < all.len()
        && let Ok(next) = HeaderValue::from_str(&token)
    {
        response.headers_mut().insert(NEXT, next);
    }
    response
}

/// Parses the token of the next page: the id of the comparison, and the number of its first item.
fn parse_token(token: &str) -> Option<(String, usize)> {
    if token.len() > MAX_TOKEN_BYTES {
        return None;
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (id, from) = text.split_once(':')?;
    Some((id.to_owned(), from.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_positions_or_refused() {
        let token = URL_SAFE_NO_PAD.encode("abc:20");
        assert_eq!(parse_token(&token), Some(("abc".to_owned(), 20)));
        for bad in ["", "!", &URL_SAFE_NO_PAD.encode("abc"), &"x".repeat(200)] {
            assert_eq!(parse_token(bad), None, "{bad}");
        }
    }
}

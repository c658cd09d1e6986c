//! Files of the web console's page, which are embedded in the program.
//!
//! `web/build.mjs` builds and compresses the files.

use crate::NOT_BUILT;
use crate::checks::PAGE_POLICY;
use crate::refusal::Refusal;
use axum::body::Body;
use axum::http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use flate2::read::GzDecoder;
use jiffy_engine_api::random_bytes;
use std::io::Read;

/// An embedded file with its compressed forms.
pub(crate) struct File {
    /// Path below the root of the console.
    name: &'static str,
    /// `None` if a compressed form exists.
    plain: Option<&'static [u8]>,
    brotli: Option<&'static [u8]>,
    gzip: Option<&'static [u8]>,
}

impl File {
    /// Returns the content without compression. Clients that accept no compression are rare.
    fn content(&self) -> Bytes {
        match (self.plain, self.gzip) {
            (Some(plain), _) => Bytes::from_static(plain),
            (None, Some(gzip)) => {
                let mut content = Vec::new();
                // The file was compressed by the build, so an error is impossible.
                let _ = GzDecoder::new(gzip).read_to_end(&mut content);
                content.into()
            }
            (None, None) => Bytes::new(),
        }
    }
}

// Defines `FILES`.
include!(concat!(env!("OUT_DIR"), "/files.rs"));

/// Text in `index.html` that is replaced with the nonce of the response. A *nonce* is a random text
/// in the security policy of one response. Browsers apply only styles with this text.
const NONCE_MARK: &str = "JIFFY_NONCE";

/// Answers requests for files of the page. Each other path is a view of the page: the response is
/// `index.html`, whose script selects the view by the path.
pub(crate) async fn page(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    if !matches!(method, Method::GET | Method::HEAD) {
        return Refusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            "this path is a page: use GET",
        )
        .into_response();
    }
    let path = uri.path().trim_start_matches('/');
    if let Some(file) = FILES.iter().find(|file| file.name == path && path != INDEX) {
        return asset(file, &headers);
    }
    if path.starts_with("assets/") {
        let message = "the file belongs to another version of the console: reload the page";
        return Refusal::new(StatusCode::NOT_FOUND, "not_found", message).into_response();
    }
    match FILES.iter().find(|file| file.name == INDEX) {
        Some(file) => index(file),
        None => NOT_BUILT.into_response(),
    }
}

const INDEX: &str = "index.html";

/// Answers with a file whose name contains a hash of its content.
fn asset(file: &File, headers: &HeaderMap) -> Response {
    let (encoding, bytes) = match (file.brotli, file.gzip) {
        (Some(brotli), _) if accepts(headers, "br") => (Some("br"), Bytes::from_static(brotli)),
        (_, Some(gzip)) if accepts(headers, "gzip") => (Some("gzip"), Bytes::from_static(gzip)),
        _ => (None, file.content()),
    };
    let mut response = Response::new(Body::from(bytes));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static(content_type(file.name)),
    );
    headers.insert(
        CACHE_CONTROL,
        HeaderValue::from_static("public, max-age=31536000, immutable"),
    );
    headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    if let Some(encoding) = encoding {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(encoding));
    }
    response
}

/// Answers with `index.html` and a new nonce. The response has neither `ETag` nor `Last-Modified`:
/// a 304 response would combine the cached body with the policy of another nonce.
fn index(file: &File) -> Response {
    let nonce = match random_bytes::<16>() {
        Ok(random) => URL_SAFE_NO_PAD.encode(random),
        Err(e) => return Refusal::from(e).into_response(),
    };
    let text = String::from_utf8_lossy(&file.content()).replace(NONCE_MARK, &nonce);
    let policy = PAGE_POLICY.replace(NONCE_MARK, &nonce);
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // The encoded nonce contains only letters, digits, `-` and `_`.
    if let Ok(policy) = HeaderValue::try_from(policy) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
    response
}

/// Returns the media type of a file, by its extension.
fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("woff2") => "font/woff2",
        _ => "application/octet-stream",
    }
}

/// Returns whether the client accepts the encoding.
fn accepts(headers: &HeaderMap, encoding: &str) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter();
    let mut listed = values
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','));
    listed.any(|item| {
        let mut parts = item.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        name.eq_ignore_ascii_case(encoding) && parts.all(|part| part != "q=0")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_used_only_if_the_client_accepts_them() {
        let accepts_of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_str(text).unwrap());
            (accepts(&headers, "br"), accepts(&headers, "gzip"))
        };
        assert_eq!(accepts_of("gzip, deflate, br, zstd"), (true, true));
        assert_eq!(accepts_of("br;q=0, GZIP;q=0.5"), (false, true));
        assert_eq!(accepts_of("identity"), (false, false));
        assert!(!accepts(&HeaderMap::new(), "br"));
    }

    #[tokio::test]
    async fn each_page_has_a_nonce_of_its_own_or_explains_that_it_is_missing() {
        let mut nonces = Vec::new();
        for path in ["/", "/sandboxes/abc"] {
            let uri = Uri::from_static(path);
            let response = page(Method::GET, uri, HeaderMap::new()).await;
            if FILES.is_empty() {
                assert_eq!(response.status(), StatusCode::NOT_IMPLEMENTED);
                continue;
            }
            let policy = response.headers()[CONTENT_SECURITY_POLICY]
                .to_str()
                .unwrap();
            assert!(!policy.contains("unsafe") && !policy.contains(NONCE_MARK));
            nonces.push(policy.to_owned());
        }
        nonces.dedup();
        assert!(FILES.is_empty() || nonces.len() == 2);
    }
}

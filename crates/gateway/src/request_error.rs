//! Errors that the gateway itself returns to clients. E2B's SDKs match the status and the phrases
//! "was not found" and "port is not open", so their wording is part of the API.

use crate::body::{Body, full};
use crate::other_hosts::MOVED;
use hyper::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderMap, HeaderValue,
    RETRY_AFTER,
};
use hyper::{Response, StatusCode};
use serde::Serialize;
use thiserror::Error;

/// Reason why a request did not reach a guest.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// Routing rejected the request, with this status and reason.
    #[error("{1}")]
    Refused(StatusCode, &'static str),
    /// Path of the agent that clients must not call.
    #[error("This path is for the host of the sandbox only")]
    HostOnly,
    /// The token is missing or wrong.
    #[error(
        "The sandbox is not open to the public: send its token as E2B-Traffic-Access-Token, or use a signed link"
    )]
    Token,
    /// The signed link is invalid.
    #[error(
        "The link is not valid for this sandbox and port, or it has expired: request a new one"
    )]
    Link,
    /// The sandbox does not exist.
    #[error("The sandbox was not found")]
    NotFound,
    /// The sandbox is not running and must not be resumed.
    #[error("The sandbox was not found: it is not running")]
    NotRunning,
    /// No server listens on the port.
    #[error("The sandbox is running but port is not open")]
    PortClosed,
    /// The sandbox is paused and cannot be resumed now.
    #[error("The sandbox remains paused: {0}")]
    Limit(String),
    /// The owner has too many requests and streams in flight.
    #[error("{0}")]
    ExchangeLimit(String),
    /// The sandbox is unreachable.
    #[error("The sandbox cannot be reached: {0}")]
    Unavailable(String),
    /// The host of the fleet that has the sandbox is unreachable.
    #[error("The sandbox cannot be reached: {0}: try again")]
    HostUnavailable(String),
    /// The request was forwarded to this host, which does not have the sandbox.
    #[error("The sandbox is not on this host")]
    Moved,
    /// The limit of connections into this sandbox is reached.
    #[error("Too many requests to this sandbox are in flight: try again later")]
    Busy,
    /// The limit of requests in flight is reached.
    #[error("Too many requests are in flight: try again later")]
    Overloaded,
}

/// Sandbox and port of a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedTarget<'a> {
    /// Sandbox id.
    pub id: &'a str,
    /// TCP port in the sandbox.
    pub port: u16,
}

/// JSON body of an error response. The field names are part of the API.
#[derive(Serialize)]
struct GatewayErrorBody<'a> {
    #[serde(rename = "sandboxId", skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<&'a str>,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

impl RequestError {
    /// Returns the status of the response.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Refused(status, _) => *status,
            Self::HostOnly | Self::Token | Self::Link => StatusCode::FORBIDDEN,
            Self::NotFound | Self::NotRunning | Self::PortClosed | Self::Unavailable(_) => {
                StatusCode::BAD_GATEWAY
            }
            Self::Limit(_) | Self::ExchangeLimit(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Busy | Self::Overloaded | Self::HostUnavailable(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Moved => StatusCode::MISDIRECTED_REQUEST,
        }
    }

    /// Returns the response as an HTML page if `page`, otherwise as JSON.
    #[must_use]
    pub fn answer(&self, about: Option<FailedTarget<'_>>, page: bool) -> Response<Body> {
        let message = self.to_string();
        let mut answer = if page {
            let mut answer = Response::new(full(self.page(about, &message)));
            let headers = answer.headers_mut();
            // An explicit character set, so that browsers do not guess one from the text.
            let html = HeaderValue::from_static("text/html; charset=utf-8");
            headers.insert(CONTENT_TYPE, html);
            headers.insert(
                // The page has no scripts, so none may run even if the escaping were incomplete.
                CONTENT_SECURITY_POLICY,
                HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'"),
            );
            answer
        } else {
            let mut answer = Response::new(full(self.json(about, &message)));
            let json = HeaderValue::from_static("application/json");
            answer.headers_mut().insert(CONTENT_TYPE, json);
            answer
        };
        let status = self.status();
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        // The error may be over at the next request.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if *self == Self::Moved {
            headers.insert(MOVED, HeaderValue::from_static("1"));
        }
        if matches!(self, Self::Limit(_)) {
            // An immediate retry would fail as well.
            headers.insert("should-retry", HeaderValue::from_static("false"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE || matches!(self, Self::ExchangeLimit(_)) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        answer
    }

    /// Returns the error as JSON.
    fn json(&self, about: Option<FailedTarget<'_>>, message: &str) -> String {
        let json = GatewayErrorBody {
            sandbox_id: about.map(|about| about.id),
            message,
            port: about
                // Only this error contains the port, as in E2B's proxy.
                .filter(|_| *self == Self::PortClosed)
                .map(|about| about.port),
            // E2B's clients read the status from the body.
            code: self.status().as_u16(),
        };
        serde_json::to_string(&json).unwrap_or_default()
    }

    /// Returns the error as an HTML page for people.
    fn page(&self, about: Option<FailedTarget<'_>>, message: &str) -> String {
        let status = self.status();
        let message = escaped(message);
        let about = about.map_or(String::new(), |FailedTarget { id, port }| {
            format!("<p>Sandbox <code>{}</code>, port {port}", escaped(id))
        });
        format!(
            "<!doctype html><meta charset=utf-8><meta name=viewport \
             content=\"width=device-width\"><title>{status}</title><style>body{{font:1rem/1.5 \
             system-ui,sans-serif;max-width:40rem;margin:15vh auto;padding:0 \
             1rem}}</style><h1>{status}</h1><p>{message}.{about}\n"
        )
    }
}

/// Escapes text for HTML. Texts may contain bytes that a guest chose.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
        .replace('\'', "&#39;")
}

/// Returns true if the client accepts HTML, as browsers do.
#[must_use]
pub fn wants_page(headers: &HeaderMap) -> bool {
    headers
        .get(ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/html"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    const ABOUT: FailedTarget<'_> = FailedTarget {
        id: "abc",
        port: 3000,
    };

    /// Returns the status and the text of a response, as an HTML page if `page`, otherwise as JSON.
    async fn text(failure: &RequestError, page: bool) -> (StatusCode, String) {
        let answer = failure.answer(Some(ABOUT), page);
        let status = answer.status();
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn errors_have_the_text_that_sdks_match() {
        assert_eq!(
            text(&RequestError::NotFound, false).await,
            (
                StatusCode::BAD_GATEWAY,
                r#"{"sandboxId":"abc","message":"The sandbox was not found","code":502}"#
                    .to_owned()
            )
        );
        assert_eq!(
            text(&RequestError::PortClosed, false).await.1,
            r#"{"sandboxId":"abc","message":"The sandbox is running but port is not open","port":3000,"code":502}"#
        );
        assert!(
            text(&RequestError::NotRunning, false)
                .await
                .1
                .contains("was not found")
        );
        let other = text(
            &RequestError::Unavailable("the agent is silent".to_owned()),
            false,
        )
        .await;
        assert!(!other.1.contains("was not found") && !other.1.contains("port is not open"));
        assert_eq!(
            text(&RequestError::Token, false).await.0,
            StatusCode::FORBIDDEN
        );
    }

    #[tokio::test]
    async fn a_page_shows_escaped_text() {
        let reason = "<script>alert('x')</script>".to_owned();
        let (status, page) = text(&RequestError::Unavailable(reason), true).await;
        assert_eq!(status, StatusCode::BAD_GATEWAY);
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"));
    }
}

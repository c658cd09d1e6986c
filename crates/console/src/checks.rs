//! Checks of requests before a session is used, and security headers of responses.
//!
//! A page of a guest may be on the same site as the console, because cookies and sites ignore
//! ports. The console therefore does not rely on `SameSite`. Calls need the `Origin` of the
//! console, and a header that other origins can set only after a preflight. The console rejects
//! preflights. A *preflight* is an `OPTIONS` request that a browser sends first, to determine
//! whether a page of another origin may send the actual request.

use crate::Console;
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, COOKIE, HOST, HeaderName, ORIGIN, REFERRER_POLICY,
    SET_COOKIE, UPGRADE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_api::ClientAddress;
use jiffy_gateway::Peer;
use jiffy_http::headers::set_cookie::values_of;
use std::net::IpAddr;

/// Header of all calls of the page.
const CONSOLE_HEADER: &str = "jiffy-console";
/// Name of the session cookie on loopback without TLS.
const PLAIN_COOKIE: &str = "jiffy_console";
/// Name of the session cookie with TLS. Such a cookie cannot be set by a subdomain.
const TLS_COOKIE: &str = "__Host-jiffy_console";
/// Content security policy of the page. Each response replaces `JIFFY_NONCE` by a new nonce.
pub(crate) const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; \
    style-src 'self' 'nonce-JIFFY_NONCE'; img-src 'self' data: blob:; connect-src 'self'; \
    frame-ancestors 'none'; base-uri 'none'; form-action 'none'; \
    require-trusted-types-for 'script'";
/// Content security policy of all other responses.
const DATA_POLICY: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";

/// Adds security headers. Responses may have a policy of their own.
pub(crate) fn add_security_headers(headers: &mut HeaderMap) {
    let fixed = [
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let defaults = [
        (CONTENT_SECURITY_POLICY, DATA_POLICY),
        (CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in defaults {
        if !headers.contains_key(&name) {
            headers.insert(name, HeaderValue::from_static(value));
        }
    }
}

/// Rejects requests whose `Host` is not a name of the console. Such a name may belong to an
/// attacker who lets it resolve to the console's address (DNS rebinding). Records the address of
/// the client.
pub(crate) async fn check_host(
    State(console): State<Console>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(peer) = request.extensions().get::<Peer>().copied() else {
        return Refusal::internal("the listener did not record the client").into_response();
    };
    let host = host_of(&request);
    if !host.is_some_and(|host| is_name(&console, host.host())) {
        let message = "this address is not a name of the console: use the address that \
             `jiffy console` prints, or add the name with --allow-host (requires TLS)";
        let refusal = Refusal::new(StatusCode::MISDIRECTED_REQUEST, "wrong_host", message);
        return refusal.into_response();
    }
    request.extensions_mut().insert(ClientAddress(peer.ip));
    next.run(request).await
}

/// Returns the host name and port of a request.
fn host_of(request: &Request) -> Option<Authority> {
    match request.headers().get(HOST) {
        Some(host) => host.to_str().ok()?.parse().ok(),
        // HTTP/2 requests have the host in the URI.
        None => request.uri().authority().cloned(),
    }
}

/// Returns whether `host` is a name of the console. Without TLS only loopback names are accepted,
/// because a browser sends no `Sec-Fetch-Site` over plain HTTP to other hosts.
fn is_name(console: &Console, host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let ip: Option<IpAddr> = host.parse().ok();
    if host.eq_ignore_ascii_case("localhost") || ip.is_some_and(|ip| ip.is_loopback()) {
        return true;
    }
    // Any IP address is accepted, because DNS rebinding needs a name.
    let mut names = console.settings.names.iter();
    console.settings.tls && (ip.is_some() || names.any(|name| name.eq_ignore_ascii_case(host)))
}

/// Rejects requests that are not calls of the console's own page.
pub(crate) async fn check(
    State(console): State<Console>,
    request: Request,
    next: Next,
) -> Response {
    match check_request(console.settings.tls, &request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Rejects requests that a page of another origin may have caused. Browsers set `Sec-Fetch-Site`
/// and `Origin`, and no page can change them. `tls` states whether the console uses TLS.
fn check_request(tls: bool, request: &Request) -> Result<(), Refusal> {
    // A preflight is rejected, so that other origins cannot send the console's header.
    if request.method() == Method::OPTIONS {
        return Err(foreign("preflight requests are rejected"));
    }
    let headers = request.headers();
    let site = headers.get_all("sec-fetch-site").iter();
    if site.into_iter().any(|site| site != "same-origin") {
        return Err(foreign("the request comes from another site"));
    }
    let scheme = if tls { "https" } else { "http" };
    let own = host_of(request).map(|host| format!("{scheme}://{host}"));
    let mut origins = headers.get_all(ORIGIN).iter().peekable();
    let has_origin = origins.peek().is_some();
    let is_own = |origin: &HeaderValue| {
        let origin = origin.to_str().ok();
        origin
            .zip(own.as_deref())
            .is_some_and(|(a, b)| a.eq_ignore_ascii_case(b))
    };
    if !origins.all(is_own) {
        return Err(foreign("the request comes from a page of another origin"));
    }
    let path = request.uri().path();
    // A script cannot add headers to the request of a WebSocket. The browser always adds an origin.
    if path == "/live" {
        return if has_origin && headers.contains_key(UPGRADE) {
            Ok(())
        } else {
            Err(foreign("a WebSocket needs an origin"))
        };
    }
    // A navigation cannot carry the console's header. The ticket in the path replaces the header:
    // it is valid once, and only with the cookie of the session that requested it.
    if path.starts_with("/download/") {
        return Ok(());
    }
    if headers.get(CONSOLE_HEADER).is_none_or(|value| value != "1") {
        return Err(foreign("the request lacks the header `jiffy-console: 1`"));
    }
    Ok(())
}

fn foreign(message: &str) -> Refusal {
    Refusal::new(StatusCode::FORBIDDEN, "foreign_request", message)
}

impl Console {
    fn cookie_name(&self) -> &'static str {
        if self.settings.tls {
            TLS_COOKIE
        } else {
            PLAIN_COOKIE
        }
    }

    /// Returns the secret in the session cookie of a request.
    ///
    /// # Errors
    /// 400 with two session cookies: one of them was set by another page. Both are deleted.
    pub(crate) fn cookie<'a>(&self, headers: &'a HeaderMap) -> Result<Option<&'a str>, Refusal> {
        let mut values = values_of(headers.get_all(COOKIE).iter(), self.cookie_name());
        let value = values.next();
        if values.next().is_some() {
            return Err(Refusal::TwoCookies(self.clear_cookies()));
        }
        Ok(value)
    }

    /// Returns the header that stores the session cookie in the browser.
    pub(crate) fn set_cookie(&self, secret: &str, seconds: u64) -> HeaderValue {
        let secure = if self.settings.tls { "; Secure" } else { "" };
        let cookie = format!(
            "{}={secret}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}{secure}",
            self.cookie_name()
        );
        // The secret consists of hexadecimal digits.
        HeaderValue::try_from(cookie).unwrap_or(HeaderValue::from_static(""))
    }

    /// Returns the headers that delete the session cookie, and cookies of this name for parent
    /// domains: a page of a subdomain may have set them.
    fn clear_cookies(&self) -> Vec<HeaderValue> {
        let mut cookies = vec![self.set_cookie("", 0)];
        let name = self.cookie_name();
        for host in &self.settings.names {
            let labels: Vec<&str> = host.split('.').collect();
            for first in 0..labels.len().saturating_sub(1) {
                let domain = labels.get(first..).unwrap_or_default().join(".");
                let cookie = format!("{name}=; Path=/; Domain={domain}; Max-Age=0");
                cookies.extend(HeaderValue::try_from(cookie));
            }
        }
        cookies
    }
}

/// Adds the headers that delete cookies to a response.
pub(crate) fn append_cookies(response: &mut Response, cookies: Vec<HeaderValue>) {
    for cookie in cookies {
        response.headers_mut().append(SET_COOKIE, cookie);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    /// Returns a request with additional headers.
    fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = method.parse().unwrap();
        *request.uri_mut() = path.parse().unwrap();
        let host = ("host", "127.0.0.1:3001");
        for (name, value) in headers.iter().chain([&host]) {
            let name: HeaderName = name.parse().unwrap();
            request.headers_mut().append(name, value.parse().unwrap());
        }
        request
    }

    #[test]
    fn only_calls_of_the_own_page_are_accepted() {
        let own = ("origin", "http://127.0.0.1:3001");
        let marked = ("jiffy-console", "1");
        let is_accepted = |method: &str, path: &str, headers: &[(&str, &str)]| {
            check_request(false, &request(method, path, headers)).is_ok()
        };
        assert!(is_accepted("GET", "/session", &[marked]));
        assert!(is_accepted(
            "POST",
            "/api/x",
            &[marked, own, ("sec-fetch-site", "same-origin")]
        ));
        assert!(is_accepted(
            "GET",
            "/live",
            &[own, ("upgrade", "websocket")]
        ));
        assert!(is_accepted(
            "GET",
            "/download/x",
            &[("sec-fetch-site", "same-origin")]
        ));
        let guests = [
            "http://127.0.0.1:3000",
            "http://80-x.localhost:3001",
            "null",
            "https://127.0.0.1:3001",
        ];
        for guest in guests {
            let origin = ("origin", guest);
            assert!(!is_accepted("POST", "/api/x", &[marked, origin]), "{guest}");
            assert!(
                !is_accepted("POST", "/api/x", &[marked, own, origin]),
                "{guest}"
            );
            assert!(!is_accepted(
                "GET",
                "/live",
                &[origin, ("upgrade", "websocket")]
            ));
        }
        for site in ["same-site", "cross-site", "none", ""] {
            assert!(!is_accepted(
                "GET",
                "/api/x",
                &[marked, ("sec-fetch-site", site)]
            ));
            assert!(!is_accepted(
                "GET",
                "/download/x",
                &[("sec-fetch-site", site)]
            ));
        }
        assert!(!is_accepted("GET", "/session", &[]));
        assert!(!is_accepted("OPTIONS", "/api/x", &[marked, own]));
        assert!(!is_accepted(
            "GET",
            "/live",
            &[("upgrade", "websocket"), marked]
        ));
        assert!(!is_accepted("GET", "/live", &[own, marked]));
    }
}

//! Headers of messages between clients and guests: removal of headers that the other side must not
//! receive. Used by the gateway for sandboxes and by the function manager for functions.

pub mod api_key;
pub mod set_cookie;

use hyper::header::{
    ALT_SVC, CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, COOKIE, HeaderMap, HeaderName,
    HeaderValue, LOCATION, SET_COOKIE, STRICT_TRANSPORT_SECURITY, TRANSFER_ENCODING,
};

/// Header with the access token of a sandbox whose ports are not public.
pub const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// Content security policy for pages of guests: permits scripts, but gives each page an opaque
/// origin.
const ISOLATION_POLICY: &str =
    "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads";

/// Returns true if the comma-separated list in header `name` contains `word`.
#[must_use]
pub fn has_token(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|listed| listed.trim().eq_ignore_ascii_case(word))
}

/// Hop-by-hop headers (RFC 9110, 7.6.1), including obsolete ones.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "upgrade",
    "te",
    "transfer-encoding",
    "proxy-authenticate",
    "proxy-authorization",
    "keep-alive",
    "proxy-connection",
    "http2-settings",
];

/// Returns true if one of the headers exists. Usually none exists, so one scan of all headers is
/// faster than a look-up of each name.
fn has_any(headers: &HeaderMap, names: &[&str]) -> bool {
    headers.keys().any(|name| names.contains(&name.as_str()))
}

/// Removes hop-by-hop headers (RFC 9110, 7.6.1).
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // If no hop-by-hop header exists, `Connection` does not exist either and names no further
    // headers.
    if !has_any(headers, &HOP_BY_HOP) {
        return;
    }
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Headers for proxies, and headers that only trusted proxies may set. The callers overwrite
/// `X-Forwarded-For`, `X-Forwarded-Host` and `X-Forwarded-Proto` afterwards. `Expect` is removed
/// because the gateway answers it itself, by requesting the client's body.
const PROXY_HEADERS: [&str; 6] = [
    "expect",
    "forwarded",
    TRAFFIC_TOKEN,
    "x-forwarded-prefix",
    "x-real-ip",
    "x-forwarded-port",
];

/// Removes the headers of a client that a guest must not receive: hop-by-hop headers, headers of
/// untrusted proxies, API keys, and the gateway's own cookies.
pub fn confine_request(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    if has_any(headers, &PROXY_HEADERS) {
        for name in PROXY_HEADERS {
            headers.remove(name);
        }
    }
    api_key::strip(headers);
    if !headers.contains_key(COOKIE) {
        return;
    }
    match set_cookie::without_reserved(headers.get_all(COOKIE).iter()) {
        Some(cookies) => drop(headers.insert(COOKIE, cookies)),
        None => drop(headers.remove(COOKIE)),
    }
}

/// Prefix of headers that the host sends to functions, such as the name of a schedule.
const HOST_PREFIX: &str = "jiffy-";

/// Removes the headers of a client that a function must not receive. In addition to the headers of
/// [`confine_request`], these are headers that only the host may send.
pub fn confine_function_request(headers: &mut HeaderMap) {
    confine_request(headers);
    let is_from_host = |name: &&HeaderName| name.as_str().starts_with(HOST_PREFIX);
    let host_headers: Vec<HeaderName> = headers.keys().filter(is_from_host).cloned().collect();
    for name in host_headers {
        headers.remove(name);
    }
}

/// Removes the headers of a guest's response that would affect other guests. `prefix` is the path
/// of the guest on `host`. `None` if the guest has a host name of its own. With `prefix` and
/// `isolate`, pages of the guest get a separate origin.
pub fn confine_answer(headers: &mut HeaderMap, prefix: Option<&str>, host: &str, isolate: bool) {
    // Must be read before the header is removed below.
    let encoded = headers.contains_key(TRANSFER_ENCODING);
    strip_hop_by_hop(headers);
    if encoded {
        // A length that was sent together with a transfer encoding is ambiguous.
        headers.remove(CONTENT_LENGTH);
    }
    if headers.contains_key(SET_COOKIE) {
        let cookies: Vec<HeaderValue> = headers.get_all(SET_COOKIE).iter().cloned().collect();
        headers.remove(SET_COOKIE);
        for cookie in &cookies {
            if let Some(cookie) = set_cookie::confined(cookie, prefix) {
                headers.append(SET_COOKIE, cookie);
            }
        }
    }
    let Some(prefix) = prefix else {
        // With a host name of its own, the guest's headers apply only to its own origin.
        return;
    };
    // These headers would apply to the whole origin, which several guests share.
    headers.remove(ALT_SVC);
    headers.remove(STRICT_TRANSPORT_SECURITY);
    headers.remove("clear-site-data");
    headers.remove("service-worker-allowed");
    if let Some(location) = headers
        .get(LOCATION)
        .and_then(|location| set_cookie::prefixed_location(location, prefix, host))
    {
        headers.insert(LOCATION, location);
    }
    if isolate {
        let policy = HeaderValue::from_static(ISOLATION_POLICY);
        // Append: a browser enforces all policies, so the guest's own policy remains in force.
        headers.append(CONTENT_SECURITY_POLICY, policy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_cannot_speak_to_a_function_as_the_host() {
        let mut headers = HeaderMap::new();
        for name in [
            "jiffy-schedule",
            "jiffy-anything",
            "x-jiffy-schedule",
            "host",
        ] {
            headers.append(name, HeaderValue::from_static("a"));
            headers.append(name, HeaderValue::from_static("b"));
        }
        confine_function_request(&mut headers);
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["host", "x-jiffy-schedule"]);
        headers.insert("jiffy-schedule", HeaderValue::from_static("a"));
        confine_request(&mut headers);
        assert!(
            headers.contains_key("jiffy-schedule"),
            "guests may use such names"
        );
    }
}

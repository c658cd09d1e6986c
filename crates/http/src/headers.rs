//! Heads of messages between clients and guests, without what is not meant for the other side.

pub mod api_key;
pub mod set_cookie;

use hyper::header::{
    ALT_SVC, CONNECTION, CONTENT_LENGTH, CONTENT_SECURITY_POLICY, COOKIE, HeaderMap, HeaderName,
    HeaderValue, LOCATION, SET_COOKIE, STRICT_TRANSPORT_SECURITY, TRANSFER_ENCODING,
};

/// Header that carries the token of sandboxes that are not open to the public.
pub const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// Allows scripts, and gives pages an opaque origin.
const ISOLATION_POLICY: &str =
    "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads";

/// Returns true if a comma-separated header contains `word`.
#[must_use]
pub fn has_token(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|listed| listed.trim().eq_ignore_ascii_case(word))
}

/// Headers of one hop (RFC 9110, 7.6.1), and older ones that are used in the same way.
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

/// Returns true if one of the names is there. Most messages have none of them, and a look at each
/// header costs less than a search for each name.
fn has_any(headers: &HeaderMap, names: &[&str]) -> bool {
    headers.keys().any(|name| names.contains(&name.as_str()))
}

/// Removes hop-by-hop headers (RFC 9110, 7.6.1).
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Names that `Connection` lists count only with that header.
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

/// Headers of a client that are for proxies, or set by proxies that are not trusted. `Expect` the
/// gateway answers itself, by asking the client for the body.
const OF_PROXIES: [&str; 6] = [
    "expect",
    "forwarded",
    TRAFFIC_TOKEN,
    "x-forwarded-prefix",
    "x-real-ip",
    "x-forwarded-port",
];

/// Removes headers of a client that are not for a guest: those of this hop, of proxies that are not
/// trusted, keys of the control plane, and the gateway's own cookies.
pub fn confine_request(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    if has_any(headers, &OF_PROXIES) {
        for name in OF_PROXIES {
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

/// Beginning of the names of headers by which the host speaks to functions, such as the one of a
/// schedule.
const HOST_PREFIX: &str = "jiffy-";

/// Removes headers of a client that are not for a function: those that are not for a guest, and
/// those that only the host sends.
pub fn confine_function_request(headers: &mut HeaderMap) {
    confine_request(headers);
    let is_hosts = |name: &&HeaderName| name.as_str().starts_with(HOST_PREFIX);
    let hosts: Vec<HeaderName> = headers.keys().filter(is_hosts).cloned().collect();
    for name in hosts {
        headers.remove(name);
    }
}

/// Removes headers of a guest's answer that reach beyond the guest. `prefix` is the path below
/// which it lies on `host`, if it has no host name of its own; `isolate` then gives its pages an
/// origin of their own.
pub fn confine_answer(headers: &mut HeaderMap, prefix: Option<&str>, host: &str, isolate: bool) {
    let encoded = headers.contains_key(TRANSFER_ENCODING);
    strip_hop_by_hop(headers);
    if encoded {
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
        return;
    };
    // Each of these would apply to the whole origin, which is not the guest's here.
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
            "a guest's own matter"
        );
    }
}

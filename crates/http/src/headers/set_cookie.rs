//! Confinement of the cookies and redirects that guests send to browsers. A cookie or redirect of
//! one guest must not affect other guests or the gateway.

use hyper::header::HeaderValue;
use hyper::http::uri::Authority;

/// Prefix of the names of Jiffy's own cookies: links of the gateway and sessions of the console.
pub const RESERVED_PREFIX: &str = "jiffy_";

/// Prefixes by which a browser protects a cookie. A cookie whose name continues with
/// [`RESERVED_PREFIX`] is Jiffy's own, too.
const BROWSER_PREFIXES: [&str; 4] = ["__Host-Http-", "__Http-", "__Host-", "__Secure-"];

/// Confines a guest's `Set-Cookie` to this guest: removes `Domain` and prepends `prefix` to `Path`.
/// `None` if the cookie uses a name of the gateway and must be dropped.
#[must_use]
pub fn confined(value: &HeaderValue, prefix: Option<&str>) -> Option<HeaderValue> {
    let mut out: Vec<u8> = Vec::with_capacity(value.len() + 64);
    for (index, attribute) in value.as_bytes().split(|b| *b == b';').enumerate() {
        let attribute = attribute.trim_ascii();
        if index == 0 {
            // A guest must not forge a cookie of the gateway.
            if is_reserved(attribute) {
                return None;
            }
            out.extend_from_slice(attribute);
            continue;
        }
        let name = attribute
            .split(|b| *b == b'=')
            .next()
            .unwrap_or_default()
            .trim_ascii();
        // Without `Domain`, browsers send the cookie only to the host that set it.
        if name.eq_ignore_ascii_case(b"domain") {
            continue;
        }
        out.extend_from_slice(b"; ");
        match prefix {
            Some(prefix) if name.eq_ignore_ascii_case(b"path") => {
                let path = attribute.get(name.len()..).unwrap_or_default().trim_ascii();
                let path = path.strip_prefix(b"=").unwrap_or_default().trim_ascii();
                out.extend_from_slice(b"Path=");
                out.extend_from_slice(prefix.as_bytes());
                // Without an absolute path, the browser uses the prefix itself.
                if path.starts_with(b"/") {
                    // A guest that knows its prefix may already have included it.
                    let inner = path.strip_prefix(prefix.as_bytes());
                    out.extend_from_slice(match inner {
                        Some(inner) if inner.is_empty() || inner.starts_with(b"/") => inner,
                        _ => path,
                    });
                }
            }
            _ => out.extend_from_slice(attribute),
        }
    }
    HeaderValue::from_bytes(&out).ok()
}

/// Returns true if the cookie `pair` has a name of Jiffy. Browsers compare the prefixes of names
/// without regard to case.
fn is_reserved(pair: &[u8]) -> bool {
    let mut prefixes = BROWSER_PREFIXES.iter();
    let protected = prefixes.find(|prefix| starts_with(pair, prefix));
    let name = protected.and_then(|prefix| pair.get(prefix.len()..));
    starts_with(name.unwrap_or(pair), RESERVED_PREFIX)
}

/// Returns true if `bytes` start with `prefix` in any case.
fn starts_with(bytes: &[u8], prefix: &str) -> bool {
    bytes
        .get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
}

/// Returns a client's cookies for the guest, joined in one header value, without the gateway's own
/// cookies. `None` if no cookies remain.
pub fn without_reserved<'a>(values: impl Iterator<Item = &'a HeaderValue>) -> Option<HeaderValue> {
    let mut out: Vec<u8> = Vec::new();
    for value in values {
        for pair in value.as_bytes().split(|b| *b == b';') {
            let pair = pair.trim_ascii();
            if pair.is_empty() || is_reserved(pair) {
                continue;
            }
            if !out.is_empty() {
                out.extend_from_slice(b"; ");
            }
            out.extend_from_slice(pair);
        }
    }
    (!out.is_empty())
        .then(|| HeaderValue::from_bytes(&out).ok())
        .flatten()
}

/// Returns the values of the cookies with this name.
pub fn values_of<'a>(
    values: impl Iterator<Item = &'a HeaderValue>,
    name: &str,
) -> impl Iterator<Item = &'a str> {
    values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(move |pair| {
            let (given, value) = pair.split_once('=')?;
            (given.trim() == name).then(|| value.trim())
        })
}

/// Prepends `prefix` to the path of a guest's `Location`, if the location is a path or a URL with
/// the client's host name. `None` if the header needs no change.
#[must_use]
pub fn prefixed_location(value: &HeaderValue, prefix: &str, host: &str) -> Option<HeaderValue> {
    let text = value.to_str().ok()?;
    // Two slashes begin a host name, not a path.
    let (before, path) = if text.starts_with('/') && !text.starts_with("//") {
        ("", text)
    } else {
        let (_, rest) = text
            .split_once("://")
            .filter(|(scheme, _)| matches!(*scheme, "http" | "https"))?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let same = authority.parse::<Authority>().ok()?.as_str().to_owned();
        if !same.eq_ignore_ascii_case(host) {
            return None;
        }
        (&text[..text.len() - path.len()], path)
    };
    let inside = path
        .strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#']));
    if inside {
        return None;
    }
    let slash = if path.starts_with('/') { "" } else { "/" };
    HeaderValue::from_str(&format!("{before}{prefix}{slash}{path}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "/sandboxes/abc/proxy/80";

    fn value(text: &str) -> HeaderValue {
        HeaderValue::from_str(text).unwrap()
    }

    #[test]
    fn cookies_are_confined_to_the_guest() {
        for (set, prefix, expected) in [
            ("a=b", None, Some("a=b")),
            ("a=b; Path=/; HttpOnly", None, Some("a=b; Path=/; HttpOnly")),
            ("a=b; domain=.example; Secure", None, Some("a=b; Secure")),
            ("a=b;Domain = x;path=/c", None, Some("a=b; path=/c")),
            (
                "a=b; Path=/",
                Some(PREFIX),
                Some("a=b; Path=/sandboxes/abc/proxy/80/"),
            ),
            (
                "a=b; path = /x; Max-Age=1",
                Some(PREFIX),
                Some("a=b; Path=/sandboxes/abc/proxy/80/x; Max-Age=1"),
            ),
            (
                "a=b; path=/sandboxes/abc/proxy/80/x",
                Some(PREFIX),
                Some("a=b; Path=/sandboxes/abc/proxy/80/x"),
            ),
            (
                "a=b; path=/sandboxes/abc/proxy/8080",
                Some(PREFIX),
                Some("a=b; Path=/sandboxes/abc/proxy/80/sandboxes/abc/proxy/8080"),
            ),
            (
                "a=b; path",
                Some(PREFIX),
                Some("a=b; Path=/sandboxes/abc/proxy/80"),
            ),
            ("jiffy_link_80=forged", Some(PREFIX), None),
            ("JIFFY_x=forged", None, None),
            ("__Host-jiffy_console=forged; Path=/; Secure", None, None),
            ("__SECURE-Jiffy_console=forged", None, None),
            ("__Host-Http-jiffy_console=forged", None, None),
            ("__Host-own=1; Secure", None, Some("__Host-own=1; Secure")),
        ] {
            assert_eq!(confined(&value(set), prefix), expected.map(value), "{set}");
        }
    }

    #[test]
    fn the_gateways_cookies_are_not_shown_to_guests() {
        let cookies = [value("a=1; jiffy_link_80=s"), value("b=2")];
        assert_eq!(without_reserved(cookies.iter()), Some(value("a=1; b=2")));
        assert_eq!(without_reserved([value("jiffy_link_80=s")].iter()), None);
        let sessions = "__Host-jiffy_console=s; a=1; __Secure-jiffy_console=s; jiffy_console=s";
        assert_eq!(
            without_reserved([value(sessions)].iter()),
            Some(value("a=1"))
        );
        assert_eq!(
            values_of(cookies.iter(), "jiffy_link_80").collect::<Vec<_>>(),
            ["s"]
        );
    }

    #[test]
    fn redirects_are_confined_to_the_prefix() {
        for (location, expected) in [
            ("/login?a=b", Some("/sandboxes/abc/proxy/80/login?a=b")),
            ("/", Some("/sandboxes/abc/proxy/80/")),
            ("/sandboxes/abc/proxy/80/x", None),
            ("x", None),
            ("?a", None),
            ("//other.test/x", None),
            ("https://other.test/x", None),
            (
                "http://LOCALHOST:3000/x",
                Some("http://LOCALHOST:3000/sandboxes/abc/proxy/80/x"),
            ),
            (
                "http://localhost:3000",
                Some("http://localhost:3000/sandboxes/abc/proxy/80/"),
            ),
            ("http://localhost:30000/x", None),
            ("javascript://localhost:3000/x", None),
        ] {
            assert_eq!(
                super::prefixed_location(&value(location), PREFIX, "localhost:3000"),
                expected.map(value),
                "{location}"
            );
        }
    }
}

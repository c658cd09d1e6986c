//! Checks that a request is for the host of its connection. Without this check, a guest could send
//! the secret of one host to another host behind the same address.

use crate::verdict::Rejection;
use hyper::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::{Method, Version};

/// Checks a request on a connection to `host` at `port`.
pub(crate) fn check(head: &Parts, host: &str, port: u16) -> Result<(), Rejection> {
    if head.method == Method::CONNECT {
        return Err(Rejection::Invalid("CONNECT is not supported"));
    }
    if head.headers.contains_key(CONTENT_LENGTH) && head.headers.contains_key(TRANSFER_ENCODING) {
        return Err(Rejection::Invalid(
            "the request has a length and a transfer encoding",
        ));
    }
    let mut hosts = head.headers.get_all(HOST).iter();
    let header = hosts.next();
    if hosts.next().is_some() {
        return Err(Rejection::Invalid("the request has several hosts"));
    }
    let header = match header.map(|value| value.to_str()) {
        Some(Ok(text)) => Some(text),
        Some(Err(_)) => return Err(Rejection::Invalid("the host of the request is invalid")),
        None => None,
    };
    let authority = head.uri.authority().map(|authority| authority.as_str());
    if head.version != Version::HTTP_2 && authority.is_some() {
        return Err(Rejection::Invalid(
            "the target of the request is not a path",
        ));
    }
    let mut named = [authority, header].into_iter().flatten().peekable();
    if named.peek().is_none() {
        return Err(Rejection::Invalid("the request has no host"));
    }
    if named.all(|name| is_host(name, host, port)) {
        Ok(())
    } else {
        Err(Rejection::Misdirected)
    }
}

/// Returns whether `text` is `host` in any case, with or without `port`.
fn is_host(text: &str, host: &str, port: u16) -> bool {
    let name = match text.rsplit_once(':') {
        Some((name, given)) if given == port.to_string() => name,
        Some(_) => return false,
        None => text,
    };
    name.eq_ignore_ascii_case(host)
}

/// Returns whether servers may interpret the path as another path: rules match paths as they are
/// written.
pub(crate) fn is_ambiguous(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    let encoded = ["%2e", "%2f", "%5c", "\\", "//"];
    encoded.iter().any(|part| lower.contains(part))
        || lower.split('/').any(|part| part == "." || part == "..")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use hyper::Request;

    fn head(version: Version, uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().version(version).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_request_must_name_the_host_of_its_connection() {
        let check = |head: &Parts| check(head, "a.example", 443);
        let one = Version::HTTP_11;
        for host in ["a.example", "A.Example", "a.example:443"] {
            assert_eq!(check(&head(one, "/x", &[("host", host)])), Ok(()));
        }
        for host in [
            "b.example",
            "a.example.",
            "a.example:80",
            "x@a.example",
            "a.example:443:443",
            "",
        ] {
            let misdirected = check(&head(one, "/", &[("host", host)]));
            assert_eq!(misdirected, Err(Rejection::Misdirected), "{host}");
        }
        for bad in [
            head(one, "/", &[]),
            head(one, "/", &[("host", "a.example"), ("host", "a.example")]),
            head(one, "https://a.example/", &[("host", "a.example")]),
            head(
                one,
                "/",
                &[
                    ("host", "a.example"),
                    ("content-length", "1"),
                    ("transfer-encoding", "chunked"),
                ],
            ),
        ] {
            assert!(matches!(check(&bad), Err(Rejection::Invalid(_))));
        }
        let two = Version::HTTP_2;
        assert_eq!(check(&head(two, "https://a.example/", &[])), Ok(()));
        let differs = head(two, "https://a.example/", &[("host", "b.example")]);
        assert_eq!(check(&differs), Err(Rejection::Misdirected));
        let user = head(two, "https://u@a.example/", &[]);
        assert_eq!(check(&user), Err(Rejection::Misdirected));
    }

    #[test]
    fn paths_that_servers_may_rewrite_are_ambiguous() {
        for path in [
            "/a/../b",
            "/a/./b",
            "/a//b",
            "/a%2Fb",
            "/%2e%2e/b",
            "/a\\b",
            "/..",
        ] {
            assert!(is_ambiguous(path), "{path}");
        }
        for path in ["/", "/a/b.c", "/a..b", "/%20"] {
            assert!(!is_ambiguous(path), "{path}");
        }
    }
}

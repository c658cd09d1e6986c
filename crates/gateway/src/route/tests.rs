//! Tests of the decision which sandbox or service a request addresses.

use super::*;
use hyper::Request;

/// Returns the configuration of a gateway with the domain `jiffy.example`.
fn config() -> GatewayConfig {
    GatewayConfig {
        domains: vec!["jiffy.example".to_owned()],
        ..GatewayConfig::default()
    }
}

/// Returns the route of a request with these headers.
fn routed(uri: &str, headers: &[(&str, &str)]) -> Route {
    let mut request = Request::builder().uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    route(&request.body(()).unwrap().into_parts().0, &config())
}

/// Returns the expected route to a port of a sandbox. `Addressing::Host(None)` is a host name
/// without expiry and signature.
fn sandbox(id: &str, port: u16, path: &str, addressing: Addressing) -> Route {
    Route::Sandbox(SandboxTarget {
        id: id.to_owned(),
        port,
        path: path.parse().unwrap(),
        addressing,
    })
}

/// Returns the status with which a request is rejected. `None` if it is routed.
fn refused(route: &Route) -> Option<StatusCode> {
    match route {
        Route::Refused(status, _) => Some(*status),
        _ => None,
    }
}

#[test]
fn headers_address_a_sandbox_if_the_host_name_does_not() {
    for host in [
        "127.0.0.1:3000",
        "[::1]:3000",
        "localhost",
        "sandbox.jiffy.example",
        "jiffy.example:8443",
    ] {
        let route = routed(
            "/files?path=a",
            &[
                ("host", host),
                ("E2b-Sandbox-Id", "abc"),
                ("E2b-Sandbox-Port", "49983"),
            ],
        );
        assert_eq!(
            route,
            sandbox("abc", 49983, "/files?path=a", Addressing::Headers),
            "{host}"
        );
    }
}

#[test]
fn a_host_name_takes_precedence_over_headers_and_path() {
    let route = routed(
        "/sandboxes/xyz/proxy/1/",
        &[
            ("host", "3000-abc.jiffy.example"),
            ("e2b-sandbox-id", "xyz"),
            ("e2b-sandbox-port", "1"),
        ],
    );
    assert_eq!(
        route,
        sandbox(
            "abc",
            3000,
            "/sandboxes/xyz/proxy/1/",
            Addressing::Host(None)
        )
    );
}

#[test]
fn a_path_addresses_a_sandbox_and_its_prefix_is_removed() {
    let addressing = || Addressing::Path("/sandboxes/abc/proxy/3000".to_owned());
    for (asked, seen) in [
        ("/sandboxes/abc/proxy/3000", "/"),
        ("/sandboxes/abc/proxy/3000?q", "/?q"),
        ("/sandboxes/abc/proxy/3000/", "/"),
        ("/sandboxes/abc/proxy/3000/a/b?c=%2F", "/a/b?c=%2F"),
        ("/sandboxes/abc/proxy/3000//a", "//a"),
        ("/sandboxes/abc/proxy/3000/../x", "/../x"),
    ] {
        assert_eq!(
            routed(asked, &[("host", "localhost")]),
            sandbox("abc", 3000, seen, addressing()),
            "{asked}"
        );
    }
}

#[test]
fn other_requests_go_to_the_control_plane() {
    for path in [
        "/",
        "/health",
        "/v2/sandboxes",
        "/sandboxes/abc",
        "/sandboxes/abc/proxy",
        "/sandboxes/abc/proxies/80",
        "/x/sandboxes/abc/proxy/80",
        "//sandboxes/abc/proxy/80",
        "/sandboxes%2fabc/proxy/80",
    ] {
        assert_eq!(
            routed(path, &[("host", "localhost:80")]),
            Route::ControlPlane,
            "{path}"
        );
    }
    assert_eq!(
        routed("/health", &[("host", "api.jiffy.example")]),
        Route::ControlPlane
    );
}

#[test]
fn incomplete_or_ambiguous_requests_are_refused() {
    let id = ("e2b-sandbox-id", "abc");
    let port = ("e2b-sandbox-port", "80");
    let host = ("host", "localhost");
    for headers in [
        &[host, id][..],
        &[host, port],
        &[host, id, id, port],
        &[host, id, port, port],
        &[host, ("e2b-sandbox-id", "a-b"), port],
        &[host, ("e2b-sandbox-id", "ABC"), port],
        &[host, ("e2b-sandbox-id", ""), port],
        &[host, ("e2b-sandbox-id", "caf\u{e9}"), port],
        &[host, id, ("e2b-sandbox-port", "0")],
        &[host, id, ("e2b-sandbox-port", "65536")],
        &[host, id, ("e2b-sandbox-port", "+80")],
        &[host, id, ("e2b-sandbox-port", "80, 81")],
        &[("host", "3000-abc.jiffy.example"), id],
        &[],
        &[host, host],
        &[host, ("host", "127.0.0.1")],
        &[("host", "a b")],
        &[("host", "99999-abc.localhost")],
        &[
            host,
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
        ],
        &[host, ("transfer-encoding", "gzip, chunked")],
        &[
            host,
            ("transfer-encoding", "chunked"),
            ("transfer-encoding", "chunked"),
        ],
        &[host, ("content-length", "3"), ("content-length", "3")],
    ] {
        let route = routed("/", headers);
        assert_eq!(
            refused(&route),
            Some(StatusCode::BAD_REQUEST),
            "{headers:?} {route:?}"
        );
    }
    for path in [
        "/sandboxes/A/proxy/80/",
        "/sandboxes//proxy/80/",
        "/sandboxes/a/proxy//",
        "/sandboxes/a/proxy/0/",
        "/sandboxes/a/proxy/80x/",
        "/sandboxes/a%61/proxy/80/",
    ] {
        assert_eq!(
            refused(&routed(path, &[host])),
            Some(StatusCode::BAD_REQUEST),
            "{path}"
        );
    }
}

#[test]
fn the_request_line_and_the_host_header_must_agree() {
    let line = "http://3000-abc.jiffy.example/x";
    let expected = sandbox("abc", 3000, "/x", Addressing::Host(None));
    assert_eq!(routed(line, &[]), expected);
    assert_eq!(
        routed(line, &[("host", "3000-ABC.jiffy.example")]),
        expected
    );
    assert_eq!(
        refused(&routed(line, &[("host", "localhost")])),
        Some(StatusCode::BAD_REQUEST)
    );
}

#[test]
fn an_unknown_host_name_is_rejected_even_with_headers() {
    for headers in [
        &[("host", "evil.test")][..],
        &[
            ("host", "evil.test"),
            ("e2b-sandbox-id", "abc"),
            ("e2b-sandbox-port", "80"),
        ],
        &[("host", "3000-abc.evil.test")],
    ] {
        assert_eq!(
            refused(&routed("/", headers)),
            Some(StatusCode::MISDIRECTED_REQUEST),
            "{headers:?}"
        );
    }
}

#[test]
fn connect_is_refused() {
    let request = Request::builder()
        .method("CONNECT")
        .uri("localhost:80")
        .body(())
        .unwrap();
    let route = route(&request.into_parts().0, &config());
    assert_eq!(refused(&route), Some(StatusCode::METHOD_NOT_ALLOWED));
}

#![no_main]
//! Routing of requests to a sandbox, to a function, or to the API of the control plane. The
//! decision does not depend on the spelling of host name, headers and path.

use http::Request;
use jiffy_gateway::host_name::is_id;
use jiffy_gateway::host_only_path::is_host_only;
use jiffy_gateway::{Addressing, GatewayConfig, LinkSigner, Route, route};
use libfuzzer_sys::fuzz_target;

/// Returns whether a host, with or without a port, is in the configuration. An independent
/// implementation, to compare with the crate's.
fn is_ours(host: &str) -> bool {
    if host.starts_with('[') {
        return true;
    }
    let name = host.split(':').next().unwrap_or_default();
    let name = name.strip_suffix('.').unwrap_or(name);
    let dotted = format!(".{name}");
    name == "front"
        || name.parse::<std::net::Ipv4Addr>().is_ok()
        || dotted.ends_with(".localhost")
        || dotted.ends_with(".d.example")
}

fuzz_target!(|data: &[u8]| {
    // The first line is the target, every other line a header.
    let mut lines = data.split(|b| *b == b'\n');
    let Ok(uri) = std::str::from_utf8(lines.next().unwrap_or_default()) else {
        return;
    };
    let mut request = Request::builder().uri(uri);
    for line in lines {
        if let Some(colon) = line.iter().position(|b| *b == b':') {
            request = request.header(&line[..colon], &line[colon + 1..]);
        }
    }
    let Ok(request) = request.body(()) else {
        return;
    };
    let (parts, ()) = request.into_parts();
    let config = GatewayConfig {
        domains: vec!["d.example".to_owned()],
        allowed_hosts: vec!["front".to_owned()],
        ..GatewayConfig::default()
    };
    let host = parts
        .uri
        .authority()
        .map(|authority| authority.as_str().to_owned())
        .or_else(|| {
            let host = parts.headers.get("host")?;
            Some(host.to_str().ok()?.to_owned())
        });
    match route(&parts, &config) {
        Route::Sandbox(target) => {
            assert!(is_id(&target.id) && target.port != 0);
            let host = host.unwrap().to_lowercase();
            match &target.addressing {
                Addressing::Headers => {
                    assert_eq!(parts.headers.get_all("e2b-sandbox-id").iter().count(), 1);
                    assert_eq!(parts.headers["e2b-sandbox-id"], target.id);
                    assert_eq!(parts.headers["e2b-sandbox-port"], target.port.to_string());
                }
                Addressing::Host(link) => {
                    assert!(host.starts_with(&format!("{}-{}", target.port, target.id)));
                    if let Some((expires, signature)) = link {
                        let signer = LinkSigner::new(&[1; 32]);
                        let (id, port) = (&target.id, target.port);
                        assert!(!signer.verify_host_link(id, port, expires, signature, 1));
                    }
                }
                Addressing::Path(prefix) => {
                    let whole = parts.uri.path_and_query().unwrap().as_str();
                    assert!(whole.starts_with(prefix.as_str()));
                    assert!(whole.ends_with(target.path.as_str().trim_start_matches('/')));
                    assert!(!parts.headers.contains_key("e2b-sandbox-id"));
                }
            }
            assert!(parts.headers.get_all("host").iter().count() <= 1);
            assert!(
                !parts.headers.contains_key("transfer-encoding")
                    || !parts.headers.contains_key("content-length")
            );
            let _ = is_host_only(target.path.path());
        }
        Route::Function(label) => {
            let (host, label) = (host.unwrap().to_lowercase(), label.to_lowercase());
            assert!(is_ours(&host) && !label.contains('.'), "{host}: {label}");
            assert!(host.starts_with(&format!("{label}.fn.")), "{host}: {label}");
        }
        Route::ControlPlane => {
            let host = host.unwrap().to_lowercase();
            assert!(is_ours(&host), "{host}");
        }
        Route::Refused(status, reason) => {
            assert!(status.is_client_error() && !reason.is_empty());
        }
    }
});

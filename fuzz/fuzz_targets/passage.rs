#![no_main]
//! Rewritten headers of guests and clients contain only permitted values, and paths for the host
//! only are recognised.

use http::HeaderValue;
use jiffy_gateway::host_only_path::is_host_only;
use jiffy_http::headers::set_cookie::{confined, prefixed_location, values_of, without_reserved};
use libfuzzer_sys::fuzz_target;

/// Path under which clients access port 80 of the sandbox.
const PREFIX: &str = "/sandboxes/abc/proxy/80";

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        // Every spelling of a path that only the host may request is recognised.
        for path in [
            format!("/init/{text}"),
            format!("//INIT;{text}"),
            format!("/%69nit?{text}"),
        ] {
            assert!(is_host_only(&path), "{path}");
        }
        let _ = is_host_only(text);
    }
    let Ok(value) = HeaderValue::from_bytes(data) else {
        return;
    };
    if let Some(cookie) = confined(&value, Some(PREFIX)) {
        for attribute in cookie.as_bytes().split(|b| *b == b';').skip(1) {
            let attribute = attribute.trim_ascii().to_ascii_lowercase();
            let name = attribute.split(|b| *b == b'=').next().unwrap().trim_ascii();
            assert_ne!(name, b"domain");
            if name == b"path" {
                assert!(attribute.starts_with(format!("path={PREFIX}").as_bytes()));
            }
        }
        let name = cookie.as_bytes().get(..6).unwrap_or_default();
        assert!(!name.eq_ignore_ascii_case(b"jiffy_"));
    }
    if let Some(cookies) = without_reserved([&value].into_iter()) {
        assert_eq!(
            values_of([&cookies].into_iter(), "jiffy_link_80").count(),
            0
        );
    }
    if let Some(location) = prefixed_location(&value, PREFIX, "localhost:3000") {
        assert!(location.to_str().unwrap().contains(PREFIX));
    }
});

//! Detects requests to paths of the agent that only the host may use, such as `/init`. Clients
//! could write such a path in many ways, so it is normalised first.

use jiffy_proto::agent::HOST_ONLY_PATHS;
use percent_encoding::percent_decode;

/// Maximum number of percent-decodings of a path. A path that requires more is treated as hostile.
const MAX_DECODINGS: usize = 4;

/// Returns true if a path leads to a host-only path of the agent under any interpretation:
/// percent-encoding (also repeated), repeated slashes, backslashes, dot segments, parameters, or
/// different case.
#[must_use]
pub fn is_host_only(path: &str) -> bool {
    let mut bytes = path.as_bytes().to_vec();
    let mut rounds = 0;
    loop {
        // Repeat until decoding has no effect: a server may decode more than once.
        let decoded = percent_decode(&bytes).collect();
        if decoded == bytes {
            break;
        }
        bytes = decoded;
        rounds += 1;
        // Reject paths with excessive encoding instead of decoding without limit.
        if rounds > MAX_DECODINGS {
            return true;
        }
    }
    // Check the segments with and without resolving dot segments: a server may do either.
    let segments = segments(&bytes);
    let resolved = resolved(&segments);
    is_host_only_segment(&resolved) || is_host_only_segment(&segments)
}

/// Returns the segments in lower case, without white space at their ends and without empty
/// segments. Each segment is cut off at a parameter, a decoded `?` or `#`, or a NUL byte.
fn segments(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|b| matches!(b, b'/' | b'\\'))
        .map(|segment| {
            let end = segment
                .iter()
                .position(|b| matches!(b, b';' | b'?' | b'#' | 0))
                .unwrap_or(segment.len());
            segment[..end].trim_ascii().to_ascii_lowercase()
        })
        .filter(|segment| !segment.is_empty())
        .collect()
}

/// Resolves dot segments. Above the root, `..` has no effect.
fn resolved(segments: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut out: Vec<Vec<u8>> = Vec::new();
    for segment in segments {
        match &segment[..] {
            b"." => {}
            b".." => {
                out.pop();
            }
            _ => out.push(segment.clone()),
        }
    }
    out
}

/// Returns true if the first segment is a host-only path. Each host-only path is one segment in
/// lower case, as [`segments`] returns it.
fn is_host_only_segment(segments: &[Vec<u8>]) -> bool {
    segments.first().is_some_and(|first| {
        HOST_ONLY_PATHS
            .iter()
            .any(|path| path.trim_start_matches('/').as_bytes() == &first[..])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_only_paths_are_recognised_in_every_spelling() {
        for path in HOST_ONLY_PATHS {
            assert!(is_host_only(path));
        }
        for path in [
            "/init/",
            "/init/x",
            "//init",
            "/INIT",
            "/%69nit",
            "/%2569nit",
            "/%252569nit",
            "/./init",
            "/a/../init",
            "/a/%2e%2e/init",
            "/a/%2e%2e%2finit",
            "/..\\init",
            "\\init",
            "/init;a=b",
            "/init%00",
            "/init%3Fx",
            "/init%20",
            "/init/..",
            "init",
            "/%25252525252525252569nit",
        ] {
            assert!(is_host_only(path), "{path}");
        }
    }

    #[test]
    fn other_paths_pass() {
        for path in [
            "/",
            "*",
            "/health",
            "/files",
            "/files/init",
            "/process.Process/Start",
            "/initial",
            "/in%69tial",
            "/100%",
            "/%zz",
            "/metrics",
            "/envs",
        ] {
            assert!(!is_host_only(path), "{path}");
        }
    }
}

//! Finds the command that a call to an agent starts, or the files that it accesses, for the audit
//! log.

use super::text::OMITTED;
use hyper::Method;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use percent_encoding::percent_decode;
use serde::Deserialize;

/// Part of a call that contains names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallKind {
    /// Message of `Start`, in a frame.
    Start,
    /// Message with paths.
    Message,
    /// Message with paths, in a frame.
    Frame,
    /// The query has paths.
    Query,
    /// The query has a path, or the parts of the body have names.
    Upload,
}

impl CallKind {
    pub fn has_names_in_body(self) -> bool {
        self != Self::Query
    }
}

/// Names in a call. An ellipsis replaces unknown names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub command: Option<Vec<String>>,
    pub paths: Vec<String>,
}

/// Calls that start a process or access files. The agent compares paths byte by byte.
const CALLS: [(&str, CallKind); 16] = [
    ("POST /process.Process/Start", CallKind::Start),
    ("POST /filesystem.Filesystem/Stat", CallKind::Message),
    ("POST /filesystem.Filesystem/MakeDir", CallKind::Message),
    ("POST /filesystem.Filesystem/Move", CallKind::Message),
    ("POST /filesystem.Filesystem/ListDir", CallKind::Message),
    ("POST /filesystem.Filesystem/Remove", CallKind::Message),
    ("POST /filesystem.Filesystem/WatchDir", CallKind::Frame),
    (
        "POST /filesystem.Filesystem/CreateWatcher",
        CallKind::Message,
    ),
    ("GET /files", CallKind::Query),
    ("POST /files", CallKind::Upload),
    ("POST /files/compose", CallKind::Message),
    ("GET /archive", CallKind::Query),
    ("PUT /archive", CallKind::Query),
    ("GET /tree", CallKind::Query),
    ("POST /tree", CallKind::Query),
    ("POST /tree/remove", CallKind::Query),
];

/// Returns the recorded form of a call and the part that contains names. `None` if the call neither
/// starts a process nor accesses a file.
pub(super) fn kind_of(method: &Method, path: &str) -> Option<(&'static str, CallKind)> {
    let mut calls = CALLS.into_iter();
    calls.find(|(call, _)| {
        let name = call.split_once(' ');
        name.is_some_and(|(verb, name)| verb == method.as_str() && name == path)
    })
}

/// Returns the names in a call. `body` contains the first bytes of its body, and `is_cut` states
/// that the body may continue.
pub(super) fn names(
    kind: CallKind,
    query: &str,
    headers: &HeaderMap,
    body: &[u8],
    is_cut: bool,
) -> Names {
    let omitted = || vec![OMITTED.to_owned()];
    match kind {
        CallKind::Start => Names {
            command: Some(message(body).and_then(command).unwrap_or_else(omitted)),
            paths: Vec::new(),
        },
        CallKind::Message => of_paths(paths_of_message(body).unwrap_or_else(omitted)),
        CallKind::Frame => {
            let paths = message(body).and_then(paths_of_message);
            of_paths(paths.unwrap_or_else(omitted))
        }
        CallKind::Query => of_paths(paths_of_query(query)),
        CallKind::Upload => {
            let mut paths = paths_of_query(query);
            if paths.is_empty() {
                paths = paths_of_parts(headers, body);
                if is_cut || headers.contains_key(CONTENT_ENCODING) {
                    paths.extend(omitted());
                }
            }
            of_paths(paths)
        }
    }
}

fn of_paths(paths: Vec<String>) -> Names {
    Names {
        command: None,
        paths,
    }
}

/// Returns the message in the first frame of a stream. `None` if it is incomplete or compressed. A
/// frame begins with a byte of flags (0 if not compressed) and the length in 4 bytes (Connect
/// protocol).
fn message(body: &[u8]) -> Option<&[u8]> {
    let ([0, length @ ..], rest) = body.split_first_chunk::<5>()? else {
        return None;
    };
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    rest.get(..length)
}

/// Returns the command in a message that starts a process.
fn command(message: &[u8]) -> Option<Vec<String>> {
    /// Message that starts a process.
    #[derive(Deserialize)]
    struct Start {
        #[serde(default)]
        process: Process,
    }
    // The environment, which is not recorded, is skipped.
    #[derive(Default, Deserialize)]
    struct Process {
        #[serde(default)]
        cmd: Option<String>,
        #[serde(default)]
        args: Option<Vec<String>>,
    }
    let Process { cmd, args } = serde_json::from_slice::<Start>(message).ok()?.process;
    let mut command = vec![cmd.filter(|cmd| !cmd.is_empty())?];
    command.extend(args.unwrap_or_default());
    Some(command)
}

/// Returns the file paths in a message to the agent. `None` if the message is not valid JSON.
fn paths_of_message(message: &[u8]) -> Option<Vec<String>> {
    /// Fields with paths in messages to the agent.
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Message {
        path: Option<String>,
        source: Option<String>,
        destination: Option<String>,
        #[serde(rename = "source_paths")]
        source_paths: Option<Vec<String>>,
        // Paths that are not UTF-8 are sent as bytes in base64.
        path_bytes: Option<String>,
        source_bytes: Option<String>,
        destination_bytes: Option<String>,
    }
    let message: Message = serde_json::from_slice(message).ok()?;
    let path = |text: Option<String>, bytes: Option<String>| decoded(bytes.as_deref()).or(text);
    let mut paths: Vec<String> = message.source_paths.unwrap_or_default();
    paths.extend(path(message.path, message.path_bytes));
    paths.extend(path(message.source, message.source_bytes));
    paths.extend(path(message.destination, message.destination_bytes));
    Some(paths)
}

/// Decodes base64. Bytes that are not UTF-8 become U+FFFD.
fn decoded(bytes: Option<&str>) -> Option<String> {
    use base64::Engine;
    let bytes = bytes.filter(|bytes| !bytes.is_empty())?;
    let bytes = base64::engine::general_purpose::STANDARD.decode(bytes);
    Some(bytes.map_or_else(
        |_| OMITTED.to_owned(),
        |bytes| String::from_utf8_lossy(&bytes).into_owned(),
    ))
}

/// Returns the values of the parameter `path`, decoded like in the agent.
fn paths_of_query(query: &str) -> Vec<String> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let values = pairs.filter(|(name, value)| *name == "path" && !value.is_empty());
    values
        .map(|(_, value)| {
            let value = value.replace('+', " ");
            percent_decode(value.as_bytes())
                .decode_utf8_lossy()
                .into_owned()
        })
        .collect()
}

/// Returns the file names of the parts of a form.
fn paths_of_parts(headers: &HeaderMap, body: &[u8]) -> Vec<String> {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let boundary = kind.and_then(|kind| kind.split_once("boundary="));
    let Some((_, boundary)) = boundary else {
        return Vec::new();
    };
    let boundary = boundary.split(';').next().unwrap_or_default().trim();
    let delimiter = format!("--{}", boundary.trim_matches('"'));
    let mut names = Vec::new();
    let mut rest = body;
    while let Some(at) = find(rest, delimiter.as_bytes()) {
        rest = rest.get(at + delimiter.len()..).unwrap_or_default();
        let Some(end) = find(rest, b"\r\n\r\n") else {
            break;
        };
        let head = String::from_utf8_lossy(rest.get(..end).unwrap_or_default());
        let is_disposition = |line: &&str| {
            let name = line.split(':').next().unwrap_or_default();
            name.eq_ignore_ascii_case("content-disposition")
        };
        let name = head.lines().find(is_disposition).and_then(file_name);
        names.extend(name);
    }
    names
}

/// Returns the value of `filename="..."`, in which a backslash escapes quotation marks and
/// backslashes.
fn file_name(line: &str) -> Option<String> {
    let at = line
        .find(" filename=")
        .or_else(|| line.find(";filename="))?;
    let value = line.get(at + " filename=".len()..)?;
    let Some(value) = value.strip_prefix('"') else {
        return Some(value.split(';').next()?.trim().to_owned());
    };
    let mut name = String::new();
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => name.push(chars.next_if(|c| matches!(c, '"' | '\\')).unwrap_or(c)),
            c => name.push(c),
        }
    }
    Some(name)
}

fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(message: &str) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0], &length[..], message.as_bytes()].concat()
    }

    #[test]
    fn commands_are_read_without_their_environment() {
        let text =
            r#"{"process":{"envs":{"TOKEN":"hidden"},"cmd":"sh","args":["-c","ls"]},"pty":{}}"#;
        let names = names(CallKind::Start, "", &HeaderMap::new(), &frame(text), false);
        assert_eq!(names.command.unwrap(), ["sh", "-c", "ls"]);
    }

    #[test]
    fn incomplete_and_invalid_messages_are_recorded_as_omitted() {
        let whole = frame(r#"{"process":{"cmd":"a","args":[]}}"#);
        let bodies = [
            &whole[..whole.len() - 1],
            &[],
            &frame("[]"),
            &[1, 0, 0, 0, 0],
        ];
        for body in bodies {
            let names = names(CallKind::Start, "", &HeaderMap::new(), body, false);
            assert_eq!(names.command.unwrap(), [OMITTED]);
        }
        let names = names(CallKind::Message, "", &HeaderMap::new(), b"{", false);
        assert_eq!(names.paths, [OMITTED]);
    }

    #[test]
    fn paths_are_read_from_messages_queries_and_forms() {
        let none = HeaderMap::new();
        let paths =
            |kind, query: &str, body: &str| names(kind, query, &none, body.as_bytes(), false).paths;
        let moved = r#"{"source":"/a","destination":"/b"}"#;
        assert_eq!(paths(CallKind::Message, "", moved), ["/a", "/b"]);
        let bytes = r#"{"path":"/x","pathBytes":"L/8="}"#;
        assert_eq!(paths(CallKind::Message, "", bytes), ["/\u{fffd}"]);
        let compose = r#"{"source_paths":["/1","/2"],"destination":"/3"}"#;
        assert_eq!(paths(CallKind::Message, "", compose), ["/1", "/2", "/3"]);
        let query = "username=u&path=%2Fa+b&path=/c&path=";
        assert_eq!(paths(CallKind::Query, query, ""), ["/a b", "/c"]);
        let mut form = HeaderMap::new();
        let kind = "multipart/form-data; boundary=\"X\"".parse().unwrap();
        form.insert(CONTENT_TYPE, kind);
        let body = b"--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a\\\"b\"\
            \r\n\r\nfilename=\"no\"\r\n--X\r\ncontent-disposition: form-data; name=\"file\"; \
            filename=\"/c\"\r\n\r\nx\r\n--X--\r\n";
        let found = names(CallKind::Upload, "", &form, body, false).paths;
        assert_eq!(found, ["/a\"b", "/c"]);
        let found = names(CallKind::Upload, "", &form, &body[..60], true).paths;
        assert_eq!(found, [OMITTED]);
    }

    #[test]
    fn only_calls_that_start_processes_or_access_files_are_recorded() {
        let is_recorded = |method: Method, path| kind_of(&method, path).is_some();
        assert!(is_recorded(Method::POST, "/process.Process/Start"));
        assert!(is_recorded(Method::GET, "/files"));
        for path in ["/metrics", "/process.Process/SendInput", "/init", "/files/"] {
            assert!(!is_recorded(Method::POST, path), "{path}");
        }
    }
}

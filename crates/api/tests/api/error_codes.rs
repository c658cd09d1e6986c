//! Error codes: the list, the source files that use them, and `docs/troubleshooting.md`.

use jiffy_api::ERROR_CODES;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Functions whose first or second argument is an error code.
const CONSTRUCTORS: [&str; 4] = ["::new(", "::not_found(", "::conflict(", "::too_many("];
/// Separator of cause and remedy in the page.
const ARROW: &str = " → ";

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()))
}

/// Returns the text of all source files below a directory.
fn sources(directory: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text.push_str(&sources(&path));
        } else {
            text.push_str(&read(&path));
        }
    }
    text
}

fn is_code(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
}

/// Returns string literals of one line that have the form of error codes.
fn literals(line: &str) -> impl Iterator<Item = &str> {
    line.split('"')
        .skip(1)
        .step_by(2)
        .filter(|text| is_code(text))
}

/// Returns the codes in calls of the constructors of `ApiError`: the first string literal of each
/// call.
fn constructed(source: &str) -> BTreeSet<&str> {
    let mut codes = BTreeSet::new();
    for constructor in CONSTRUCTORS {
        for (at, _) in source.match_indices(constructor) {
            let caller = &source[..at];
            if !caller.ends_with("ApiError") && !caller.ends_with("Self") {
                continue;
            }
            let arguments = &source[at + constructor.len()..];
            let Some((first, rest)) = arguments.split_once('"') else {
                continue;
            };
            // A call whose code is not a literal contains `)`, `;` or `(` before the next literal.
            if first.contains(['(', ')', ';', '{', '!']) {
                continue;
            }
            let code = rest.split('"').next().unwrap();
            if is_code(code) {
                codes.insert(code);
            }
        }
    }
    codes
}

/// Returns the codes of requests to functions, from the arms of `RequestFault::error_code`.
fn function_codes(source: &str) -> BTreeSet<&str> {
    let (_, body) = source.split_once("fn error_code").unwrap();
    let (body, _) = body.split_once("\n    }\n").unwrap();
    body.lines().flat_map(literals).collect()
}

/// Returns the codes of rejected direct connections to functions.
fn direct_codes(source: &str) -> BTreeSet<&str> {
    let (_, body) = source
        .split_once("impl IntoResponse for DirectError")
        .unwrap();
    let (body, _) = body.split_once("let body").unwrap();
    body.lines().flat_map(literals).collect()
}

/// Returns the rows of the page: text by code.
fn rows(page: &str) -> BTreeMap<&str, String> {
    let (_, list) = page.split_once("## Error codes\n").unwrap();
    let mut rows = BTreeMap::new();
    for item in list.split("\n- `").skip(1) {
        let (code, text) = item.split_once('`').unwrap();
        let text = text.split("\n\n").next().unwrap();
        let words: Vec<_> = text.split_whitespace().collect();
        let previous = rows.insert(code, words.join(" "));
        assert!(
            previous.is_none(),
            "docs/troubleshooting.md has `{code}` twice"
        );
    }
    rows
}

#[test]
fn the_list_of_error_codes_matches_the_sources() {
    let source = sources(&crates().join("api/src"));
    let (before, list) = source.split_once("pub const ERROR_CODES").unwrap();
    let (_, after) = list.split_once("];").unwrap();
    for code in ERROR_CODES {
        let literal = format!("\"{code}\"");
        assert!(
            before.contains(&literal) || after.contains(&literal),
            "no source file uses the error code `{code}`"
        );
    }
    let unlisted: Vec<_> = constructed(&source)
        .into_iter()
        .filter(|code| !ERROR_CODES.contains(code))
        .collect();
    assert!(unlisted.is_empty(), "add to ERROR_CODES: {unlisted:?}");
}

#[test]
fn every_error_code_has_a_cause_and_a_remedy_in_the_documents() {
    let faults = read(&crates().join("function-runtime/src/fault.rs"));
    let direct = read(&crates().join("daemon/src/direct_listener.rs"));
    let mut codes: BTreeSet<&str> = ERROR_CODES.into_iter().collect();
    codes.extend(function_codes(&faults));
    codes.extend(direct_codes(&direct));
    assert!(codes.contains("function_trap") && codes.contains("max_connections"));

    let page = read(&crates().join("../docs/troubleshooting.md"));
    let rows = rows(&page);
    let described: BTreeSet<&str> = rows.keys().copied().collect();
    let missing: Vec<_> = codes.difference(&described).collect();
    assert!(
        missing.is_empty(),
        "docs/troubleshooting.md lacks {missing:?}"
    );
    let stale: Vec<_> = described.difference(&codes).collect();
    assert!(
        stale.is_empty(),
        "docs/troubleshooting.md has unknown codes: {stale:?}"
    );
    for (code, text) in &rows {
        let parts = text.split_once(ARROW);
        assert!(
            parts.is_some_and(|(cause, remedy)| cause.contains("): ") && !remedy.is_empty()),
            "docs/troubleshooting.md: `{code}` has no cause or no remedy: {text}"
        );
    }
}

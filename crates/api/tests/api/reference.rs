//! Reference of the API, `docs/api-reference.md`, generated from the OpenAPI document.

use crate::call_examples::curl;
use jiffy_api::openapi;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Environment variable that makes the test write the document instead of comparing it.
const WRITE: &str = "JIFFY_WRITE_DOCS";
/// Maximum width of a line.
const WIDTH: usize = 100;

/// Appends `text` wrapped to [`WIDTH`] columns. The first line starts with `first`, all others
/// start with `rest`.
fn wrap(out: &mut String, first: &str, rest: &str, text: &str) {
    let words: Vec<&str> = text.split_whitespace().collect();
    let options = textwrap::Options::new(WIDTH)
        .initial_indent(first)
        .subsequent_indent(rest)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .break_words(false);
    out.push_str(&textwrap::fill(&words.join(" "), options));
    out.push('\n');
}

fn item(out: &mut String, text: &str) {
    wrap(out, "- ", "  ", text);
}

/// Returns the type of a schema in a few words: `integer, at least 1`, `array of Sandbox`.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap();
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(all) = schema["anyOf"].as_array() {
        return all.iter().map(kind).collect::<Vec<_>>().join(" or ");
    }
    let mut text = match &schema["type"] {
        Value::String(name) if name == "array" => format!("array of {}", kind(&schema["items"])),
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            let names: Vec<_> = names.iter().filter_map(Value::as_str).collect();
            names.join(" or ")
        }
        _ => "any".to_owned(),
    };
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<_> = values.iter().map(|value| format!("`{value}`")).collect();
        let _ = write!(text, ", one of {}", values.join(", "));
    }
    let limits = [
        ("minimum", "at least ", ""),
        ("maximum", "at most ", ""),
        ("maxLength", "at most ", " characters"),
        ("maxItems", "at most ", " items"),
        ("format", "format ", ""),
        ("default", "default ", ""),
    ];
    for (name, before, after) in limits {
        match &schema[name] {
            Value::Null => {}
            Value::String(value) => text.push_str(&format!(", {before}`{value}`{after}")),
            value => text.push_str(&format!(", {before}{value}{after}")),
        }
    }
    text
}

/// Appends the properties of an object's schema as a list.
fn properties(out: &mut String, schema: &Value) {
    let required: Vec<_> = schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let empty = Map::new();
    for (name, property) in schema["properties"].as_object().unwrap_or(&empty) {
        let presence = if required.contains(&name.as_str()) {
            ", required"
        } else {
            ""
        };
        let mut text = format!("`{name}`: {}{presence}.", kind(property));
        if let Some(description) = property["description"].as_str() {
            let _ = write!(text, " {description}");
        }
        item(out, &text);
    }
}

/// Appends one operation.
fn operation(out: &mut String, method: &str, path: &str, operation: &Value) {
    let method = method.to_uppercase();
    let _ = writeln!(out, "\n### `{method} {path}`");
    let summary = operation["summary"].as_str().unwrap();
    wrap(out, "", "", &format!("{summary}."));
    let mut list = String::new();
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        let place = parameter["in"].as_str().unwrap();
        let name = parameter["name"].as_str().unwrap();
        let description = parameter["description"].as_str().unwrap();
        let kind = kind(&parameter["schema"]);
        item(
            &mut list,
            &format!("`{name}` ({place}): {kind}. {description}."),
        );
    }
    if let Some(content) = operation["requestBody"]["content"].as_object() {
        for (media, body) in content {
            let presence = if operation["requestBody"]["required"] == true {
                ""
            } else {
                ", optional"
            };
            let kind = kind(&body["schema"]);
            item(&mut list, &format!("Body (`{media}`{presence}): {kind}."));
        }
    }
    let mut errors = Vec::new();
    for (status, answer) in operation["responses"].as_object().unwrap() {
        if status.starts_with('4') || status.starts_with('5') {
            errors.push(status.as_str());
            continue;
        }
        let mut text = format!("{status}: {}", answer["description"].as_str().unwrap());
        for body in answer["content"]
            .as_object()
            .into_iter()
            .flat_map(Map::values)
        {
            let _ = write!(text, ": {}", kind(&body["schema"]));
        }
        item(&mut list, &format!("{text}."));
    }
    if !errors.is_empty() {
        item(&mut list, &format!("Errors: {}.", errors.join(", ")));
    }
    let _ = write!(out, "\n{list}");
    let example = curl(&method, path, operation);
    let _ = write!(out, "\n```sh\n{example}\n```\n");
}

/// Returns the whole document.
fn reference() -> String {
    let document = openapi::document();
    let mut groups: BTreeMap<String, String> = BTreeMap::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, described) in operations.as_object().unwrap() {
            let tag = described["tags"][0].as_str().unwrap();
            let group = groups.entry(tag.to_owned()).or_default();
            operation(group, method, path, described);
        }
    }
    let mut out = "# API reference\n\n".to_owned();
    wrap(
        &mut out,
        "",
        "",
        "All calls of the control plane, generated from `GET /openapi.json` by `make docs`. \
         [The API](api.md) explains authentication, states, errors and pagination. In the \
         examples, `$API` is the address of the daemon and `$KEY` an API key. Every error has the \
         body [Error](#error).",
    );
    for (tag, text) in groups {
        let _ = write!(out, "\n## Calls: {tag}\n{text}");
    }
    out.push_str("\n## Bodies\n");
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        let _ = writeln!(out, "\n### {name}");
        if let Some(description) = schema["description"].as_str() {
            wrap(&mut out, "", "", description);
        }
        let mut list = String::new();
        properties(&mut list, schema);
        if list.is_empty() {
            item(&mut list, &format!("{}.", kind(schema)));
        }
        let _ = write!(out, "\n{list}");
    }
    out
}

#[test]
fn the_reference_of_the_api_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api-reference.md");
    let reference = reference();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, reference).unwrap();
        return;
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == reference,
        "docs/api-reference.md is outdated: regenerate it with `make docs`"
    );
}

/// The web console generates its types from a copy of the document, because its page is built at
/// the same time as the programs.
#[test]
fn the_document_of_the_console_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web/openapi.json");
    let document = serde_json::to_string_pretty(&openapi::document()).unwrap() + "\n";
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &document).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap();
    assert!(
        stored == document,
        "web/openapi.json is outdated: run `make docs`"
    );
}

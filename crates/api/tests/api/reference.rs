//! Reference of the API, `docs/api-reference.md`, generated from the OpenAPI document.

use jiffy_api::openapi;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Environment variable that makes the test write the document instead of comparing it.
const WRITE: &str = "JIFFY_WRITE_DOCS";
/// Columns of a line.
const WIDTH: usize = 100;

/// Appends `text` wrapped to [`WIDTH`] columns, its first line after `first`, the others after
/// `rest`.
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

/// The type of a schema in a few words: `integer, 1-8`, `array of Sandbox`.
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
        ("minimum", "at least"),
        ("maximum", "at most"),
        ("maxLength", "at most this many characters:"),
        ("maxItems", "at most this many items:"),
        ("format", "format"),
        ("default", "default"),
    ];
    for (name, words) in limits {
        match &schema[name] {
            Value::Null => {}
            Value::String(value) => text.push_str(&format!(", {words} `{value}`")),
            value => text.push_str(&format!(", {words} {value}")),
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
    let none = Map::new();
    for (name, property) in schema["properties"].as_object().unwrap_or(&none) {
        let must = if required.contains(&name.as_str()) {
            ", always there"
        } else {
            ""
        };
        let mut text = format!("`{name}`: {}{must}.", kind(property));
        if let Some(words) = property["description"].as_str() {
            let _ = write!(text, " {}", words);
        }
        wrap(out, "- ", "  ", &text);
    }
}

/// Appends one call.
fn call(out: &mut String, method: &str, path: &str, call: &Value) {
    let _ = writeln!(out, "\n### `{} {path}`", method.to_uppercase());
    wrap(
        out,
        "",
        "",
        &format!("{}.", call["summary"].as_str().unwrap()),
    );
    let mut list = String::new();
    for parameter in call["parameters"].as_array().into_iter().flatten() {
        let place = parameter["in"].as_str().unwrap();
        let name = parameter["name"].as_str().unwrap();
        let text = format!("`{name}` ({place}): {}.", kind(&parameter["schema"]));
        wrap(&mut list, "- ", "  ", &text);
    }
    if let Some(content) = call["requestBody"]["content"].as_object() {
        for (media, body) in content {
            let must = match call["requestBody"]["required"].as_bool() {
                Some(true) => "",
                _ => ", may be left out",
            };
            let text = format!("Body (`{media}`{must}): {}.", kind(&body["schema"]));
            wrap(&mut list, "- ", "  ", &text);
        }
    }
    let mut refusals = Vec::new();
    for (status, answer) in call["responses"].as_object().unwrap() {
        if status.starts_with('4') || status.starts_with('5') {
            refusals.push(status.as_str());
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
        wrap(&mut list, "- ", "  ", &format!("{text}."));
    }
    if !refusals.is_empty() {
        wrap(
            &mut list,
            "- ",
            "  ",
            &format!("Refusals: {}.", refusals.join(", ")),
        );
    }
    let _ = write!(out, "\n{list}");
}

/// The whole document.
fn reference() -> String {
    let document = openapi::document();
    let mut groups: BTreeMap<String, String> = BTreeMap::new();
    for (path, calls) in document["paths"].as_object().unwrap() {
        for (method, one) in calls.as_object().unwrap() {
            let tag = one["tags"][0].as_str().unwrap();
            call(groups.entry(tag.to_owned()).or_default(), method, path, one);
        }
    }
    let mut out = "# Reference of the API\n\n\
        Generated from `GET /openapi.json`: `make docs` writes it anew. [The API](api.md) explains how\n\
        to call it, with examples. Every error has the body [Error](#error).\n"
        .to_owned();
    for (tag, text) in groups {
        let _ = write!(out, "\n## Calls: {tag}\n{text}");
    }
    out.push_str("\n## Bodies\n");
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        let _ = writeln!(out, "\n### {name}");
        if let Some(words) = schema["description"].as_str() {
            wrap(&mut out, "", "", words);
        }
        let mut list = String::new();
        properties(&mut list, schema);
        if list.is_empty() {
            list = format!("- {}.\n", kind(schema));
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
        "docs/api-reference.md is not what the API says; write it anew with: make docs"
    );
}

//! Changes of wire types must be announced in the changelog.

use jiffy_api::openapi;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Environment variable that makes the test write the list, for a release.
const WRITE: &str = "JIFFY_WRITE_RELEASED_FIELDS";

/// Schemas of all fields by `Type.field`, and of types without fields by `Type`.
fn fields(schemas: &Value) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    for (name, schema) in schemas.as_object().unwrap() {
        let Some(properties) = schema["properties"].as_object() else {
            fields.insert(name.clone(), bare(schema).to_string());
            continue;
        };
        let required = schema["required"].as_array();
        for (field, schema) in properties {
            let is_required = required.is_some_and(|all| all.iter().any(|f| f == field));
            let word = if is_required { "required " } else { "" };
            let schema = format!("{word}{}", bare(schema));
            fields.insert(format!("{name}.{field}"), schema);
        }
    }
    fields
}

/// Removes the descriptions from a schema, which may change at any time.
fn bare(schema: &Value) -> Value {
    let mut schema = schema.clone();
    match &mut schema {
        Value::Object(map) => {
            map.retain(|key, value| key != "description" || !value.is_string());
            map.values_mut().for_each(|value| *value = bare(value));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = bare(item)),
        _ => {}
    }
    schema
}

fn written(fields: &BTreeMap<String, String>) -> String {
    let lines = fields
        .iter()
        .map(|(name, schema)| format!("{name}: {schema}\n"));
    lines.collect()
}

/// Returns the fields that differ from the last release and are not mentioned in `changelog`.
fn unannounced(
    released: &str,
    now: &BTreeMap<String, String>,
    changelog: &str,
) -> BTreeSet<String> {
    let released: BTreeMap<_, _> = released
        .lines()
        .filter_map(|l| l.split_once(": "))
        .collect();
    let unreleased = changelog.split("\n## ").nth(1).unwrap_or_default();
    let names = now
        .keys()
        .map(String::as_str)
        .chain(released.keys().copied());
    let differs = |name: &&str| now.get(*name).map(String::as_str) != released.get(*name).copied();
    let announced = |name: &&str| unreleased.contains(&format!("`{name}`"));
    let missing = names.filter(differs).filter(|name| !announced(name));
    missing.map(str::to_owned).collect()
}

#[test]
fn every_changed_field_of_the_api_is_in_the_changelog() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let list = root.join("crates/api-types/released-fields.txt");
    let now = fields(&openapi::document()["components"]["schemas"]);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&list, written(&now)).unwrap();
        return;
    }
    let released = std::fs::read_to_string(&list).unwrap();
    let changelog = std::fs::read_to_string(root.join("CHANGELOG.md")).unwrap();
    let missing = unannounced(&released, &now, &changelog);
    assert!(
        missing.is_empty(),
        "these fields of the API changed since the last release, and the unreleased section of \
         CHANGELOG.md does not name them: {missing:?}"
    );
}

#[test]
fn a_changed_field_without_an_entry_is_detected() {
    let schemas = openapi::document()["components"]["schemas"].clone();
    let released = written(&fields(&schemas));
    let log =
        |entry: &str| format!("# Changelog\n\n## Unreleased\n{entry}\n\n## 0.1\n`Alias.public`\n");
    let missing = |schemas: &Value, entry: &str| {
        let missing = unannounced(&released, &fields(schemas), &log(entry));
        missing.into_iter().collect::<Vec<_>>()
    };
    assert!(missing(&schemas, "").is_empty());
    let mut changed = schemas.clone();
    let alias = changed["Alias"]["properties"].as_object_mut().unwrap();
    let public = alias.remove("public").unwrap();
    alias.insert("shared".to_owned(), public);
    assert_eq!(missing(&changed, ""), ["Alias.public", "Alias.shared"]);
    assert_eq!(missing(&changed, "- `Alias.public`"), ["Alias.shared"]);
    assert!(missing(&changed, "- `Alias.public` is `Alias.shared`").is_empty());
    let mut changed = schemas.clone();
    changed["Alias"]["required"] = serde_json::json!(["templateID"]);
    changed["Metric"]["properties"]["memUsed"]["maximum"] = 1.into();
    changed["StoreState"]["enum"][0] = "here".into();
    let all = ["Alias.public", "Metric.memUsed", "StoreState"];
    assert_eq!(missing(&changed, ""), all);
    let mut changed = schemas;
    changed["Alias"]["properties"]["public"]["description"] = "Other words".into();
    assert!(missing(&changed, "").is_empty());
}

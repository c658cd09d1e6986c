//! JSON Schemas of request and response bodies, derived from their types.

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// Function that returns the schema of a type: a reference to a named schema, or the schema itself.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// Returns the schema of `T`.
pub(super) fn schema_of<T: JsonSchema>() -> SchemaOf {
    SchemaGenerator::subschema_for::<T>
}

/// Generators of the document's named schemas. Requests and responses have separate generators,
/// because a field may be optional only in requests.
pub(super) struct Schemas {
    requests: SchemaGenerator,
    answers: SchemaGenerator,
}

impl Schemas {
    pub fn new() -> Self {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        });
        Self {
            requests: settings.clone().for_deserialize().into_generator(),
            answers: settings.for_serialize().into_generator(),
        }
    }

    /// Returns the schema of a request's body.
    pub fn request(&mut self, schema: SchemaOf) -> Value {
        simplified(schema(&mut self.requests), simplify)
    }

    /// Returns the schema of a response's body.
    pub fn answer(&mut self, schema: SchemaOf) -> Value {
        simplified(schema(&mut self.answers), simplify_answer)
    }

    /// Returns all schemas that bodies refer to, by name. A type of requests and responses has the
    /// schema of responses.
    pub fn into_named(mut self) -> Map<String, Value> {
        let mut named = Map::new();
        let all = [
            (
                self.requests.take_definitions(false),
                simplify as fn(&mut Schema),
            ),
            (self.answers.take_definitions(false), simplify_answer),
        ];
        for (definitions, rule) in all {
            for (name, schema) in definitions {
                if let Ok(schema) = Schema::try_from(schema) {
                    named.insert(name, simplified(schema, rule));
                }
            }
        }
        named
    }
}

fn simplified(mut schema: Schema, rule: fn(&mut Schema)) -> Value {
    use schemars::transform::Transform;
    RecursiveTransform(rule).transform(&mut schema);
    schema.to_value()
}

/// Removes keywords that neither readers nor generators of clients need.
fn simplify(schema: &mut Schema) {
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    // `schemars` adds formats such as `uint64`. The bounds express the same.
    let format = map
        .get("format")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if ["int", "uint", "float", "double"]
        .iter()
        .any(|kind| format.starts_with(kind))
    {
        map.remove("format");
    }
    // Only defaults that are booleans or numbers are informative. A null or an empty default means
    // the same as an absent one.
    let is_kept = |default: &mut Value| default.is_boolean() || default.is_number();
    if map
        .get_mut("default")
        .is_some_and(|default| !is_kept(default))
    {
        map.remove("default");
    }
    join_words(map);
    // Line breaks of the source have no meaning in the document.
    if let Some(Value::String(text)) = map.get_mut("description") {
        *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    }
}

/// Turns a choice of constants into an `enum` whose description explains each constant.
fn join_words(map: &mut Map<String, Value>) {
    let Some(Value::Array(choices)) = map.get("oneOf") else {
        return;
    };
    // `None` if a choice is not a constant.
    let words: Option<Vec<Value>> = choices.iter().map(|c| c.get("const").cloned()).collect();
    let Some(words) = words else {
        return;
    };
    let mut text = map
        .get("description")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    for choice in choices {
        if let (Some(word), Some(about)) =
            (choice["const"].as_str(), choice["description"].as_str())
        {
            text.push_str(&format!(" `{word}`: {about}"));
        }
    }
    map.remove("oneOf");
    map.insert("type".to_owned(), json!("string"));
    map.insert("enum".to_owned(), json!(words));
    map.insert("description".to_owned(), json!(text));
}

/// Simplifies the schema of a response. Defaults are removed, because only requests use them. An
/// optional field of a response is absent and never null.
fn simplify_answer(schema: &mut Schema) {
    simplify(schema);
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    map.remove("default");
    let required = map.get("required").and_then(Value::as_array).cloned();
    let required = required.unwrap_or_default();
    let Some(Value::Object(properties)) = map.get_mut("properties") else {
        return;
    };
    let optional = |(name, _): &(&String, &mut Value)| !required.contains(&json!(name));
    for (_, property) in properties.iter_mut().filter(optional) {
        remove_null(property);
    }
}

/// Removes `null` from the permitted types of a schema.
fn remove_null(schema: &mut Value) {
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    if let Some(Value::Array(kinds)) = map.get_mut("type") {
        kinds.retain(|kind| kind != "null");
        if let [kind] = kinds.as_slice() {
            let kind = kind.clone();
            map.insert("type".to_owned(), kind);
        }
    }
    if let Some(Value::Array(choices)) = map.get_mut("anyOf") {
        choices.retain(|choice| choice["type"] != "null");
        if let [Value::Object(only)] = choices.as_slice() {
            let only = only.clone();
            map.remove("anyOf");
            map.extend(only);
        }
    }
}

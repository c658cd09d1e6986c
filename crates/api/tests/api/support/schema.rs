//! Validation of values against the schemas of the document. Supports the parts of JSON Schema that
//! the document uses, and panics for others.

use serde_json::Value;

/// Returns the violations of `schema` in `value`. `named` contains the named schemas of the
/// document.
pub fn problems(schema: &Value, named: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    check(schema, named, value, "", &mut found);
    found
}

/// Appends the violations of `schema` in the value at the path `at` to `found`.
fn check(schema: &Value, named: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
    let rules = schema.as_object().unwrap();
    for (rule, wanted) in rules {
        let good = match rule.as_str() {
            "$ref" => {
                let name = wanted.as_str().unwrap().rsplit('/').next().unwrap();
                let schema = named
                    .get(name)
                    .unwrap_or_else(|| panic!("no schema {name}"));
                check(schema, named, value, at, found);
                true
            }
            "type" => match wanted {
                Value::Array(kinds) => kinds.iter().any(|k| is(k, value)),
                kind => is(kind, value),
            },
            "enum" => wanted.as_array().unwrap().contains(value),
            "minimum" => value.as_f64().is_none_or(|v| v >= wanted.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|v| v <= wanted.as_f64().unwrap()),
            "format" => value.as_str().is_none_or(|text| has_format(wanted, text)),
            "required" => {
                let names = wanted.as_array().unwrap().iter();
                let missing =
                    |n: &&Value| value.is_object() && value.get(n.as_str().unwrap()).is_none();
                names.filter(missing).count() == 0
            }
            "properties" => {
                for (name, schema) in wanted.as_object().unwrap() {
                    if let Some(inner) = value.get(name) {
                        check(schema, named, inner, &format!("{at}/{name}"), found);
                    }
                }
                true
            }
            "additionalProperties" if wanted.is_boolean() => {
                let is_known = |name: &String| !schema["properties"][name.as_str()].is_null();
                let names = || value.as_object().into_iter().flat_map(|v| v.keys());
                wanted == true || names().all(is_known)
            }
            "additionalProperties" => {
                assert!(!rules.contains_key("properties"));
                for (name, inner) in value.as_object().into_iter().flatten() {
                    check(wanted, named, inner, &format!("{at}/{name}"), found);
                }
                true
            }
            "items" => {
                for (i, inner) in value.as_array().into_iter().flatten().enumerate() {
                    check(wanted, named, inner, &format!("{at}/{i}"), found);
                }
                true
            }
            "maxItems" => value
                .as_array()
                .is_none_or(|v| v.len() as u64 <= wanted.as_u64().unwrap()),
            "minLength" | "maxLength" => value.as_str().is_none_or(|text| {
                let (length, limit) = (text.chars().count() as u64, wanted.as_u64().unwrap());
                (rule == "minLength" && length >= limit) || (rule == "maxLength" && length <= limit)
            }),
            "anyOf" => {
                let fits = |schema: &Value| problems(schema, named, value).is_empty();
                wanted.as_array().unwrap().iter().any(fits)
            }
            "description" => true,
            other => panic!("the document uses `{other}` in an answer, which is not checked here"),
        };
        if !good {
            found.push(format!("{at}: {value} breaks {rule} {wanted}"));
        }
    }
}

/// Returns whether a value has a type of JSON Schema.
fn is(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "null" => value.is_null(),
        other => panic!("`{other}` is no type"),
    }
}

/// Returns whether a text has a format of JSON Schema.
fn has_format(format: &Value, text: &str) -> bool {
    match format.as_str().unwrap() {
        "date-time" => text.parse::<jiff::Timestamp>().is_ok(),
        "uuid" => {
            let lengths: Vec<usize> = text.split('-').map(str::len).collect();
            lengths == [8, 4, 4, 4, 12] && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
        }
        other => panic!("`{other}` is not checked here"),
    }
}

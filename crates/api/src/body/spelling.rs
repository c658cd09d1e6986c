//! Deserialization of JSON that accepts field names in camel case and in snake case.
//!
//! Clients spell the same field differently: E2B's SDKs send `allow_internet_access` and
//! `allowOut`, CubeSandbox's SDK sends `allowInternetAccess`. A field with an unexpected spelling
//! would be ignored, and with it the restriction that the client requested. [`Spelled`] therefore
//! compares the names of struct fields without regard to case and underscores. Keys of maps, such
//! as names of environment variables, are data and are not changed.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::{Error, Map, Value};
use std::fmt;

/// Deserializes a JSON value and accepts both spellings of field names. Structs must be objects,
/// not arrays of their fields.
pub(super) struct Spelled(pub Value);

/// Returns `name` without underscores and in lower case.
pub(crate) fn folded(name: &str) -> String {
    let letters = name.chars().filter(|c| *c != '_');
    letters.map(|c| c.to_ascii_lowercase()).collect()
}

/// Renames the members of `object` that differ from a name in `fields` only in spelling.
///
/// # Errors
/// Fails if a field is present in several spellings.
fn with_names_of(
    fields: &'static [&'static str],
    object: Map<String, Value>,
) -> Result<Vec<(String, Spelled)>, Error> {
    let mut members: Vec<(String, Spelled)> = Vec::with_capacity(object.len());
    for (name, value) in object {
        let known = if fields.contains(&name.as_str()) {
            None
        } else {
            let folded_name = folded(&name);
            fields.iter().find(|field| folded(field) == folded_name)
        };
        let name = known.map_or(name, |&field| field.to_owned());
        // Two spellings of one field are ambiguous.
        if members.iter().any(|(present, _)| *present == name) {
            return Err(Error::custom(format_args!(
                "field `{name}` is present in two spellings; send it once"
            )));
        }
        members.push((name, Spelled(value)));
    }
    Ok(members)
}

impl<'de> IntoDeserializer<'de, Error> for Spelled {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Spelled {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(Spelled));
                let value = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(value)
            }
            Value::Object(members) => {
                let members = members.into_iter().map(|(k, v)| (k, Spelled(v)));
                let mut members = MapDeserializer::new(members);
                let value = visitor.visit_map(&mut members)?;
                members.end()?;
                Ok(value)
            }
            scalar => scalar.deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Object(members) => {
                let members = with_names_of(fields, members)?;
                visitor.visit_map(MapDeserializer::new(members.into_iter()))
            }
            // An array would otherwise be accepted as a list of the fields in order.
            other => other.deserialize_map(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            value => visitor.visit_some(Self(value)),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        // Names of variants are values, which have a single spelling.
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

/// JSON value whose objects have no duplicate names. `serde_json` would silently use the last
/// value.
pub(super) struct Distinct(pub Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DistinctVisitor).map(Self)
    }
}

/// Rejects objects in which a name occurs twice.
struct DistinctVisitor;

impl<'de> Visitor<'de> for DistinctVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Distinct(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((name, Distinct(value))) = members.next_entry::<String, Distinct>()? {
            if object.contains_key(&name) {
                let shown = crate::lookup::short(&name);
                return Err(A::Error::custom(format_args!("duplicate field `{shown}`")));
            }
            object.insert(name, value);
        }
        Ok(object.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[derive(Debug, PartialEq, Eq, Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Thing {
        #[serde(rename = "templateID")]
        template_id: String,
        allow_out: Option<Vec<String>>,
        inner: Option<BTreeMap<String, String>>,
        more: Option<Box<Thing>>,
    }

    fn thing(text: &str) -> Result<Thing, Error> {
        let Distinct(value) = serde_json::from_str(text)?;
        Thing::deserialize(Spelled(value))
    }

    #[test]
    fn fields_of_structs_are_accepted_in_either_spelling_and_keys_of_maps_are_data() {
        let camel = r#"{"templateID":"a","allowOut":["x"],"inner":{"A_b":"c","Ab":"d"},
            "more":{"templateID":"b","allowOut":[]}}"#;
        let snake = r#"{"template_id":"a","allow_out":["x"],"inner":{"A_b":"c","Ab":"d"},
            "more":{"template_id":"b","allow_out":[]}}"#;
        let read = thing(camel).unwrap();
        assert_eq!(read, thing(snake).unwrap());
        assert_eq!(read.inner.unwrap()["A_b"], "c");
        for (bad, word) in [
            (r#"{"templateID":"a","template_id":"b"}"#, "two spellings"),
            (r#"{"templateID":"a","templateID":"b"}"#, "duplicate"),
            (
                r#"{"templateID":"a","inner":{"x":"1","x":"2"}}"#,
                "duplicate",
            ),
            (r#"{"templateID":"a","allow-out":[]}"#, "unknown field"),
            (r#"["a",[],{},null]"#, "sequence"),
            (r#"{"templateID":"a","more":["b"]}"#, "sequence"),
        ] {
            let why = thing(bad).unwrap_err().to_string();
            assert!(why.contains(word), "{bad}: {why}");
        }
    }
}

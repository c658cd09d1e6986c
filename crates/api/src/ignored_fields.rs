//! Fields of request bodies that this daemon does not know. They are ignored, because clients may
//! be newer than the daemon, but not silently: the response names them, `/metrics` counts them, and
//! the log has each name once per key.

use crate::app::App;
use crate::caller::Caller;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use jiffy_sandbox_manager::FigureFamily;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Header of a response with the names of ignored fields.
const HEADER: HeaderName = HeaderName::from_static("jiffy-ignored-fields");
/// Maximum number of reported fields of one request. Clients choose the names.
const MAX_FIELDS: usize = 16;
/// Maximum length of a reported name in characters.
const MAX_NAME: usize = 64;
/// Maximum number of names that are counted separately.
const MAX_COUNTED: usize = 200;
/// Count of all further names.
const OTHER: &str = "other";
/// Maximum number of pairs of key and name that are logged.
const MAX_LOGGED: usize = 10_000;

/// Ignored fields of one request, as an extension of the request. Clones share the names.
#[derive(Debug, Clone, Default)]
pub(crate) struct IgnoredFields(Arc<Mutex<Vec<String>>>);

impl IgnoredFields {
    /// Adds the path of a field.
    pub fn add(&self, path: &serde_ignored::Path<'_>) {
        let mut names = self.0.lock();
        if names.len() >= MAX_FIELDS {
            return;
        }
        // `?` in a path stands for an optional object.
        let path = path.to_string().replace(".?", "");
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = path.chars().take(MAX_NAME);
        let name: String = name.map(|c| if allowed(c) { c } else { '?' }).collect();
        if !names.contains(&name) {
            names.push(name);
        }
    }
}

/// Counts of ignored fields since the start of the daemon.
#[derive(Default)]
pub(crate) struct IgnoredFieldCounts(Mutex<Counts>);

/// Counts of ignored fields, and the fields that were logged.
#[derive(Default)]
struct Counts {
    by_name: BTreeMap<String, u64>,
    logged: HashSet<(Option<String>, String)>,
}

impl IgnoredFieldCounts {
    /// Counts a field. Returns whether it is to be logged.
    fn count(&self, owner: Option<String>, name: &str) -> bool {
        let mut counts = self.0.lock();
        let has_space = counts.by_name.len() < MAX_COUNTED;
        let counted = if has_space || counts.by_name.contains_key(name) {
            name
        } else {
            OTHER
        };
        *counts.by_name.entry(counted.to_owned()).or_default() += 1;
        counts.logged.len() < MAX_LOGGED && counts.logged.insert((owner, name.to_owned()))
    }

    /// Returns the counts for a metrics scrape.
    pub fn figures(&self) -> FigureFamily {
        let counts = self.0.lock();
        let values = counts.by_name.iter();
        FigureFamily {
            name: "api_ignored_fields",
            help: "Fields of request bodies that this version does not know and has ignored, by \
                   path; `other` after 200 paths",
            label: "field",
            values: values.map(|(name, n)| (name.clone(), *n as f64)).collect(),
        }
    }
}

impl App {
    /// Reports the ignored fields of a request of `caller` in its response, the metrics and the
    /// log.
    pub(crate) fn report_ignored(
        &self,
        fields: &IgnoredFields,
        caller: &Caller,
        response: &mut Response,
    ) {
        let names = std::mem::take(&mut *fields.0.lock());
        if names.is_empty() {
            return;
        }
        let owner = caller.owner_id();
        for name in &names {
            if self.ignored_fields.count(owner.clone(), name) {
                tracing::warn!(
                    key = owner.as_deref(),
                    field = name,
                    "ignored a field that this version does not know",
                );
            }
        }
        // The names have no characters that a header cannot have.
        if let Ok(value) = HeaderValue::try_from(names.join(", ")) {
            response.headers_mut().insert(HEADER, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::parse;
    use serde::Deserialize;

    #[derive(Debug, Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Outer {
        known_field: Option<u32>,
        inner: Option<Inner>,
        all: Vec<Inner>,
        map: BTreeMap<String, u32>,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Inner {
        a: u32,
    }

    fn ignored(text: &str) -> Vec<String> {
        let fields = IgnoredFields::default();
        let parsed: Outer = parse(text.as_bytes(), &fields).unwrap();
        assert_eq!(parsed.inner.unwrap_or_default().a, 1);
        assert_eq!(parsed.known_field, Some(2));
        fields.0.lock().clone()
    }

    #[test]
    fn unknown_fields_are_named_by_path_and_others_are_not() {
        let known = r#"{"known_field": 2, "inner": {"a": 1}, "map": {"any": 3}}"#;
        assert_eq!(ignored(known), [""; 0]);
        let text =
            r#"{"knownField": 2, "b": {"c": 1}, "inner": {"a": 1, "d": 1}, "all": [{"e": 1}]}"#;
        assert_eq!(ignored(text), ["all.0.e", "b", "inner.d"]);
    }

    #[test]
    fn names_of_a_client_are_bounded_and_harmless() {
        let hostile: Vec<String> = (0..100)
            .map(|n| format!(r#""{n}\r\nx: {}": 1"#, "y".repeat(1000)))
            .collect();
        let text = format!(
            r#"{{"knownField": 2, "inner": {{"a": 1}}, {}}}"#,
            hostile.join(",")
        );
        let names = ignored(&text);
        assert_eq!(names.len(), MAX_FIELDS);
        assert!(names.iter().all(|name| name.len() == MAX_NAME));
        assert!(names[0].starts_with("0??x??y"), "{}", names[0]);
    }

    #[test]
    fn counts_have_a_limited_number_of_names_and_each_is_logged_once_per_key() {
        let counts = IgnoredFieldCounts::default();
        let key = || Some("key".to_owned());
        assert!(counts.count(None, "a") && counts.count(key(), "a"));
        assert!(!counts.count(key(), "a"));
        for n in 0..2 * MAX_COUNTED {
            counts.count(None, &format!("name-{n}"));
        }
        let figures = counts.figures().values;
        assert_eq!(figures.len(), MAX_COUNTED + 1);
        assert!(figures.contains(&("a".to_owned(), 3.0)));
        assert!(figures.contains(&(OTHER.to_owned(), (MAX_COUNTED + 1) as f64)));
    }
}

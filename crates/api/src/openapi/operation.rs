//! One call: what it takes and what it answers.

use crate::openapi::schemas::{SchemaOf, schema_of};
use crate::page::MAX_PAGE_SIZE;
use axum::http::Method;
use schemars::JsonSchema;
use serde_json::{Value, json};

/// A parameter that may be given.
pub(super) fn query(name: &str, schema: Value) -> Value {
    json!({ "name": name, "in": "query", "required": false, "schema": schema })
}

/// A call.
pub(super) struct Operation {
    pub method: Method,
    pub path: &'static str,
    pub id: &'static str,
    pub tag: &'static str,
    pub summary: &'static str,
    /// Beside those in the path.
    pub parameters: Vec<Value>,
    /// Its schema, and whether there must be one.
    pub body: Option<(SchemaOf, bool)>,
    /// Media type of the body.
    pub media_type: &'static str,
    /// Successes.
    pub answers: Vec<(u16, &'static str, Option<SchemaOf>)>,
    /// Refusals beside those that any such call may meet.
    pub more: &'static [u16],
    /// True if it answers in pages.
    pub paged: bool,
    /// True if it needs no key.
    pub open: bool,
}

impl Operation {
    pub fn new(
        method: Method,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
    ) -> Self {
        let tags = ["sandboxes", "snapshots", "templates", "functions", "pools"];
        let tag = path.split('/').find(|part| tags.contains(part));
        Self {
            method,
            path,
            id,
            tag: tag.unwrap_or("host"),
            summary,
            parameters: Vec::new(),
            body: None,
            media_type: "application/json",
            answers: Vec::new(),
            more: &[],
            paged: false,
            open: false,
        }
    }

    pub fn get(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::GET, path, id, summary)
    }

    pub fn post(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::POST, path, id, summary)
    }

    pub fn put(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::PUT, path, id, summary)
    }

    pub fn delete(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::DELETE, path, id, summary)
    }

    pub fn with(mut self, parameters: Vec<Value>) -> Self {
        self.parameters = parameters;
        self
    }

    pub fn takes<T: JsonSchema>(mut self) -> Self {
        self.body = Some((schema_of::<T>(), true));
        self
    }

    /// The same as a form.
    pub fn takes_form<T: JsonSchema>(mut self) -> Self {
        self.media_type = "multipart/form-data";
        self.takes::<T>()
    }

    pub fn may_take<T: JsonSchema>(mut self) -> Self {
        self.body = Some((schema_of::<Option<T>>(), false));
        self
    }

    pub fn answers<T: JsonSchema>(mut self, status: u16, what: &'static str) -> Self {
        self.answers.push((status, what, Some(schema_of::<T>())));
        self
    }

    /// A success without a body.
    pub fn answers_with(mut self, status: u16, what: &'static str) -> Self {
        self.answers.push((status, what, None));
        self
    }

    pub fn answers_nothing(mut self) -> Self {
        self.answers.push((204, "Done", None));
        self
    }

    pub fn accepts(mut self) -> Self {
        self.answers.push((202, "It will", None));
        self
    }

    pub fn refuses(mut self, more: &'static [u16]) -> Self {
        self.more = more;
        self
    }

    pub fn paged(mut self) -> Self {
        let order = json!({ "type": "string", "enum": ["asc", "desc"], "default": "desc" });
        self.parameters.extend([
            query(
                "limit",
                json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": MAX_PAGE_SIZE }),
            ),
            query("nextToken", json!({ "type": "string", "maxLength": 128 })),
            query("order", order),
        ]);
        self.paged = true;
        self
    }

    /// In pages by name, of at most `usual` items when nobody says.
    pub fn paged_by_name(mut self, usual: usize) -> Self {
        let about = format!("Without it a page has {usual} items at most");
        self.parameters.extend([
            query(
                "limit",
                json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "description": about }),
            ),
            query("nextToken", json!({ "type": "string", "maxLength": 128 })),
        ]);
        self.paged = true;
        self
    }

    pub fn open(mut self) -> Self {
        self.open = true;
        self
    }

    /// Statuses of refusals.
    pub fn refusals(&self) -> Vec<u16> {
        let mut all: Vec<u16> = self.more.to_vec();
        if self.open {
            return all;
        }
        all.extend([401, 403, 429, 500]);
        if self.path.contains('{') {
            all.extend([400, 404]);
        }
        if !self.parameters.is_empty() {
            all.push(400);
        }
        if self.body.is_some() {
            all.extend([400, 413, 415]);
        }
        all.sort_unstable();
        all.dedup();
        all
    }
}

//! Description of one operation for the OpenAPI document: parameters, request body and responses.
//! The methods of [`Operation`] are called in a chain by the tables in `operations/`.

use crate::openapi::operations::merged;
use crate::openapi::schemas::{SchemaOf, schema_of};
use crate::page::MAX_PAGE_SIZE;
use axum::http::Method;
use schemars::JsonSchema;
use serde_json::{Value, json};

/// Returns an optional query parameter.
pub(super) fn query(name: &str, description: &str, schema: Value) -> Value {
    json!({
        "name": name, "in": "query", "required": false,
        "description": description, "schema": schema,
    })
}

fn next_token() -> Value {
    query(
        "nextToken",
        "Token of the page, from the header `x-next-token`",
        json!({ "type": "string", "maxLength": 128 }),
    )
}

/// Operation of the API.
pub(super) struct Operation {
    pub method: Method,
    pub path: &'static str,
    pub id: &'static str,
    pub tag: &'static str,
    pub summary: &'static str,
    /// Parameters in queries and headers; path parameters are derived from the path.
    pub parameters: Vec<Value>,
    /// Schema of the request body, and whether the body is required.
    pub body: Option<(SchemaOf, bool)>,
    /// Media type of the request body.
    pub media_type: &'static str,
    /// Successful responses: status, description and schema of the body.
    pub answers: Vec<(u16, &'static str, Option<SchemaOf>)>,
    /// Error statuses in addition to the common ones of [`Self::error_statuses`].
    pub errors: &'static [u16],
    /// True if the response is paginated.
    pub paged: bool,
    /// True if the operation needs no API key.
    pub open: bool,
}

impl Operation {
    /// Creates the operation `id`. The tag is the first resource in the path, or `host`.
    pub fn new(
        method: Method,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
    ) -> Self {
        let tags = [
            "sandboxes",
            "snapshots",
            "templates",
            "functions",
            "pools",
            "secrets",
            "volumes",
        ];
        // The first resource in the path is the tag.
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
            errors: &[],
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

    /// Sets the tag, for a path that names no resource.
    pub fn tagged(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// Sets the parameters. Must precede [`Self::paged`], which adds parameters.
    pub fn with(mut self, parameters: Vec<Value>) -> Self {
        self.parameters = parameters;
        self
    }

    /// Sets a required JSON body.
    pub fn takes<T: JsonSchema>(mut self) -> Self {
        self.body = Some((schema_of::<T>(), true));
        self
    }

    /// Sets a required body in the form of `multipart/form-data`.
    pub fn takes_form<T: JsonSchema>(mut self) -> Self {
        self.media_type = "multipart/form-data";
        self.takes::<T>()
    }

    /// Sets an optional JSON body.
    pub fn may_take<T: JsonSchema>(mut self) -> Self {
        self.body = Some((schema_of::<Option<T>>(), false));
        self
    }

    /// Adds a successful response with a JSON body.
    pub fn answers<T: JsonSchema>(mut self, status: u16, description: &'static str) -> Self {
        self.answers
            .push((status, description, Some(schema_of::<T>())));
        self
    }

    /// Adds a successful response without a body.
    pub fn answers_with(mut self, status: u16, description: &'static str) -> Self {
        self.answers.push((status, description, None));
        self
    }

    /// Adds the response 204.
    pub fn answers_no_content(mut self) -> Self {
        self.answers.push((204, "Success", None));
        self
    }

    /// Adds the response 202: the operation continues after the response.
    pub fn accepts(mut self, description: &'static str) -> Self {
        self.answers.push((202, description, None));
        self
    }

    /// Sets error statuses in addition to the common ones.
    pub fn fails_with(mut self, errors: &'static [u16]) -> Self {
        self.errors = errors;
        self
    }

    /// Paginates the response; `order` selects the direction.
    pub fn paged(mut self) -> Self {
        let order = json!({ "type": "string", "enum": ["asc", "desc"], "default": "desc" });
        self.parameters.extend([
            query(
                "limit",
                "Maximum number of items",
                json!({
                    "type": "integer", "minimum": 1,
                    "maximum": MAX_PAGE_SIZE, "default": MAX_PAGE_SIZE,
                }),
            ),
            next_token(),
            query("order", "Order by time of creation", order),
        ]);
        self.paged = true;
        self
    }

    /// Paginates the response by name. The default page size is `default`.
    pub fn paged_by_name(mut self, default: usize) -> Self {
        self.parameters.extend([
            query(
                "limit",
                &format!("Maximum number of items. Defaults to {default}"),
                json!({ "type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE }),
            ),
            next_token(),
        ]);
        self.paged = true;
        self
    }

    /// Paginates the response by position. The default page size is `default`.
    pub fn paged_by_position(mut self, default: u64, most: u64) -> Self {
        self.parameters.extend([
            query(
                "limit",
                "Maximum number of items",
                json!({ "type": "integer", "minimum": 1, "maximum": most, "default": default }),
            ),
            next_token(),
        ]);
        self.paged = true;
        self
    }

    /// Adds the parameters of lists that are merged from all hosts of a fleet.
    pub fn merged(mut self) -> Self {
        self.parameters.extend(merged());
        self
    }

    /// Marks the operation as usable without an API key.
    pub fn open(mut self) -> Self {
        self.open = true;
        self
    }

    /// Returns the statuses of error responses in ascending order.
    pub fn error_statuses(&self) -> Vec<u16> {
        let mut all: Vec<u16> = self.errors.to_vec();
        // Operations without authentication list all their errors, in ascending order.
        if self.open {
            return all;
        }
        // Every authenticated call may fail with these statuses.
        all.extend([401, 403, 429, 500, 503]);
        if self.path.contains('{') {
            all.extend([400, 404]);
        }
        // Parameters and bodies may be invalid.
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

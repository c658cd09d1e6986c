//! Descriptions of the MCP server's tools: names, schemas of arguments and results, and functions.

use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::session::Session;
use rmcp::handler::server::tool::{schema_for_input, schema_for_output};
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::pin::Pin;
use std::sync::Arc;

/// Name of the argument that selects the sandbox.
const SANDBOX_ARGUMENT: &str = "sandbox";

/// Effect of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The tool changes nothing.
    ReadOnly,
    /// The tool creates objects and changes no existing data.
    Additive,
    /// The tool may change or remove data.
    Destructive,
}

/// Result of a tool: a value, and pictures as pairs of MIME type and base64.
pub struct Reply<T> {
    value: T,
    images: Vec<(&'static str, String)>,
}

impl<T> Reply<T> {
    /// Adds pictures.
    pub fn with_images(value: T, images: Vec<(&'static str, String)>) -> Self {
        Self { value, images }
    }
}

impl<T> From<T> for Reply<T> {
    fn from(value: T) -> Self {
        let images = Vec::new();
        Self { value, images }
    }
}

type CallFuture = Pin<Box<dyn Future<Output = ToolResult<CallToolResult>> + Send>>;
type CallFunction = Box<dyn Fn(Arc<Session>, JsonObject) -> CallFuture + Send + Sync>;

/// Tool of the server.
pub struct ToolEntry {
    /// Description for clients.
    pub tool: Tool,
    /// Group of the tool.
    pub group: ToolGroup,
    /// Effect of the tool.
    pub effect: Effect,
    call: CallFunction,
}

impl ToolEntry {
    /// Creates a tool. `A` has its arguments and `T` its result.
    pub fn new<A, T, F>(
        name: &'static str,
        group: ToolGroup,
        effect: Effect,
        description: &'static str,
        run: impl Fn(Arc<Session>, A) -> F + Copy + Send + Sync + 'static,
    ) -> Self
    where
        A: DeserializeOwned + JsonSchema + Send + 'static,
        T: Serialize + JsonSchema + 'static,
        F: Future<Output = ToolResult<Reply<T>>> + Send + 'static,
    {
        // The types of arguments are structs, whose schemas are always valid.
        let input = portable(&schema_for_input::<A>().unwrap_or_default());
        let annotations = match effect {
            Effect::ReadOnly => ToolAnnotations::new().read_only(true),
            _ => ToolAnnotations::new()
                .read_only(false)
                .destructive(effect == Effect::Destructive),
        };
        let tool = Tool::new(name, description, input)
            .with_raw_output_schema(portable(&schema_for_output::<T>()))
            .with_annotations(annotations.open_world(false));
        let call = move |session, arguments| -> CallFuture {
            Box::pin(async move { result(run(session, parse(name, arguments)?).await?) })
        };
        Self {
            tool,
            group,
            effect,
            call: Box::new(call),
        }
    }

    /// Returns whether the tool has an argument that selects the sandbox.
    pub fn has_sandbox(&self) -> bool {
        let properties = self.tool.input_schema.get("properties");
        properties.is_some_and(|p| p.get(SANDBOX_ARGUMENT).is_some())
    }

    /// Binds the tool to the sandbox with the id `sandbox`: the argument that selects the sandbox
    /// is removed from the schema, and added to each call.
    pub fn bind(&mut self, sandbox: String) {
        let mut schema = (*self.tool.input_schema).clone();
        if let Some(Value::Object(properties)) = schema.get_mut("properties") {
            properties.remove(SANDBOX_ARGUMENT);
        }
        if let Some(Value::Array(required)) = schema.get_mut("required") {
            required.retain(|name| name != SANDBOX_ARGUMENT);
        }
        self.tool.input_schema = Arc::new(schema);
        // Takes the function out of the entry. Its replacement is never called.
        let call = std::mem::replace(&mut self.call, Box::new(|_, _| Box::pin(never())));
        self.call = Box::new(move |session, mut arguments| {
            let bound = json!(sandbox);
            match arguments.insert(SANDBOX_ARGUMENT.to_owned(), bound.clone()) {
                Some(other) if other != bound => Box::pin(std::future::ready(Err(ToolError::new(
                    "this server uses one sandbox for all calls: omit the argument `sandbox`",
                )))),
                _ => call(session, arguments),
            }
        });
    }

    /// Calls the tool.
    pub fn call(&self, session: Arc<Session>, arguments: JsonObject) -> CallFuture {
        (self.call)(session, arguments)
    }
}

/// Returns a schema with one type per value and without Rust's formats of integers, because some
/// clients reject other schemas. Optional fields lose the type `null`: results omit them, and
/// arguments may be omitted.
fn portable(schema: &JsonObject) -> Arc<JsonObject> {
    let mut schema = schema.clone();
    make_portable(&mut schema);
    Arc::new(schema)
}

/// Removes parts of a JSON schema that some clients reject: `null` in a choice of types, and
/// formats of integers.
fn make_portable(schema: &mut JsonObject) {
    let is_null = |value: &Value| value == "null" || value["type"] == "null";
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|kind| !is_null(kind));
        if let [kind] = &types[..] {
            let kind = kind.clone();
            schema.insert("type".to_owned(), kind);
        }
    }
    if let Some(Value::Array(forms)) = schema.get_mut("anyOf") {
        forms.retain(|form| !is_null(form));
        if let [Value::Object(form)] = &forms[..] {
            let form = form.clone();
            schema.remove("anyOf");
            schema.extend(form);
        }
    }
    let format = schema.get("format").and_then(Value::as_str);
    if format.is_some_and(|format| format.trim_start_matches('u').starts_with("int")) {
        schema.remove("format");
    }
    for value in schema.values_mut() {
        match value {
            Value::Object(schema) => make_portable(schema),
            Value::Array(forms) => {
                let forms = forms.iter_mut().filter_map(Value::as_object_mut);
                forms.for_each(make_portable);
            }
            _ => {}
        }
    }
}

/// Placeholder that is replaced before the tool can be called.
async fn never() -> ToolResult<CallToolResult> {
    Err(ToolError::new("the tool is not available"))
}

/// Parses the arguments of a tool.
fn parse<A: DeserializeOwned>(tool: &str, arguments: JsonObject) -> ToolResult<A> {
    serde_json::from_value(Value::Object(arguments)).map_err(|e| {
        ToolError::new(format!(
            "invalid arguments of {tool}: {e}; see the tool's input schema"
        ))
    })
}

/// Returns the result with the value as structured content and as text.
fn result<T: Serialize>(reply: Reply<T>) -> ToolResult<CallToolResult> {
    let value = serde_json::to_value(reply.value)
        .map_err(|e| ToolError::new(format!("cannot encode the result: {e}")))?;
    let mut result = CallToolResult::structured(value);
    let images = reply.images.into_iter();
    result
        .content
        .extend(images.map(|(mime, data)| ContentBlock::image(data, mime)));
    Ok(result)
}

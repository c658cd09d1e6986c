//! The tool that runs code with the code interpreter of a sandbox.
//!
//! The interpreter is a server in the sandbox (template `code-interpreter-v1`). A *context* keeps
//! variables between calls.

use super::commands::{DEFAULT_TIMEOUT_S, timeout};
use crate::catalog::{Effect, Reply, ToolEntry};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::output::HeadTail;
use crate::session::Session;
use hyper::Method;
use jiffy_agent_client::PooledResponse;
use jiffy_client::Sandbox;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Template with a code interpreter.
pub const TEMPLATE: &str = "code-interpreter-v1";
/// Port of the code interpreter.
const PORT: u16 = 49999;
/// Maximum length of an event in bytes. Events with pictures are long.
const MAX_EVENT_BYTES: usize = 8 << 20;
/// Maximum length of all pictures of a result in bytes of base64.
const MAX_IMAGES_BYTES: usize = 4 << 20;
/// Maximum length of other responses.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Returns the tool.
pub fn tools() -> Vec<ToolEntry> {
    vec![ToolEntry::new(
        "run_code",
        ToolGroup::Code,
        Effect::Destructive,
        "Run code in a sandbox of the template `code-interpreter-v1`. Variables and imports persist \
         between calls of the same context. Returns the value of the last expression, output, and \
         charts as images.",
        run_code,
    )]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CodeArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Code.
    code: String,
    /// Language: python, javascript, typescript or bash. Defaults to python.
    language: Option<String>,
    /// Name of a context with its own variables. Defaults to the common context of the language.
    context: Option<String>,
    /// Time after which the code is interrupted, in seconds. Defaults to 60.
    #[schemars(range(min = 1, max = 86_400))]
    timeout_s: Option<u32>,
}

/// Result of code.
#[derive(Default, Serialize, JsonSchema)]
pub struct CodeOutput {
    /// Displayed values, as text. At most 16 KiB.
    pub result: String,
    /// Standard output, at most 16 KiB.
    pub stdout: String,
    /// Standard error, at most 16 KiB.
    pub stderr: String,
    /// Exception with its traceback, if the code failed. At most 16 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Number of images in the result.
    pub images: usize,
    /// Number of images that are omitted because the result would be too long.
    pub omitted_images: usize,
    /// True if the code was interrupted at its timeout.
    pub timed_out: bool,
}

/// Code to run.
pub struct CodeRequest {
    /// Code.
    pub code: String,
    /// Language.
    pub language: Option<String>,
    /// Name of a context.
    pub context: Option<String>,
    /// Timeout.
    pub timeout: Duration,
}

type Images = Vec<(&'static str, String)>;

/// Runs code in the interpreter of a sandbox.
async fn run_code(
    session: Arc<Session>,
    arguments: CodeArguments,
) -> ToolResult<Reply<CodeOutput>> {
    let request = CodeRequest {
        code: arguments.code,
        language: arguments.language,
        context: arguments.context,
        timeout: timeout(arguments.timeout_s, DEFAULT_TIMEOUT_S)?,
    };
    let (sandbox, _) = session.running(&arguments.sandbox).await?;
    let (output, images) = run_in(&session, &sandbox, request).await?;
    Ok(Reply::with_images(output, images))
}

/// Runs code in a sandbox.
pub async fn run_in(
    session: &Arc<Session>,
    sandbox: &Sandbox,
    request: CodeRequest,
) -> ToolResult<(CodeOutput, Images)> {
    let language = request.language.unwrap_or_else(|| "python".to_owned());
    let mut body = json!({ "code": request.code });
    match &request.context {
        Some(name) => {
            body["context_id"] = json!(context(session, sandbox, &language, name).await?);
        }
        None => body["language"] = json!(language),
    }
    let mut parts = Parts::default();
    let execution = async {
        let mut response = send(session, sandbox, "/execute", &body).await?;
        parts.receive(&mut response).await
    };
    // When the response is dropped, its connection closes and the interpreter stops the code.
    let timed_out = match tokio::time::timeout(request.timeout, execution).await {
        Ok(result) => {
            result?;
            false
        }
        Err(_) => true,
    };
    let images = parts.images;
    let output = CodeOutput {
        result: parts.result.text(None).0,
        stdout: parts.stdout.text(None).0,
        stderr: parts.stderr.text(None).0,
        error: parts.error.map(|error| error.text(None).0),
        images: images.len(),
        omitted_images: parts.omitted_images,
        timed_out,
    };
    Ok((output, images))
}

/// Returns the id of a context. Creates the context at its first use.
async fn context(
    session: &Session,
    sandbox: &Sandbox,
    language: &str,
    name: &str,
) -> ToolResult<String> {
    let id = &sandbox.record.id;
    let key = (id.clone(), language.to_owned(), name.to_owned());
    if let Some(context) = session.contexts.lock().get(&key) {
        return Ok(context.clone());
    }
    let response = send(
        session,
        sandbox,
        "/contexts",
        &json!({ "language": language }),
    )
    .await?;
    let body = response.collect(MAX_RESPONSE_BYTES).await?;
    let created: Value = serde_json::from_slice(&body).unwrap_or_default();
    let Some(context) = created["id"].as_str() else {
        return Err(ToolError::new("the code interpreter created no context"));
    };
    session.contexts.lock().insert(key, context.to_owned());
    Ok(context.to_owned())
}

/// Sends a request to the code interpreter.
async fn send(
    session: &Session,
    sandbox: &Sandbox,
    path: &str,
    body: &Value,
) -> ToolResult<PooledResponse> {
    let body = body.to_string().into();
    let client = &session.client;
    let response = client.request_port(sandbox, PORT, Method::POST, path, Some(body));
    let response = response.await?;
    if response.status.is_success() {
        return Ok(response);
    }
    let status = response.status;
    // Errors of the gateway are JSON objects, errors of the interpreter are text.
    let is_gateway = matches!(status.as_u16(), 502 | 504);
    let body = response
        .collect(MAX_RESPONSE_BYTES)
        .await
        .unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    if is_gateway {
        return Err(ToolError::new(format!(
            "the sandbox has no code interpreter, because its template is `{}`: create a sandbox \
             with the template `{TEMPLATE}`, or use sandbox_exec",
            sandbox.record.template
        )));
    }
    Err(ToolError::new(format!(
        "the code interpreter rejected the request: {text}"
    )))
}

/// Parts of a result.
#[derive(Default)]
struct Parts {
    result: HeadTail,
    stdout: HeadTail,
    stderr: HeadTail,
    error: Option<HeadTail>,
    images: Images,
    images_bytes: usize,
    omitted_images: usize,
}

impl Parts {
    /// Receives events, one JSON object per line, until the end.
    async fn receive(&mut self, response: &mut PooledResponse) -> ToolResult<()> {
        let mut line: Vec<u8> = Vec::new();
        while let Some(piece) = response.next().await? {
            for part in piece.split_inclusive(|byte| *byte == b'\n') {
                if line.len() + part.len() > MAX_EVENT_BYTES {
                    return Err(ToolError::new(
                        "the code interpreter sent a result that is too long: reduce the size of \
                         the displayed value, or save it to a file",
                    ));
                }
                line.extend_from_slice(part);
                if line.ends_with(b"\n") {
                    // Programs of the guest may have replaced the interpreter.
                    if let Ok(event) = serde_json::from_slice(&line) {
                        self.add(event);
                    }
                    line.clear();
                }
            }
        }
        Ok(())
    }

    /// Adds an event of the interpreter to the result: output, value, image or error.
    fn add(&mut self, event: Value) {
        let text = |name: &str| event[name].as_str().unwrap_or_default();
        match text("type") {
            "stdout" => self.stdout.push(text("text").as_bytes()),
            "stderr" => self.stderr.push(text("text").as_bytes()),
            "result" => {
                for (field, mime) in [("png", "image/png"), ("jpeg", "image/jpeg")] {
                    if let Some(data) = event[field].as_str() {
                        self.add_image(mime, data);
                    }
                }
                let texts = ["text", "markdown", "html", "svg", "latex"];
                // The first representation of a value suffices.
                if let Some(value) = texts.into_iter().find_map(|name| event[name].as_str()) {
                    self.result.push(value.as_bytes());
                    self.result.push(b"\n");
                }
            }
            "error" => {
                let error = self.error.get_or_insert_default();
                let summary = format!("{}: {}\n", text("name"), text("value"));
                error.push(summary.as_bytes());
                error.push(text("traceback").as_bytes());
            }
            _ => {}
        }
    }

    fn add_image(&mut self, mime: &'static str, data: &str) {
        // Interpreters wrap lines of base64.
        let data: String = data.split_ascii_whitespace().collect();
        let is_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
        if !data.bytes().all(is_base64) || self.images_bytes + data.len() > MAX_IMAGES_BYTES {
            self.omitted_images += 1;
            return;
        }
        self.images_bytes += data.len();
        self.images.push((mime, data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::MAX_TEXT_BYTES;

    #[test]
    fn results_are_bounded_and_pictures_are_valid_base64() {
        let mut parts = Parts::default();
        parts.add(json!({ "type": "result", "png": "aGVs\nbG8=", "text": "<Figure>" }));
        parts.add(json!({ "type": "result", "png": "not base64!" }));
        parts.add(json!({ "type": "result", "png": "A".repeat(MAX_IMAGES_BYTES) }));
        parts.add(json!({ "type": "stdout", "text": "x".repeat(1 << 20) }));
        parts.add(json!({ "type": "stdout", "text": 7 }));
        parts.add(json!([1, 2]));
        assert_eq!(parts.images, [("image/png", "aGVsbG8=".to_owned())]);
        assert_eq!(parts.omitted_images, 2);
        assert_eq!(parts.result.text(None).0, "<Figure>\n");
        assert!(parts.stdout.text(None).0.len() <= MAX_TEXT_BYTES);
        assert!(parts.error.is_none());
    }
}

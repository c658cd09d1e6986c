//! `jiffy function invoke`: sends a request to a function through the API.

use super::path;
use crate::cli::FunctionInvokeArgs;
use anyhow::Context;
use bytes::Bytes;
use hyper::Method;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::process::ExitCode;

/// Maximum size of a response that is printed as JSON, in bytes.
const MAX_SHOWN_BYTES: usize = 64 << 20;

/// Sends a request and prints the response. Exits with status 1 if the response is not a success.
pub async fn run(args: &FunctionInvokeArgs) -> anyhow::Result<ExitCode> {
    // This only checks the name.
    path(&args.name, "")?;
    anyhow::ensure!(
        args.path.starts_with('/'),
        "the path `{}` must start with /",
        args.path
    );
    let body = args.data.as_deref().map(body).transpose()?;
    // The same default as curl.
    let method = match (&args.method, &body) {
        (Some(method), _) => method
            .to_uppercase()
            .parse()
            .context("invalid request method")?,
        (None, Some(_)) => Method::POST,
        (None, None) => Method::GET,
    };
    let headers = headers(&args.header)?;
    let client = jiffy_daemon::open_client(&args.output.host.server()).await?;
    let request = client.request_function(&args.name, method, &args.path, &headers, body);
    let mut response = request.await?;
    let status = response.status;
    if args.output.json {
        let fields = response.headers.iter().map(|(name, value)| {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            (name.to_string(), Value::from(value))
        });
        let fields: Map<String, Value> = fields.collect();
        let body = response.collect(MAX_SHOWN_BYTES).await?;
        let body = String::from_utf8_lossy(&body);
        let output = json!({ "status": status.as_u16(), "headers": fields, "body": body });
        outln!("{}", jiffy_client::terminal::json(&output)?);
    } else {
        while let Some(bytes) = response.next().await? {
            // Flushed for each chunk: the function may send its response slowly.
            let mut out = std::io::stdout().lock();
            out.write_all(&bytes)?;
            out.flush()?;
        }
    }
    if status.is_success() {
        return Ok(ExitCode::SUCCESS);
    }
    errln!("jiffy: the response has status {status}");
    Ok(ExitCode::FAILURE)
}

/// Returns the body in an argument: text, `@FILE`, or `@-` for standard input.
fn body(data: &str) -> anyhow::Result<Bytes> {
    let Some(file) = data.strip_prefix('@') else {
        return Ok(Bytes::from(data.to_owned()));
    };
    let mut content = Vec::new();
    match file {
        "-" => drop(std::io::stdin().read_to_end(&mut content)?),
        file => content = std::fs::read(file).with_context(|| format!("cannot read {file}"))?,
    }
    Ok(content.into())
}

/// Parses `NAME: VALUE` arguments.
fn headers(lines: &[String]) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for line in lines {
        let invalid = || format!("`{line}` is not a header: use NAME: VALUE");
        let (name, value) = line.split_once(':').with_context(invalid)?;
        let name: HeaderName = name.trim().parse().with_context(invalid)?;
        headers.append(
            name,
            HeaderValue::from_str(value.trim()).with_context(invalid)?,
        );
    }
    Ok(headers)
}

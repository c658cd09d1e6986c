//! Deployment and invocation of functions.

use super::Client;
use anyhow::Context;
use bytes::{BufMut, Bytes, BytesMut};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request};
use jiffy_agent_client::{PooledResponse, RequestBody};
use serde::de::DeserializeOwned;
use serde_json::Value;

impl Client {
    /// Deploys a module with the settings of `POST /functions/{name}`. Without a module, the
    /// settings must have a digest.
    pub async fn deploy_function<T: DeserializeOwned>(
        &self,
        name: &str,
        settings: &Value,
        module: Option<&[u8]>,
    ) -> anyhow::Result<T> {
        let boundary = boundary()?;
        let path = format!("/functions/{name}");
        let mut request = Request::builder().method(Method::POST).uri(path);
        let headers = request.headers_mut().context("invalid path")?;
        headers.clone_from(&self.server.headers);
        let kind = format!("multipart/form-data; boundary={boundary}");
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(&kind)?);
        let body = RequestBody::whole(form(&boundary, settings, module));
        let response = self
            .connections
            .send(request.body(body)?)
            .await
            .map_err(|e| self.server.request_error(e))?;
        let (_, function) = self.parse(response).await?;
        Ok(function)
    }

    /// Sends a request to a function. `path` must start with a slash.
    pub async fn request_function(
        &self,
        name: &str,
        method: Method,
        path: &str,
        additional_headers: &HeaderMap,
        body: Option<Bytes>,
    ) -> anyhow::Result<PooledResponse> {
        let path = format!("/functions/{name}/invoke{path}");
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("invalid path")?;
        headers.clone_from(&self.server.headers);
        for (name, value) in additional_headers {
            // Several values of a header are all sent.
            headers.append(name, value.clone());
        }
        let request = request.body(RequestBody::Whole(body))?;
        let response = self.connections.send(request).await;
        response.map_err(|e| self.server.request_error(e))
    }
}

/// Returns a random boundary of a multipart form.
fn boundary() -> Result<String, getrandom::Error> {
    let (high, low) = (getrandom::u64()?, getrandom::u64()?);
    Ok(format!("{high:016x}{low:016x}"))
}

/// Returns a form with the part `settings` and an optional part `module`. The random boundary is
/// assumed not to occur in the parts.
fn form(boundary: &str, settings: &Value, module: Option<&[u8]>) -> Bytes {
    // Enough for the heads of both parts and the settings, usually.
    let mut form = BytesMut::with_capacity(module.map_or(0, <[u8]>::len) + 1024);
    let mut part = |name: &str, kind: &str, content: &[u8]| {
        let head = format!(
            "--{boundary}\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\
             content-type: {kind}\r\n\r\n"
        );
        form.put(head.as_bytes());
        form.put(content);
        form.put(&b"\r\n"[..]);
    };
    part(
        "settings",
        "application/json",
        settings.to_string().as_bytes(),
    );
    if let Some(module) = module {
        part("module", "application/wasm", module);
    }
    // The closing boundary has two more dashes (RFC 2046, 5.1.1).
    form.put(format!("--{boundary}--\r\n").as_bytes());
    form.freeze()
}

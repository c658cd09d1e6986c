//! Templates of new sandboxes: imports of images, and preparation by the program.

use anyhow::{Context, anyhow};
use hyper::Method;
use jiffy_api_types::{BuildState, BuildStatus, RequestedBuild};
use jiffy_client::Client;
use serde_json::{Value, json};
use std::pin::Pin;
use std::time::Duration;

/// Interval of requests for the state of an import.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Future of a preparation. The result is the name of a template.
pub type ImportFuture = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;

/// Preparation of templates for new sandboxes.
pub trait Templates: Send + Sync {
    /// Imports an image of a registry, and returns the name of its template.
    fn import_image(&self, client: Client, image: String) -> ImportFuture;

    /// Builds a missing stock template if the daemon is on this host. Returns the name unchanged.
    fn prepare(&self, template: String) -> ImportFuture;
}

/// Imports an image of a registry as template `name`, unless it was imported before and has not
/// changed. If the import fails, an earlier import is used.
pub async fn import_image(client: &Client, name: &str, image: &str) -> anyhow::Result<()> {
    let Err(e) = import(client, name, image).await else {
        return Ok(());
    };
    match client.has_template(name).await {
        Ok(true) => Ok(()),
        _ => Err(e.context(format!("cannot import image {image}"))),
    }
}

async fn import(client: &Client, name: &str, image: &str) -> anyhow::Result<()> {
    let body = json!({ "name": name });
    let requested: RequestedBuild = client.call(Method::POST, "/v3/templates", &body).await?;
    let (template, build) = (&requested.template_id, &requested.build_id);
    let path = format!("/v2/templates/{template}/builds/{build}");
    let spec = json!({ "fromImage": image, "steps": [] });
    let () = client.call(Method::POST, &path, &spec).await?;
    let path = format!("/templates/{template}/builds/{build}/status?limit=1");
    loop {
        let status: BuildStatus = client.call(Method::GET, &path, &Value::Null).await?;
        match status.status {
            BuildState::Ready => return Ok(()),
            BuildState::Error => {
                let reason = status.reason.map(|reason| reason.message);
                return Err(anyhow!(
                    reason.context("the import failed without a reason")?
                ));
            }
            _ => tokio::time::sleep(STATUS_POLL_INTERVAL).await,
        }
    }
}

//! Templates of new sandboxes: imports of images, and preparation of stock templates by the program
//! that runs the server ([`Templates`]).

use anyhow::{Context, anyhow};
use hyper::Method;
use jiffy_api_types::{BuildState, BuildStatus};
use jiffy_client::Client;
use jiffy_image::image_on_demand;
use serde_json::Value;
use std::pin::Pin;
use std::time::Duration;

/// Interval of requests for the state of an import.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Future of a preparation. The result is the name of a template.
pub type PrepareFuture = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;

/// Preparation of templates for new sandboxes.
pub trait Templates: Send + Sync {
    /// Builds a missing stock template if the daemon is on this host. Returns the name unchanged.
    fn prepare(&self, template: String) -> PrepareFuture;
}

/// Imports an image of a registry, unless it was imported before and has not changed. If the import
/// fails, an earlier import is used. Returns the name of the template.
pub async fn import_image(client: &Client, image: &str) -> anyhow::Result<String> {
    let name = image_on_demand(image);
    let Err(e) = import(client, &name, image).await else {
        return Ok(name);
    };
    match client.has_template(&name).await {
        Ok(true) => Ok(name),
        _ => Err(e.context(format!("cannot import image {image}"))),
    }
}

/// Imports an image as a template, and waits for the result.
async fn import(client: &Client, name: &str, image: &str) -> anyhow::Result<()> {
    let path = client.import_image(name, image).await?;
    let path = format!("{path}/status?limit=1");
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

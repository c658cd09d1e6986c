//! Preparation of templates, which the program implements.

use jiffy_client::Client;
use std::pin::Pin;

/// Future of a preparation. The result is the name of a template.
pub type ImportFuture = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;

/// Preparation of templates for new sandboxes.
pub trait Templates: Send + Sync {
    /// Imports an image of a registry, and returns the name of its template.
    fn import_image(&self, client: Client, image: String) -> ImportFuture;

    /// Builds a missing stock template if the daemon is on this host. Returns the name unchanged.
    fn prepare(&self, template: String) -> ImportFuture;
}

//! Stock templates in the shared store, which a host fetches when it joins the fleet. A *stock
//! template* is a template whose recipe Jiffy contains.
//!
//! A *recipe* is a directory with the packages, files and settings of a template. A *member* is a
//! host of the fleet.

use async_trait::async_trait;
use jiffy_fleet::join::StockTemplates;
use jiffy_image::stock_names;
use jiffy_store::host::RemoteStore;
use std::sync::Arc;

/// Stock templates in a store. `jiffy fleet init` and `jiffy template push` store them.
#[derive(Debug)]
pub struct StoredTemplates(pub Arc<RemoteStore>);

#[async_trait]
impl StockTemplates for StoredTemplates {
    async fn stored(&self) -> Vec<String> {
        let mut stored = Vec::new();
        for name in stock_names() {
            match self.0.find_template(name).await {
                Ok(Some(_)) => stored.push(name.to_owned()),
                Ok(None) => {}
                // The new member can pull the template later.
                Err(error) => {
                    tracing::warn!(%error, template = name, "cannot find a template for a new member");
                }
            }
        }
        stored
    }
}

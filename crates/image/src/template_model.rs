//! Data model of templates: names, recipes, manifests and errors. All modules that build, import,
//! store or remove templates depend on this module. It depends on none of them.

mod error;
pub(crate) mod manifest;
mod name;
mod recipe;
mod reference;
mod stock;

pub use error::TemplateError;
pub use manifest::{
    Defaults, HistoryStep, ImageOrigin, ImageSum, MANIFEST_FORMAT, MAX_IMAGES, TemplateManifest,
    Visibility,
};
pub(crate) use manifest::{MANIFEST, ManifestFields};
pub use name::{MAX_TAG, MAX_TEMPLATE_NAME};
pub use recipe::{Recipe, RecipeError};
pub use reference::{
    DEFAULT_TAG, Reference, image_on_demand, imported_image, is_image_on_demand, unfinished_build,
};
pub use stock::stock_names;

use crate::verified::VerifiedFile;

/// A verified template. Its images are not removed while this value exists, or while any process
/// has one of their files open.
#[derive(Debug)]
pub struct Template {
    pub manifest: TemplateManifest,
    /// Images of the root file system, lowest first (EROFS, read-only).
    pub images: Vec<VerifiedFile>,
}

//! Sources of the usage of keys, in addition to their sandboxes.

use super::{Budgets, Quota};
use jiffy_function_manager::Functions;
use jiffy_template_builder::{BuildUsage, Builder};
use jiffy_volumes::HostVolumes;
use std::sync::Arc;

impl Quota {
    /// Includes the usage of `builder` and applies the limits to it.
    pub fn count_builder(self: &Arc<Self>, builder: &Builder) {
        // A weak reference, because the builder owns this quota.
        let weak = builder.downgrade();
        let source = move |owner: &str| match weak.upgrade() {
            Some(builder) => builder.usage_of(owner).map_err(|e| e.to_string()),
            // The daemon is shutting down.
            None => Ok(BuildUsage::default()),
        };
        // Only the first call has an effect; a host has one builder.
        let _ = self.builds.set(Box::new(source));
        builder.limit_owners(Arc::new(Budgets(self.clone())));
    }

    /// Includes the disk usage of `functions`.
    pub fn count_functions(&self, functions: &Functions) {
        let functions = functions.clone();
        let source = move |key: &str| functions.disk_bytes(Some(key));
        // Only the first call has an effect; a host has one set of functions.
        let _ = self.function_bytes.set(Box::new(source));
    }

    /// Includes the sizes of `volumes`.
    pub fn count_volumes(&self, volumes: Arc<HostVolumes>) {
        let source = move |key: &str| {
            let sizes = volumes.volumes().total_bytes(key);
            sizes.map_err(|e| e.to_string())
        };
        // Only the first call has an effect; a host has one set of volumes.
        let _ = self.volume_bytes.set(Box::new(source));
    }
}

//! Concerns of sandboxes beside their life, each a handle to the same sandboxes.

use super::{Sandboxes, SandboxesInner};
use std::sync::Arc;

/// A handle, and the method of [`Sandboxes`] that returns it.
macro_rules! concern {
    ($(#[$about:meta])* $name:ident, $method:ident) => {
        $(#[$about])*
        pub struct $name<'a>(pub(super) &'a Arc<SandboxesInner>);

        impl Clone for $name<'_> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl Copy for $name<'_> {}

        impl Sandboxes {
            $(#[$about])*
            pub fn $method(&self) -> $name<'_> {
                $name(&self.0)
            }
        }
    };
}

concern! {
    /// Snapshots of sandboxes: listing, removal, verification.
    Snapshots, snapshots
}
concern! {
    /// Snapshots of booted templates, which new sandboxes start from.
    TemplateSnapshots, templates
}
concern! {
    /// Snapshots at the end of the steps of template builds.
    BuildSteps, build_steps
}
concern! {
    /// The warm pool: restored sandboxes that wait for their creator.
    WarmPool, pool
}
concern! {
    /// Figures of all sandboxes and their host: states, durations, promised resources.
    SandboxFigures, figures
}
concern! {
    /// Budgets of owners, and what of them is used.
    OwnerBudgets, budgets
}
concern! {
    /// One sandbox as it can be seen: use of resources, process, console, connections.
    Observation, observe
}
concern! {
    /// Sandboxes by owner, name or token.
    SandboxIndex, index
}
concern! {
    /// Timeouts of sandboxes.
    Timeouts, timeouts
}

//! Concerns of sandboxes beside their life, each a handle to the same sandboxes.

use super::{Sandboxes, SandboxesInner};
use jiffy_engine_api::Engine;
use std::sync::Arc;

/// A handle, and the method of [`Sandboxes`] that returns it.
macro_rules! concern {
    ($(#[$about:meta])* $name:ident, $method:ident) => {
        $(#[$about])*
        pub struct $name<'a, E: Engine>(pub(super) &'a Arc<SandboxesInner<E>>);

        impl<E: Engine> Clone for $name<'_, E> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<E: Engine> Copy for $name<'_, E> {}

        impl<E: Engine> Sandboxes<E> {
            $(#[$about])*
            pub fn $method(&self) -> $name<'_, E> {
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

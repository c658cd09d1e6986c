//! Functions of a host: modules and versions on disk, a process per tenant that runs them, and
//! requests to it.
//!
//! The process is the program `jiffy-functions` (crates/functions), which links Wasmtime; this crate
//! does not. Why it is so: docs/design-functions.md.

pub mod compiler;
pub mod tenant_process;

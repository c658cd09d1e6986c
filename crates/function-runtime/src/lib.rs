//! Runtime of functions: WebAssembly modules that answer HTTP requests. Each request runs in an
//! instance of its own, which is discarded afterwards.
//!
//! Each tenant has one process, `jiffy-functions serve`, which is the binary of this crate.
//! docs/functions.md describes the ABI of modules, limits and responses; docs/design-functions.md
//! explains the design.

pub mod artifact;
pub mod compile;
pub mod direct;
pub mod engine;
pub mod epoch_ticker;
pub mod fault;
pub mod function;
pub mod guest_body;
pub mod jail;
pub mod logs;
pub mod metrics;
pub mod serve;
pub mod tenant;
pub mod world;

mod activity_report;
mod core_wasi;
mod core_world;
mod cpu_meter;
mod egress;
#[cfg(feature = "fast-reset")]
mod fast_reset;
mod head_timeout;
mod http_world;
mod memory_limiter;
mod outgoing;
mod request_body;
mod seccomp;
pub mod server;
mod symbol_table;
mod write_timeout;

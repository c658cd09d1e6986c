//! Functions: WebAssembly modules that answer HTTP requests, each request in an instance of its
//! own that is thrown away afterwards.
//!
//! A tenant has one process, `jiffy-functions serve`, which this crate's binary is. The ABI of
//! modules, limits and answers: docs/functions.md; why it is so: docs/design-functions.md.

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

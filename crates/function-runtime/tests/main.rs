//! Tests of tenants' processes, with the real program.

mod core_wasi;
mod deploy;
mod direct;
mod egress;
mod examples;
mod fast_reset;
mod host;
mod http_world;
mod jail;
mod limits;
mod neighbours;
#[path = "support/skip.rs"]
mod skip;
mod support;
#[path = "support/swap.rs"]
mod swap;
mod traces;
mod wasi_http;

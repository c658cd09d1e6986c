//! Gateway tests with guests that are tasks of the test. They are a single program, because they
//! share most of their code.
#![allow(clippy::unwrap_used, clippy::panic)]

mod encrypted;
mod errors;
mod file_links;
mod forwarded;
mod forwarded_channel;
mod fronts;
mod guest_calls;
mod keys;
mod limits;
mod local;
mod proxy;
mod reuse;
mod streaming;
mod support;
mod uses;

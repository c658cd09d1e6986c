//! Gateway tests, with guests that are programs of the test. One program, because the tests share
//! most of their code.
#![allow(clippy::unwrap_used, clippy::panic)]

mod encrypted;
mod errors;
mod file_links;
mod keys;
mod limits;
mod local;
mod proxy;
mod reuse;
mod streaming;
mod support;

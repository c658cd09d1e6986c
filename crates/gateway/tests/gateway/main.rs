//! The gateway, with guests that are none: one program for all themes, which share most of what they are made of.
#![allow(clippy::unwrap_used, clippy::panic)]

mod encrypted;
mod errors;
mod file_links;
mod keys;
mod limits;
mod local;
mod proxy;
mod reuse;
mod support;

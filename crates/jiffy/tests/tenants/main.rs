//! Attacks of one API key on another, against a real daemon.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

mod budget;
mod isolation;
mod keys;
mod names;
mod net;
mod pull;
mod registry;
mod root;
mod two_keys;

//! The control plane, with an engine that is none: one program for all themes, which share most of what they are made of.
#![allow(clippy::unwrap_used, clippy::panic)]

mod builds;
mod create;
mod document;
mod form;
mod keys;
mod life;
mod snapshots;
mod support;

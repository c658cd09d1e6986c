//! Tests of the control plane with a fake engine. All topics share one program, because they link
//! the same dependencies.
#![allow(clippy::unwrap_used, clippy::panic)]

mod access;
mod audit;
mod build_sandboxes;
mod builds;
mod call_examples;
mod callers;
mod captures;
mod create;
mod deployments;
mod document;
mod error_codes;
mod events;
mod fleet;
mod function_keys;
mod idle;
mod keys;
mod lifecycle;
mod limits;
mod lineage;
mod names;
mod owner_limits;
mod prune;
mod reference;
mod refusal_form;
mod released_fields;
mod sandbox_names;
mod secrets;
mod snapshots;
mod spelling;
mod support;
mod template_names;
mod template_pages;
mod usage;
mod volumes;

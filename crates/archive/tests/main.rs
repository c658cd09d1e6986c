//! Tests of archives.

mod attributes;
mod hostile;
mod layers;

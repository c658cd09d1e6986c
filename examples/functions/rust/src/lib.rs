//! Counts lines, words and characters of the request's body.

mod handler;

#[cfg(target_os = "wasi")]
mod function;

//! Counts lines, words and characters of the text that is sent.

mod handler;

#[cfg(target_os = "wasi")]
mod function;

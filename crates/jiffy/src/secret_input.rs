//! Secrets from a file or standard input.

use anyhow::{Context, bail};
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::Path;
use zeroize::Zeroizing;

/// Reads a secret of at most `most` bytes from `file`, or from standard input, without one line
/// break at its end. `what` names the secret in errors, and `option` the option with the file.
pub fn read(
    file: Option<&Path>,
    what: &str,
    option: &str,
    most: usize,
) -> anyhow::Result<Zeroizing<String>> {
    // Three bytes more: one byte that shows that the value is too long, and a line break of two
    // bytes.
    let limit = u64::try_from(most + 3)?;
    let mut value = Zeroizing::new(String::new());
    match file {
        Some(file) => {
            let context = || format!("cannot read the {what} from {}", file.display());
            let opened = File::open(file).with_context(context)?;
            opened
                .take(limit)
                .read_to_string(&mut value)
                .with_context(context)?;
        }
        None => {
            let stdin = std::io::stdin();
            if stdin.is_terminal() {
                bail!(
                    "standard input is a terminal, which would show the {what}: use `{option} \
                     FILE`, or redirect standard input"
                );
            }
            let read = stdin.take(limit).read_to_string(&mut value);
            read.with_context(|| format!("cannot read the {what} from standard input"))?;
        }
    }
    if value.ends_with('\n') {
        value.pop();
        if value.ends_with('\r') {
            value.pop();
        }
    }
    if value.is_empty() || value.len() > most {
        bail!(
            "the {what} must have 1 to {most} bytes: write it to standard input, or use `{option} \
             FILE`"
        );
    }
    Ok(value)
}

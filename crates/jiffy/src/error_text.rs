//! Errors as they are told.

/// An error and its causes, each told once: many errors tell their cause themselves.
pub fn told(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[derive(Debug, thiserror::Error)]
    #[error("reading /x: {source}")]
    struct ReadError {
        source: std::io::Error,
    }

    #[test]
    fn a_cause_is_told_once() {
        let source = std::io::Error::other("too many links");
        let read: Result<(), _> = Err(ReadError { source });
        let error = read.context("no network").unwrap_err();
        assert_eq!(told(&error), "no network: reading /x: too many links");
        let error = anyhow!("it ended").context("no daemon");
        assert_eq!(told(&error), "no daemon: it ended");
    }
}

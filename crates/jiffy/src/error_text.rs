//! Text of errors for standard error.

/// Returns the text of an error and its causes. Causes whose text is already included are skipped.
pub fn describe(error: &anyhow::Error) -> String {
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
    fn a_cause_is_included_once() {
        let source = std::io::Error::other("too many links");
        let read: Result<(), _> = Err(ReadError { source });
        let error = read.context("no network").unwrap_err();
        assert_eq!(describe(&error), "no network: reading /x: too many links");
        let error = anyhow!("connection closed").context("no daemon");
        assert_eq!(describe(&error), "no daemon: connection closed");
    }
}

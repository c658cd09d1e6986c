//! Classifies failed requests to a store: temporary failures are retried, others are reported.

use crate::StoreError;
use crate::directory_store::DirectoryMissing;
use object_store::Error;

/// Maximum length in characters of a failure's reason.
const MAX_REASON_CHARS: usize = 300;

/// Creates the error of a failure that this host detects, such as a truncated response.
pub(crate) fn generic(reason: &'static str) -> Error {
    Error::Generic {
        store: "store",
        source: reason.into(),
    }
}

/// Returns the HTTP status of an error. Parses the message, because `object_store` reports a failed
/// listing without a separate status.
fn status(e: &Error) -> Option<u16> {
    let text = e.to_string();
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// Returns true if the same request may succeed later. Of the statuses 400 to 499, only 408
/// (timeout) and 429 (too many requests) are temporary.
pub(crate) fn is_passing(e: &Error) -> bool {
    !matches!(status(e), Some(400..=407 | 409..=428 | 430..=499))
}

/// Returns the message of a failure: code and message of an S3 server's XML, or the beginning of
/// the text.
fn reason(e: &(impl std::fmt::Display + ?Sized)) -> String {
    let text = e.to_string();
    let inner = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        Some(rest.split_once('<')?.0)
    };
    let message = match (inner("Code"), inner("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        _ => text.clone(),
    };
    // Replace control characters, because the message is shown on the operator's terminal.
    let printed = message
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c });
    printed.take(MAX_REASON_CHARS).collect()
}

/// Returns the message of a failure and of its first cause. The message of the HTTP client does not
/// include its cause, for example a refused connection.
fn reason_with_cause(e: &Error) -> String {
    let mut first: &dyn std::error::Error = e;
    while let Some(cause) = first.source() {
        first = cause;
    }
    let (text, cause) = (reason(e), reason(first));
    if text.contains(&cause) {
        text
    } else {
        format!("{text}: {cause}")
    }
}

/// Returns the reason if a request failed because the store does not exist.
fn absence(e: &Error) -> Option<String> {
    if let Error::Generic { source, .. } = e
        && let Some(missing) = source.downcast_ref::<DirectoryMissing>()
    {
        return Some(missing.to_string());
    }
    let reason = e
        .to_string()
        .contains("<Code>NoSuchBucket</Code>")
        .then(|| reason(e))?;
    Some(format!(
        "{reason}; create the bucket, or check --store and AWS_ENDPOINT_URL"
    ))
}

/// Returns the error of a request for object `key` that failed at attempt number `attempts`.
pub(crate) fn classify(key: &str, attempts: u32, e: &Error) -> StoreError {
    let object = key.to_owned();
    if let Some(reason) = absence(e) {
        return StoreError::Absent { object, reason };
    }
    match e {
        Error::NotFound { .. } => StoreError::Missing { object },
        Error::AlreadyExists { .. } | Error::Precondition { .. } => StoreError::Conflict { object },
        Error::PermissionDenied { source, .. } | Error::Unauthenticated { source, .. } => {
            StoreError::Denied {
                object,
                reason: reason(source),
            }
        }
        e if matches!(status(e), Some(401 | 403)) => StoreError::Denied {
            object,
            reason: reason(e),
        },
        e => StoreError::Unavailable {
            object,
            attempts,
            reason: reason_with_cause(e),
        },
    }
}

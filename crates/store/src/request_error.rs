//! Failures of requests to a store.

use crate::StoreError;
use crate::directory_store::DirectoryMissing;
use object_store::Error;

/// Maximum length in characters of the reason of a failure.
const MAX_REASON_CHARS: usize = 300;

/// Failure of a request for a reason of our own.
pub(crate) fn generic(reason: &'static str) -> Error {
    Error::Generic {
        store: "store",
        source: reason.into(),
    }
}

/// Status in the message of a request: listings have no other.
fn status(e: &Error) -> Option<u16> {
    let text = e.to_string();
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// Returns true if the same request may succeed later.
pub(crate) fn is_passing(e: &Error) -> bool {
    !matches!(status(e), Some(400..=407 | 409..=428 | 430..=499))
}

/// Message of a failure: what an S3 server says in XML, or the beginning of all of it.
fn reason(e: &(impl std::fmt::Display + ?Sized)) -> String {
    let text = e.to_string();
    let inner = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        Some(rest.split_once('<')?.0)
    };
    let told = match (inner("Code"), inner("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        _ => text.clone(),
    };
    // The operator's terminal shows it.
    let printed = told.chars().map(|c| match c.is_control() {
        true => ' ',
        false => c,
    });
    printed.take(MAX_REASON_CHARS).collect()
}

/// Reason for which there is no store at all, if that is why a request failed.
fn absence(e: &Error) -> Option<String> {
    if let Error::Generic { source, .. } = e
        && let Some(missing) = source.downcast_ref::<DirectoryMissing>()
    {
        return Some(missing.to_string());
    }
    let told = e
        .to_string()
        .contains("<Code>NoSuchBucket</Code>")
        .then(|| reason(e))?;
    Some(format!(
        "{told}; make the bucket, or check --store and AWS_ENDPOINT_URL"
    ))
}

/// Error of a request for object `key` that failed for good, at attempt number `attempts`.
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
            reason: reason(e),
        },
    }
}

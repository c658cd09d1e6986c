//! Id of a request. The gateway, the control plane and the guest use the same id in logs and
//! headers.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use std::cell::RefCell;

/// Header of the id in requests and responses.
pub static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length of an id that a client may choose.
const MAX_REQUEST_ID_BYTES: usize = 128;

thread_local! {
    static RANDOM_BYTES: RefCell<RandomBytes> = const { RefCell::new(RandomBytes::NONE) };
}

/// Random bytes from the kernel, buffered per thread: one system call serves many ids.
struct RandomBytes {
    bytes: [[u8; 16]; 64],
    /// Number of elements of `bytes` that no id has used.
    left: usize,
}

impl RandomBytes {
    const NONE: Self = Self {
        bytes: [[0; 16]; 64],
        left: 0,
    };

    /// Returns 16 bytes that no other id uses. `None` if the kernel has no random bytes.
    fn take(&mut self) -> Option<[u8; 16]> {
        if self.left == 0 {
            getrandom::fill(self.bytes.as_flattened_mut()).ok()?;
            self.left = self.bytes.len();
        }
        // Each id uses other bytes: the position only decreases until the next system call.
        self.left -= 1;
        self.bytes.get(self.left).copied()
    }
}

/// Id of a request. The control plane finds it in the request's extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestId(HeaderValue);

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestId {
    /// Returns the client's id if it has 1 to 128 letters, digits and `-_.:`. Otherwise creates a
    /// new id.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let legal = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
        let mut values = headers.get_all(&X_REQUEST_ID).iter();
        // Several ids are ambiguous.
        match (values.next(), values.next()) {
            (Some(value), None)
                if (1..=MAX_REQUEST_ID_BYTES).contains(&value.len())
                    && value.as_bytes().iter().all(legal) =>
            {
                Self(value.clone())
            }
            _ => Self::new(),
        }
    }

    /// Creates an id of 128 random bits.
    #[must_use]
    pub fn new() -> Self {
        // Without randomness, the id is not unique. This affects only the correlation of log lines.
        let Some(bytes) = RANDOM_BYTES.with_borrow_mut(RandomBytes::take) else {
            return Self(HeaderValue::from_static("unnamed"));
        };
        let text = format!("{:032x}", u128::from_le_bytes(bytes));
        Self(HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("unnamed")))
    }

    /// Returns the id as a header value.
    #[must_use]
    pub fn value(&self) -> HeaderValue {
        self.0.clone()
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[&str]) -> RequestId {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(&X_REQUEST_ID, HeaderValue::from_str(value).unwrap());
        }
        RequestId::of(&headers)
    }

    #[test]
    fn a_clients_id_is_retained() {
        assert_eq!(of(&["req_1.a:B-9"]).as_str(), "req_1.a:B-9");
    }

    #[test]
    fn a_missing_or_invalid_id_is_replaced() {
        for values in [
            &[][..],
            &[""],
            &["a b"],
            &["a\"}"],
            &["a", "b"],
            &[&"x".repeat(129)],
        ] {
            let id = of(values);
            assert_eq!(id.as_str().len(), 32, "{values:?}");
            assert_ne!(id, of(values));
        }
    }
}

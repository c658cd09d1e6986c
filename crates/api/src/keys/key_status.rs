//! [`KeyStatus`]: whether a key can be used, is revoked or expired, or was revoked with its
//! resources.

/// Status of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStatus {
    /// The key can be used.
    InForce,
    /// The key was revoked, has expired, or is unknown. Its resources remain.
    Over,
    /// The key was revoked, and all its resources are to be removed.
    Ended,
}

/// Columns of a key from which its status follows.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyEntry {
    pub revoked: bool,
    /// True if the resources of the key are to be removed.
    pub end: bool,
    pub expires_ms: Option<u64>,
}

impl KeyEntry {
    pub fn status(&self, now: u64) -> KeyStatus {
        match self {
            // A key whose resources are to be removed is always revoked, too.
            Self { end: true, .. } => KeyStatus::Ended,
            Self { revoked: true, .. } => KeyStatus::Over,
            Self {
                expires_ms: Some(at),
                ..
            } if *at <= now => KeyStatus::Over,
            _ => KeyStatus::InForce,
        }
    }
}

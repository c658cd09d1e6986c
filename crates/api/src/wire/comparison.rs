//! Conversion of comparisons to the bodies of the API.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiffy_api_types::{
    ComparedContent, ComparedState, ComparedType, ComparisonSummary, DifferenceKind, FileDifference,
};
use jiffy_sandbox_manager as manager;

/// Returns a difference.
pub(crate) fn difference(found: &manager::FileDifference) -> FileDifference {
    let path = String::from_utf8_lossy(&found.path);
    let is_lossy = path.as_bytes() != found.path;
    FileDifference {
        path_bytes: is_lossy.then(|| STANDARD.encode(&found.path)),
        path: path.into_owned(),
        kind: kind(found.kind),
        a: found.a.as_ref().map(state),
        b: found.b.as_ref().map(state),
        verified: found.is_verified,
    }
}

/// Returns the numbers and sizes of differences.
pub(crate) fn summary(differences: &[manager::FileDifference]) -> ComparisonSummary {
    let mut summary = ComparisonSummary::default();
    for found in differences {
        let count = match found.kind {
            manager::DifferenceKind::Added => &mut summary.added,
            manager::DifferenceKind::Changed => &mut summary.changed,
            manager::DifferenceKind::Removed => &mut summary.removed,
        };
        let size = found.b.or(found.a).map_or(0, |state| state.size);
        count.count += 1;
        // The guest reports the sizes.
        count.bytes = count.bytes.saturating_add(size);
    }
    summary
}

/// Returns the content of a file.
pub(crate) fn content(found: manager::ComparedContent) -> ComparedContent {
    let length = found.bytes.len();
    let (content, base64) = match String::from_utf8(found.bytes) {
        Ok(text) => (text, false),
        Err(error) => {
            let (end, is_cut) = {
                let error = error.utf8_error();
                (error.valid_up_to(), error.error_len().is_none())
            };
            let mut bytes = error.into_bytes();
            // The limit may have cut a character into parts.
            let is_text = is_cut && (length as u64) < found.size;
            if is_text {
                bytes.truncate(end);
                (String::from_utf8(bytes).unwrap_or_default(), false)
            } else {
                (STANDARD.encode(bytes), true)
            }
        }
    };
    ComparedContent {
        size: found.size,
        content,
        base64,
        truncated: (length as u64) < found.size,
        symlink: found.is_symlink,
    }
}

fn kind(kind: manager::DifferenceKind) -> DifferenceKind {
    match kind {
        manager::DifferenceKind::Added => DifferenceKind::Added,
        manager::DifferenceKind::Changed => DifferenceKind::Changed,
        manager::DifferenceKind::Removed => DifferenceKind::Removed,
    }
}

/// Converts the state of a file for the response.
fn state(state: &manager::FileState) -> ComparedState {
    ComparedState {
        kind: match state.kind {
            'f' => ComparedType::File,
            'd' => ComparedType::Directory,
            'l' => ComparedType::Symlink,
            // The guest chose the letter.
            _ => ComparedType::Other,
        },
        size: state.size,
        mode: state.mode,
        uid: state.uid,
        gid: state.gid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_text_or_base64() {
        let of = |bytes: &[u8], size: u64| {
            let found = content(manager::ComparedContent {
                size,
                bytes: bytes.to_vec(),
                is_symlink: false,
            });
            (found.content, found.base64, found.truncated)
        };
        assert_eq!(of(b"text", 4), ("text".to_owned(), false, false));
        assert_eq!(of(b"text", 9), ("text".to_owned(), false, true));
        // The first byte of a character of two bytes.
        assert_eq!(of(b"tex\xc3", 9), ("tex".to_owned(), false, true));
        assert_eq!(of(b"tex\xc3", 4), ("dGV4ww==".to_owned(), true, false));
        assert_eq!(of(b"\xff", 9), ("/w==".to_owned(), true, true));
    }
}

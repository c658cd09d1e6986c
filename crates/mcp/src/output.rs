//! Bounds the output of commands in a sandbox before a coding agent receives it: only the beginning
//! and the end of long output is returned.

use std::collections::VecDeque;

/// Maximum length of a stream's text in a result, in bytes.
pub const MAX_TEXT_BYTES: usize = 16 * 1024;
/// Length of the beginning and of the end of a stream whose text is too long. The remaining bytes
/// are for the marker between them.
const PART_BYTES: usize = 8_000;

/// Returns the start of `text` with at most `limit` bytes, at a character boundary.
pub fn cut_text(text: &str, limit: usize) -> String {
    text[..text.floor_char_boundary(limit)].to_owned()
}

/// Beginning and end of a stream of bytes. Stores at most [`MAX_TEXT_BYTES`].
#[derive(Debug, Default)]
pub struct HeadTail {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    bytes: u64,
}

impl HeadTail {
    /// Adds bytes of the stream.
    pub fn push(&mut self, mut chunk: &[u8]) {
        const HALF: usize = MAX_TEXT_BYTES / 2;
        self.bytes += chunk.len() as u64;
        let room = HALF - self.head.len();
        let (first, rest) = chunk.split_at(room.min(chunk.len()));
        self.head.extend_from_slice(first);
        chunk = rest;
        // Earlier bytes than these would be removed again.
        chunk = &chunk[chunk.len().saturating_sub(HALF)..];
        let excess = (self.tail.len() + chunk.len()).saturating_sub(HALF);
        self.tail.drain(..excess);
        self.tail.extend(chunk);
    }

    /// Returns the number of bytes of the stream.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns all bytes of the stream. `None` if the stream is longer than [`MAX_TEXT_BYTES`].
    pub fn whole(&self) -> Option<Vec<u8>> {
        let is_complete = self.bytes <= MAX_TEXT_BYTES as u64;
        is_complete.then(|| self.head.iter().chain(&self.tail).copied().collect())
    }

    /// Returns the text of the stream, with U+FFFD for invalid UTF-8, and whether the text is
    /// complete. `file` is the file with the complete stream, for the marker.
    pub fn text(&self, file: Option<&str>) -> (String, bool) {
        if let Some(whole) = self.whole() {
            let text = String::from_utf8_lossy(&whole).into_owned();
            // Each invalid byte becomes three bytes.
            if text.len() <= MAX_TEXT_BYTES {
                return (text, true);
            }
            return (join(&text, &text, self.bytes, file), false);
        }
        // The cut may be inside a character.
        let head = match std::str::from_utf8(&self.head) {
            Err(e) if e.error_len().is_none() => &self.head[..e.valid_up_to()],
            _ => &self.head[..],
        };
        let continuation = |byte: &&u8| **byte & 0b1100_0000 == 0b1000_0000;
        let skipped = self.tail.iter().take(3).take_while(continuation).count();
        let tail: Vec<u8> = self.tail.iter().skip(skipped).copied().collect();
        let (head, tail) = (
            String::from_utf8_lossy(head),
            String::from_utf8_lossy(&tail),
        );
        (join(&head, &tail, self.bytes, file), false)
    }
}

/// Joins the start of `head` and the end of `tail` with a marker.
fn join(head: &str, tail: &str, bytes: u64, file: Option<&str>) -> String {
    let head = &head[..head.floor_char_boundary(PART_BYTES)];
    let tail = &tail[tail.ceil_char_boundary(tail.len().saturating_sub(PART_BYTES))..];
    let place = match file {
        Some(file) => format!("; complete output: {file}"),
        None => String::new(),
    };
    format!("{head}\n[truncated, {bytes} bytes in total{place}]\n{tail}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_output_is_complete() {
        let mut output = HeadTail::default();
        output.push(b"hello ");
        output.push("wörld\n".as_bytes());
        assert_eq!(output.text(None), ("hello wörld\n".to_owned(), true));
        let mut full = HeadTail::default();
        full.push(&[b'x'; MAX_TEXT_BYTES]);
        assert_eq!(full.text(None), ("x".repeat(MAX_TEXT_BYTES), true));
    }

    #[test]
    fn long_output_has_its_beginning_and_its_end_and_is_bounded() {
        for size in [1, 7, 4096, 100_000] {
            let mut output = HeadTail::default();
            output.push(b"first ");
            for _ in 0..(200_000 / size) {
                output.push(&vec![b'x'; size]);
            }
            output.push(b" last");
            let (text, complete) = output.text(Some("/tmp/out"));
            assert!(!complete && text.len() <= MAX_TEXT_BYTES, "{}", text.len());
            assert!(text.starts_with("first ") && text.ends_with(" last"));
            assert!(text.contains("complete output: /tmp/out]"));
            assert!(output.whole().is_none());
        }
    }

    #[test]
    fn binary_output_is_valid_text_within_the_bound() {
        for bytes in [
            vec![0xff; MAX_TEXT_BYTES],
            vec![0x80; 1 << 20],
            vec![0; 1 << 20],
        ] {
            let mut output = HeadTail::default();
            output.push(&bytes);
            let (text, complete) = output.text(None);
            assert!(!complete && text.len() <= MAX_TEXT_BYTES, "{}", text.len());
        }
    }

    #[test]
    fn characters_are_not_split_at_the_cut() {
        for prefix in 0..4 {
            let mut output = HeadTail::default();
            output.push(&vec![b'.'; prefix]);
            output.push("€".repeat(20_000).as_bytes());
            let (text, _) = output.text(None);
            assert!(!text.contains('\u{fffd}'), "{prefix}");
        }
    }
}

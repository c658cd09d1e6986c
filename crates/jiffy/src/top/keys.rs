//! Keys in the input of a terminal.
//!
//! `crossterm::event` is not used: its reader continues to read a closed terminal for ever, and
//! reads ahead of a shell that is started on the same terminal.

/// Maximum number of bytes of a control sequence.
const MAX_SEQUENCE: usize = 32;
/// Maximum number of bytes of pasted text.
const MAX_PASTE: usize = 4096;
const ESCAPE: u8 = 0x1b;
/// Sequence after pasted text.
const PASTE_END: &[u8] = b"\x1b[201~";

/// Pressed key, or pasted text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    Char(char),
    /// Control key with a letter, in lower case.
    Ctrl(char),
    Enter,
    Escape,
    Backspace,
    Delete,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    /// Pasted text, at most [`MAX_PASTE`] bytes.
    Paste(String),
}

/// Result of parsing the start of the input.
enum Parsed {
    /// A key, and the number of its bytes. `None` if the bytes have no meaning.
    Key(Option<Key>, usize),
    /// The start of pasted text, and the number of its bytes.
    PasteStart(usize),
    /// The sequence is incomplete.
    Incomplete,
}

/// Decoder of the input of a terminal.
#[derive(Debug, Default)]
pub struct KeyDecoder {
    /// Bytes that are not decoded yet.
    pending: Vec<u8>,
    /// Pasted text so far. `None` outside pasted text.
    paste: Option<Vec<u8>>,
}

impl KeyDecoder {
    /// Decodes further input.
    pub fn feed(&mut self, input: &[u8]) -> Vec<Key> {
        self.pending.extend_from_slice(input);
        let mut keys = Vec::new();
        while !self.pending.is_empty() {
            if self.paste.is_some() {
                match self.read_paste() {
                    Some(text) => keys.push(Key::Paste(text)),
                    None => break,
                }
                continue;
            }
            match parse(&self.pending) {
                Parsed::Key(key, length) => {
                    self.pending.drain(..length);
                    keys.extend(key);
                }
                Parsed::PasteStart(length) => {
                    self.pending.drain(..length);
                    self.paste = Some(Vec::new());
                }
                Parsed::Incomplete => break,
            }
        }
        keys
    }

    /// Returns whether the input ends within a sequence, for example with an escape character. If
    /// no further input follows soon, the caller must call [`Self::flush`].
    pub fn is_incomplete(&self) -> bool {
        self.paste.is_none() && !self.pending.is_empty()
    }

    /// Decodes an incomplete sequence: an escape character is the key, and all else is discarded.
    pub fn flush(&mut self) -> Option<Key> {
        let is_escape = self.pending == [ESCAPE];
        self.pending.clear();
        is_escape.then_some(Key::Escape)
    }

    /// Moves pending bytes to the pasted text. Returns the text if it is complete.
    fn read_paste(&mut self) -> Option<String> {
        let end = find(&self.pending, PASTE_END);
        // The end of the pending bytes may be the start of the closing sequence.
        let length = end.unwrap_or((self.pending.len() + 1).saturating_sub(PASTE_END.len()));
        let paste = self.paste.get_or_insert_default();
        let free = MAX_PASTE.saturating_sub(paste.len());
        paste.extend(self.pending.drain(..length).take(free));
        end?;
        self.pending.drain(..PASTE_END.len());
        let text = self.paste.take().unwrap_or_default();
        Some(String::from_utf8_lossy(&text).into_owned())
    }
}

fn find(bytes: &[u8], sequence: &[u8]) -> Option<usize> {
    bytes.windows(sequence.len()).position(|w| w == sequence)
}

/// Parses the first key of an input, which is not empty.
fn parse(input: &[u8]) -> Parsed {
    let key = match input[0] {
        ESCAPE => return parse_escape(input),
        b'\r' | b'\n' => Some(Key::Enter),
        0x08 | 0x7f => Some(Key::Backspace),
        // The control key with a letter from A to Z.
        control @ 0x01..=0x1a => Some(Key::Ctrl(char::from(control - 1 + b'a'))),
        0x00 | 0x1c..=0x1f => None,
        _ => return parse_char(input),
    };
    Parsed::Key(key, 1)
}

/// Parses a character in UTF-8.
fn parse_char(input: &[u8]) -> Parsed {
    let start = &input[..input.len().min(4)];
    let valid = match std::str::from_utf8(start) {
        Ok(text) => text,
        Err(e) => {
            let length = e.valid_up_to();
            // Without an error length, the input ends within a character.
            if length == 0 && e.error_len().is_none() {
                return Parsed::Incomplete;
            }
            std::str::from_utf8(&start[..length]).unwrap_or_default()
        }
    };
    match valid.chars().next() {
        Some(c) => Parsed::Key((!c.is_control()).then_some(Key::Char(c)), c.len_utf8()),
        None => Parsed::Key(None, 1),
    }
}

/// Parses an input that begins with an escape character.
fn parse_escape(input: &[u8]) -> Parsed {
    match input.get(1) {
        None => Parsed::Incomplete,
        Some(b'[') => parse_sequence(input),
        // The form of cursor keys in application mode.
        Some(b'O') => match input.get(2) {
            None => Parsed::Incomplete,
            Some(&last) => Parsed::Key(cursor_key(last), 3),
        },
        Some(_) => Parsed::Key(Some(Key::Escape), 1),
    }
}

/// Parses a control sequence (ECMA-48): parameters, and a final byte from `@` to `~`.
fn parse_sequence(input: &[u8]) -> Parsed {
    let body = &input[2..];
    let is_parameter = |byte: &u8| (0x20..=0x3f).contains(byte);
    let Some(length) = body.iter().position(|byte| !is_parameter(byte)) else {
        return if input.len() < MAX_SEQUENCE {
            Parsed::Incomplete
        } else {
            Parsed::Key(None, input.len())
        };
    };
    let (parameters, last) = (&body[..length], body[length]);
    // The escape character, `[` and the final byte are not parameters.
    let total = length + 3;
    if !(0x40..=0x7e).contains(&last) {
        // The byte begins another key.
        return Parsed::Key(None, total - 1);
    }
    if last != b'~' {
        return Parsed::Key(cursor_key(last), total);
    }
    // Modifiers follow a semicolon.
    let number = parameters.split(|&byte| byte == b';').next();
    let key = match number.unwrap_or_default() {
        b"200" => return Parsed::PasteStart(total),
        b"1" | b"7" => Some(Key::Home),
        b"3" => Some(Key::Delete),
        b"4" | b"8" => Some(Key::End),
        b"5" => Some(Key::PageUp),
        b"6" => Some(Key::PageDown),
        _ => None,
    };
    Parsed::Key(key, total)
}

/// Returns the key of a sequence that ends with the byte `last`.
fn cursor_key(last: u8) -> Option<Key> {
    match last {
        b'A' => Some(Key::Up),
        b'B' => Some(Key::Down),
        b'C' => Some(Key::Right),
        b'D' => Some(Key::Left),
        b'H' => Some(Key::Home),
        b'F' => Some(Key::End),
        // Enter on the numeric keypad.
        b'M' => Some(Key::Enter),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(input: &[u8]) -> Vec<Key> {
        KeyDecoder::default().feed(input)
    }

    #[test]
    fn keys_of_common_terminals_are_decoded() {
        for (input, key) in [
            (&b"\x1b[A"[..], Key::Up),
            (b"\x1bOB", Key::Down),
            (b"\x1b[1;5C", Key::Right),
            (b"\x1b[D", Key::Left),
            (b"\x1b[5~", Key::PageUp),
            (b"\x1b[6;2~", Key::PageDown),
            (b"\x1b[H", Key::Home),
            (b"\x1b[7~", Key::Home),
            (b"\x1bOF", Key::End),
            (b"\x1b[4~", Key::End),
            (b"\x1b[3~", Key::Delete),
            (b"\r", Key::Enter),
            (b"\x7f", Key::Backspace),
            (b"\x03", Key::Ctrl('c')),
            (b"K", Key::Char('K')),
            ("é".as_bytes(), Key::Char('é')),
            ("漢".as_bytes(), Key::Char('漢')),
        ] {
            assert_eq!(decode(input), [key], "{input:?}");
        }
    }

    #[test]
    fn keys_may_arrive_in_parts() {
        let input = "a\u{1b}[A漢\u{1b}[6~\u{1b}[200~xy\u{1b}[201~q".as_bytes();
        let whole = decode(input);
        assert_eq!(
            whole,
            [
                Key::Char('a'),
                Key::Up,
                Key::Char('漢'),
                Key::PageDown,
                Key::Paste("xy".to_owned()),
                Key::Char('q'),
            ]
        );
        for length in 1..input.len() {
            let mut decoder = KeyDecoder::default();
            let parts = input.chunks(length);
            let keys: Vec<Key> = parts.flat_map(|part| decoder.feed(part)).collect();
            assert_eq!(keys, whole, "{length}");
        }
    }

    #[test]
    fn a_lone_escape_is_a_key_after_a_pause() {
        let mut decoder = KeyDecoder::default();
        assert_eq!(decoder.feed(b"\x1b"), []);
        assert!(decoder.is_incomplete());
        assert_eq!(decoder.flush(), Some(Key::Escape));
        assert!(!decoder.is_incomplete());
        assert_eq!(decode(b"\x1bq"), [Key::Escape, Key::Char('q')]);
        // The rest of an incomplete sequence is not a key.
        assert_eq!(decoder.feed(b"\x1b[1;"), []);
        assert_eq!(decoder.flush(), None);
    }

    #[test]
    fn pasted_text_is_bounded_and_contains_no_keys() {
        let mut input = b"\x1b[200~".to_vec();
        input.extend(b"Ky\r".repeat(100_000));
        input.extend(b"\x1b[201~j");
        let mut decoder = KeyDecoder::default();
        let keys: Vec<Key> = input.chunks(1000).flat_map(|c| decoder.feed(c)).collect();
        assert_eq!(keys.len(), 2);
        assert!(matches!(&keys[0], Key::Paste(text) if text.len() == MAX_PASTE));
        assert_eq!(keys[1], Key::Char('j'));
    }

    #[test]
    fn any_input_is_decoded_in_bounded_memory() {
        let mut decoder = KeyDecoder::default();
        let mut seed = 1u32;
        for _ in 0..200_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let byte = match seed >> 29 {
                0 => ESCAPE,
                1 => b'[',
                2 => b'0',
                _ => (seed >> 16) as u8,
            };
            decoder.feed(&[byte]);
            assert!(decoder.pending.len() <= MAX_SEQUENCE, "{decoder:?}");
            // End a paste: all further input would be a part of its text.
            decoder.paste = None;
        }
    }
}

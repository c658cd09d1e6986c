//! Reader and writer of DER (X.690). Lengths are definite and minimal. All input is untrusted.

pub(super) const INTEGER: u8 = 0x02;
pub(super) const BIT_STRING: u8 = 0x03;
pub(super) const OCTET_STRING: u8 = 0x04;
pub(super) const OBJECT_IDENTIFIER: u8 = 0x06;
pub(super) const UTF8_STRING: u8 = 0x0c;
pub(super) const GENERALIZED_TIME: u8 = 0x18;
pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;

/// Maximum number of bytes of a length: elements have less than 16 MiB.
const MAX_LENGTH_BYTES: usize = 3;

/// Returns the tag of a constructed element with a context-specific number.
pub(super) const fn context(number: u8) -> u8 {
    0xa0 | number
}

/// An element: tag, length and content.
#[derive(Clone, Copy)]
pub(super) struct Element<'a> {
    pub tag: u8,
    pub content: &'a [u8],
    /// Tag, length and content.
    pub whole: &'a [u8],
}

/// Reads elements that follow each other.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads the elements inside the only element of `bytes`, which must have this tag.
    pub fn inside(bytes: &'a [u8], tag: u8) -> Option<Self> {
        let mut reader = Self::new(bytes);
        let content = reader.read(tag)?;
        reader.is_empty().then_some(Self(content))
    }

    /// Returns whether all elements were read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next element. `None` if the input ends or is invalid.
    pub fn element(&mut self) -> Option<Element<'a>> {
        let (&tag, rest) = self.0.split_first()?;
        // A tag of several bytes, which the documents do not contain.
        if tag & 0x1f == 0x1f {
            return None;
        }
        let (&first, mut rest) = rest.split_first()?;
        let mut length = usize::from(first);
        if first >= 0x80 {
            let count = usize::from(first & 0x7f);
            if count == 0 || count > MAX_LENGTH_BYTES {
                return None;
            }
            let (bytes, after) = rest.split_at_checked(count)?;
            rest = after;
            length = bytes.iter().fold(0, |sum, b| sum << 8 | usize::from(*b));
            if length < 0x80 || bytes.first() == Some(&0) {
                return None;
            }
        }
        let (content, rest) = rest.split_at_checked(length)?;
        let whole = self.0.get(..self.0.len() - rest.len())?;
        self.0 = rest;
        Some(Element {
            tag,
            content,
            whole,
        })
    }

    /// Returns the content of the next element, which must have this tag.
    pub fn read(&mut self, tag: u8) -> Option<&'a [u8]> {
        let element = self.element()?;
        (element.tag == tag).then_some(element.content)
    }

    /// Returns the content of the next element if it has this tag. Otherwise the element remains
    /// the next one.
    pub fn optional(&mut self, tag: u8) -> Option<&'a [u8]> {
        (self.0.first() == Some(&tag)).then(|| self.read(tag))?
    }
}

/// Returns an element.
pub(super) fn encode(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut element = vec![tag];
    let length = content.len().to_be_bytes();
    let [.., last] = length;
    if content.len() < 0x80 {
        element.push(last);
    } else {
        let digits = length.iter().skip_while(|b| **b == 0);
        let count = u8::try_from(digits.clone().count()).unwrap_or(0x7f);
        element.push(0x80 | count);
        element.extend(digits);
    }
    element.extend_from_slice(content);
    element
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_any_length_are_read_as_they_were_written() {
        for length in [0, 1, 127, 128, 255, 256, 65_535, 65_536] {
            let content = vec![7; length];
            let whole = encode(OCTET_STRING, &content);
            let mut reader = Reader::new(&whole);
            let element = reader.element().unwrap();
            assert_eq!((element.tag, element.whole), (OCTET_STRING, &whole[..]));
            assert_eq!(element.content, content);
            assert!(reader.is_empty() && reader.element().is_none());
            assert!(Reader::new(&whole[..whole.len() - 1]).element().is_none());
        }
    }

    #[test]
    fn other_encodings_are_rejected() {
        for bad in [
            &[][..],
            &[0x30],
            // Indefinite length, a long form of a short length, a leading zero, and four bytes.
            &[0x30, 0x80, 0, 0],
            &[0x04, 0x81, 0x01, 0],
            &[0x04, 0x82, 0x00, 0x80],
            &[0x04, 0x84, 0, 0, 0, 0],
            &[0x1f, 0x81, 0x01, 0],
        ] {
            assert!(Reader::new(bad).element().is_none(), "{bad:?}");
        }
        assert!(Reader::inside(&[0x30, 0, 0], SEQUENCE).is_none());
        let mut reader = Reader::new(&[0x30, 0]);
        assert!(reader.optional(SET).is_none() && reader.read(SEQUENCE).is_some());
    }
}

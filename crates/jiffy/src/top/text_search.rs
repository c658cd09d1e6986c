//! [`TextSearch`]: search in a text of `jiffy top`.

use std::ops::Range;

/// Searched text, and the selected line that contains it. Case is ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextSearch {
    /// Empty without a search.
    text: String,
    /// Characters of the text in lower case.
    characters: Vec<char>,
    /// Index of the selected line. `None` if no line contains the text.
    selected: Option<usize>,
    /// True while the user edits the text.
    pub is_edited: bool,
}

impl TextSearch {
    /// Returns the searched text. Empty without a search.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Replaces the text. An empty text ends the search. No line is selected.
    pub fn set_text(&mut self, text: &str) {
        text.clone_into(&mut self.text);
        self.characters = text.chars().map(lower).collect();
        self.selected = None;
    }

    /// Returns the index of the selected line.
    pub fn selected(&self) -> Option<usize> {
        self.selected
    }

    /// Selects the first of `lines` with the text, from the line `start` on in one direction, and
    /// then from the other end. Returns the index of the line and the column of the text.
    pub fn select(
        &mut self,
        lines: &[String],
        start: usize,
        is_forward: bool,
    ) -> Option<(usize, usize)> {
        let count = lines.len();
        let index = |step: usize| {
            let step = if is_forward { step } else { count - step };
            (start + step) % count
        };
        let found = (0..count).map(index).find_map(|index| {
            let line = &lines[index];
            let start = self.find(line)?.start;
            Some((index, line[..start].chars().count()))
        });
        self.selected = found.map(|(index, _)| index);
        found
    }

    /// Returns the number of lines with the text, and the position of the selected line among them,
    /// from 1.
    pub fn count(&self, lines: &[String]) -> (usize, Option<usize>) {
        let matching = lines.iter().enumerate();
        let matching = matching.filter(|(_, line)| self.find(line).is_some());
        let indexes: Vec<usize> = matching.map(|(index, _)| index).collect();
        let position = indexes
            .iter()
            .position(|&index| Some(index) == self.selected);
        (indexes.len(), position.map(|position| position + 1))
    }

    /// Returns the first place of the text in a line, in bytes.
    pub fn find(&self, line: &str) -> Option<Range<usize>> {
        let length = self.characters.len();
        if length == 0 {
            return None;
        }
        let line_characters: Vec<(usize, char)> = line
            .char_indices()
            .map(|(offset, c)| (offset, lower(c)))
            .collect();
        let first = line_characters.windows(length).position(|part| {
            let part = part.iter().map(|&(_, c)| c);
            part.eq(self.characters.iter().copied())
        })?;
        let (start, _) = line_characters[first];
        let end = line_characters.get(first + length);
        let end = end.map_or(line.len(), |&(end, _)| end);
        Some(start..end)
    }
}

/// Returns a character in lower case. A character that has several in lower case becomes the first
/// one, so that the number of characters remains the same.
fn lower(c: char) -> char {
    c.to_lowercase().next().unwrap_or(c)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(text: &str) -> TextSearch {
        let mut search = TextSearch::default();
        search.set_text(text);
        search
    }

    #[test]
    fn a_text_is_found_in_any_case() {
        for (text, line, expected) in [
            ("warn", "a WARNing", Some(2..6)),
            ("WARN", "a warning", Some(2..6)),
            ("\u{c4}", "\u{e9}\u{e4}x", Some(2..4)),
            ("x", "\u{130}x", Some(2..3)),
            ("ab", "a", None),
            ("ab", "", None),
            ("", "a", None),
        ] {
            assert_eq!(search(text).find(line), expected, "{text} in {line}");
        }
    }

    #[test]
    fn a_selection_continues_at_the_other_end() {
        let lines = ["x", "ax", "b", "x"].map(str::to_owned);
        let mut search = search("x");
        for (start, is_forward, expected) in [
            (0, true, (0, 0)),
            (1, true, (1, 1)),
            (2, true, (3, 0)),
            (2, false, (1, 1)),
            (3, false, (3, 0)),
        ] {
            assert_eq!(search.select(&lines, start, is_forward), Some(expected));
        }
        assert_eq!(search.count(&lines), (3, Some(3)));
        search.set_text("y");
        assert_eq!(search.select(&lines, 0, true), None);
        assert_eq!(search.count(&lines), (0, None));
        assert_eq!(search.select(&[], 0, false), None);
    }
}

//! Splits instructions into words, and converts quotes and escapes of Dockerfiles to the syntax of
//! [`crate::expand`].

use crate::expand::EscapedWord;

/// Maximum nesting depth of `${…}`.
const MAX_DEPTH: usize = 16;

/// Splits text at spaces outside of quotes. Quotes and escapes are not removed.
pub(super) fn split(text: &str, escape: char) -> Result<Vec<String>, &'static str> {
    let (words, open) = scan(text, escape);
    match open {
        Some('"') => Err("a double quote is not closed"),
        Some(_) => Err("a single quote is not closed"),
        None => Ok(words),
    }
}

/// Splits text as [`split`] does, but an unclosed quote extends to the end.
pub(super) fn split_leniently(text: &str, escape: char) -> Vec<String> {
    scan(text, escape).0
}

/// Returns the words, and the quote that is not closed at the end of the text.
fn scan(text: &str, escape: char) -> (Vec<String>, Option<char>) {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, c) if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            // In single quotes, the escape character is literal.
            (None | Some('"'), c) if c == escape => {
                word.push(c);
                // An escaped quotation mark neither opens nor closes a quote.
                word.extend(chars.next());
                continue;
            }
            _ => {}
        }
        word.push(c);
    }
    if !word.is_empty() {
        words.push(word);
    }
    (words, quote)
}

/// Converts a word to the syntax of [`crate::expand`]. Quotes and escapes are converted to the
/// escapes of that syntax.
pub(super) fn unquote(word: &str, escape: char) -> Result<String, &'static str> {
    let mut work = Unquote {
        chars: word.chars().peekable(),
        escape,
        out: EscapedWord::default(),
    };
    work.word(0)?;
    Ok(work.out.finish())
}

/// Converter of one word.
struct Unquote<'a> {
    chars: std::iter::Peekable<std::str::Chars<'a>>,
    escape: char,
    out: EscapedWord,
}

impl Unquote<'_> {
    /// Converts to the end, or to the closing brace.
    fn word(&mut self, depth: usize) -> Result<(), &'static str> {
        if depth > MAX_DEPTH {
            return Err("variables are nested too deeply");
        }
        while let Some(c) = self.chars.next() {
            match c {
                '}' if depth > 0 => {
                    self.out.part('}');
                    return Ok(());
                }
                '\'' => self.single(depth)?,
                '"' => self.double(depth)?,
                '$' => self.variable(depth)?,
                c if c == self.escape => {
                    // An escape at the end of a word has no effect.
                    if let Some(next) = self.chars.next() {
                        self.literal(next, depth)?;
                    }
                }
                c => self.literal(c, depth)?,
            }
        }
        match depth {
            0 => Ok(()),
            _ => Err("'${' is not closed by a '}'"),
        }
    }

    fn literal(&mut self, c: char, depth: usize) -> Result<(), &'static str> {
        // The target syntax has no escape for a brace, so the word would end here.
        if c == '}' && depth > 0 {
            return Err("a quoted '}' within '${…}' is not supported");
        }
        self.out.literal(c);
        Ok(())
    }

    /// Reads a text in single quotes, in which all characters are literal.
    fn single(&mut self, depth: usize) -> Result<(), &'static str> {
        loop {
            match self.chars.next() {
                None => return Err("a single quote is not closed"),
                Some('\'') => return Ok(()),
                Some(c) => self.literal(c, depth)?,
            }
        }
    }

    /// Reads a text in double quotes, in which variables are replaced.
    fn double(&mut self, depth: usize) -> Result<(), &'static str> {
        loop {
            match self.chars.next() {
                None => return Err("a double quote is not closed"),
                Some('"') => return Ok(()),
                Some('$') => self.variable(depth)?,
                Some(c) if c == self.escape => match self.chars.peek() {
                    // In double quotes, other characters after the escape character are literal, as
                    // in shells.
                    Some(&next) if next == '"' || next == '$' || next == self.escape => {
                        self.chars.next();
                        self.literal(next, depth)?;
                    }
                    _ => self.literal(c, depth)?,
                },
                Some(c) => self.literal(c, depth)?,
            }
        }
    }

    /// Converts the variable after a dollar.
    fn variable(&mut self, depth: usize) -> Result<(), &'static str> {
        match self.chars.peek() {
            Some('{') => {}
            // The dollar is literal, because neither a name nor a special parameter follows.
            Some(c) if !c.is_alphanumeric() && !"_@*#?-$!".contains(*c) => {
                self.out.literal('$');
                return Ok(());
            }
            None => {
                self.out.literal('$');
                return Ok(());
            }
            Some(_) => {
                self.out.variable();
                // Consume the first character of the name here: the caller would treat the second
                // dollar of `$$` as another variable. The caller copies the rest of the name.
                if let Some(c) = self.chars.next() {
                    self.out.part(c);
                }
                return Ok(());
            }
        }
        self.out.variable();
        while let Some(&c) = self.chars.peek() {
            // The opening brace, the name, and the colon of the operator.
            if !(c.is_alphanumeric() || matches!(c, '{' | '_' | ':')) {
                break;
            }
            self.out.part(c);
            self.chars.next();
        }
        match self.chars.peek() {
            Some(&c @ ('-' | '+' | '?')) => {
                self.out.part(c);
                self.chars.next();
            }
            Some('}') => {}
            Some(_) => {
                return Err("only ${NAME}, ${NAME:-word} and ${NAME:+word} are supported");
            }
            None => return Err("'${' is not closed by a '}'"),
        }
        // Converts the rest, including the closing brace.
        self.word(depth + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expand::expand;

    #[test]
    fn words_end_at_spaces_outside_of_quotes() {
        let words = |text| split(text, '\\');
        assert_eq!(
            words(r#"a "b c"d e\ f 'g "h'  "#).unwrap(),
            ["a", "\"b c\"d", r"e\ f", "'g \"h'"]
        );
        assert!(words("a 'b").is_err());
        assert!(words(r#"a "b\""#).is_err());
        assert_eq!(split_leniently("a 'b c", '\\'), ["a", "'b c"]);
    }

    #[test]
    fn quotes_are_removed_and_protect_their_content() {
        let known = |name: &str| (name == "A").then(|| "one".to_owned());
        for (word, expected) in [
            (r#""a b"c"#, "a bc"),
            (r"'$A'", "$A"),
            (r#""$A""#, "one"),
            (r"\$A", "$A"),
            (r"\\$A", r"\one"),
            (r#""\\$A\x""#, r"\one\x"),
            (r"'\\'$A", r"\\one"),
            (r#"a\"b"#, "a\"b"),
            ("${NONE:-'a $A' \"b\"}$A", "a $A bone"),
            (r#""${NONE:-x y}""#, "x y"),
            ("$ x$", "$ x$"),
            (r"a\", "a"),
            ("$$A", "A"),
        ] {
            let plain = unquote(word, '\\').unwrap();
            assert_eq!(
                expand(&plain, known).unwrap(),
                expected,
                "{word} -> {plain}"
            );
        }
        for bad in ["'", "\"", "${A", "${A:-'}'}", "${A%x}", "${A:-", "${"] {
            assert!(unquote(bad, '\\').is_err(), "{bad}");
        }
        // With another escape character, a backslash is literal. The result has the escape of
        // `expand`.
        assert_eq!(unquote(r"C:\x`$", '`').unwrap(), r"C:\x\$");
    }
}

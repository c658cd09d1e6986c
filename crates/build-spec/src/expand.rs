//! Expansion of variables in words: `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`, and the
//! same forms without the colon.
//!
//! A backslash is special only before a dollar: `\$` is a dollar, and `\\$NAME` is a backslash and
//! a variable. In other places it is literal.

/// Maximum length of an expanded word in bytes. It equals the limit for one environment variable of
/// a program.
pub const MAX_EXPANDED_BYTES: usize = 128 << 10;
/// Maximum nesting depth of words.
const MAX_DEPTH: usize = 16;

/// Error of an expansion.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    /// `${` has no closing brace.
    #[error("'${{' is not closed by a '}}': write '\\$' for a dollar")]
    Open,
    /// The name between the braces is missing.
    #[error("'${{' is not followed by a name: write '\\$' for a dollar")]
    Name,
    /// The form of substitution is not supported.
    #[error("'${{{0}…' is not supported: use ${{NAME}}, ${{NAME:-word}} or ${{NAME:+word}}")]
    Form(String),
    /// The variable in `${NAME:?word}` is not set.
    #[error("{0}: {1}")]
    Required(String, String),
    /// Words are nested too deeply.
    #[error("variables are nested more than {MAX_DEPTH} levels deep")]
    Deep,
    /// The result is too long.
    #[error("the result is longer than {MAX_EXPANDED_BYTES} bytes")]
    Long,
}

/// Expands variables with values from `value`. Variables that are not set are empty.
pub fn expand(
    word: &str,
    mut value: impl FnMut(&str) -> Option<String>,
) -> Result<String, ExpandError> {
    let mut work = Expander {
        rest: word,
        value: &mut value,
    };
    work.word(false, 0)
}

/// Returns the names of the variables in a word, with repetitions.
///
/// # Errors
/// The word is invalid, or contains `${NAME:?word}`, which requires a value.
pub fn names(word: &str) -> Result<Vec<String>, ExpandError> {
    // All names occur, because the word of a substitution is expanded even if it is not used.
    let mut found = Vec::new();
    expand(word, |name| {
        found.push(name.to_owned());
        None
    })?;
    Ok(found)
}

/// Escapes `text` in such a way that it expands to itself.
pub fn escape(text: &str) -> String {
    let mut out = EscapedWord::default();
    text.chars().for_each(|c| out.literal(c));
    out.finish()
}

/// Builder of an escaped word from literal characters and variables.
#[derive(Debug, Default)]
pub(crate) struct EscapedWord {
    text: String,
    /// Number of backslashes at the end of `text`. They are special if a dollar follows.
    backslashes: usize,
}

impl EscapedWord {
    /// Appends a literal character.
    pub(crate) fn literal(&mut self, c: char) {
        // Each preceding backslash is doubled and the dollar is escaped, since backslashes before a
        // dollar are special.
        if c == '$' {
            let more = self.backslashes + 1;
            self.text.extend(std::iter::repeat_n('\\', more));
        }
        self.text.push(c);
        self.backslashes = match c {
            '\\' => self.backslashes + 1,
            _ => 0,
        };
    }

    /// Appends the dollar that begins a variable.
    pub(crate) fn variable(&mut self) {
        // The preceding backslashes are literal, so they are doubled.
        let more = self.backslashes;
        self.text.extend(std::iter::repeat_n('\\', more));
        self.text.push('$');
        self.backslashes = 0;
    }

    /// Appends a character of a variable: of its name or operator, or a brace.
    pub(crate) fn part(&mut self, c: char) {
        self.text.push(c);
        self.backslashes = 0;
    }

    pub(crate) fn finish(self) -> String {
        self.text
    }
}

/// State of an expansion: the text that was not read yet, and the values of variables.
struct Expander<'a, 'v> {
    rest: &'a str,
    value: &'v mut dyn FnMut(&str) -> Option<String>,
}

impl<'a> Expander<'a, '_> {
    /// Expands to the end, or to the closing brace. `braces` states whether a brace ends the word.
    fn word(&mut self, braces: bool, depth: usize) -> Result<String, ExpandError> {
        if depth > MAX_DEPTH {
            return Err(ExpandError::Deep);
        }
        let mut out = String::new();
        loop {
            // A closing brace is an ordinary character outside of braces.
            let special = |c| matches!(c, '\\' | '$') || braces && c == '}';
            let plain = self.rest.find(special).unwrap_or(self.rest.len());
            out.push_str(&self.rest[..plain]);
            self.rest = &self.rest[plain..];
            // Check the length in each round, because variables may multiply it.
            if out.len() > MAX_EXPANDED_BYTES {
                return Err(ExpandError::Long);
            }
            match self.rest.chars().next() {
                None if braces => return Err(ExpandError::Open),
                None => return Ok(out),
                Some('}') => {
                    self.rest = &self.rest[1..];
                    return Ok(out);
                }
                Some('\\') => self.backslashes(&mut out),
                Some(_) => {
                    self.rest = &self.rest[1..];
                    self.variable(&mut out, depth)?;
                }
            }
        }
    }

    /// Consumes a sequence of backslashes, and the dollar if it is escaped.
    fn backslashes(&mut self, out: &mut String) {
        let after = self.rest.trim_start_matches('\\');
        let count = self.rest.len() - after.len();
        self.rest = after;
        // Only before a dollar do two backslashes stand for one.
        let dollar = after.starts_with('$');
        let literal = if dollar { count / 2 } else { count };
        out.extend(std::iter::repeat_n('\\', literal));
        if dollar && count % 2 == 1 {
            out.push('$');
            self.rest = &after[1..];
        }
    }

    /// Expands the variable after a dollar.
    fn variable(&mut self, out: &mut String, depth: usize) -> Result<(), ExpandError> {
        let Some(inner) = self.rest.strip_prefix('{') else {
            let name = self.name();
            if name.is_empty() {
                // A dollar without a name is literal.
                out.push('$')
            } else {
                out.push_str(&(self.value)(name).unwrap_or_default())
            }
            return Ok(());
        };
        self.rest = inner;
        let name = self.name().to_owned();
        if name.is_empty() {
            return Err(if self.rest.is_empty() {
                ExpandError::Open
            } else {
                ExpandError::Name
            });
        }
        // With a colon, an empty variable counts as not set.
        let colon = self.rest.starts_with(':');
        if colon {
            self.rest = &self.rest[1..];
        }
        let form = self.rest.chars().next().ok_or(ExpandError::Open)?;
        if !matches!(form, '-' | '+' | '?') && (colon || form != '}') {
            let colon = if colon { ":" } else { "" };
            return Err(ExpandError::Form(format!("{name}{colon}{form}")));
        }
        self.rest = &self.rest[1..];
        // The word must be consumed in any case, even if its value is not used.
        let word = match form {
            '}' => String::new(),
            _ => self.word(true, depth + 1)?,
        };
        let value = (self.value)(&name);
        let set = value.filter(|v| !colon || !v.is_empty());
        match (form, set) {
            ('+', Some(_)) | ('-', None) => out.push_str(&word),
            ('+', None) => {}
            ('?', None) => {
                let word = if word.is_empty() {
                    "it is not set".to_owned()
                } else {
                    word
                };
                return Err(ExpandError::Required(name, word));
            }
            (_, set) => out.push_str(&set.unwrap_or_default()),
        }
        Ok(())
    }

    /// Consumes a name. As in shells, it consists of letters, digits and `_`, or only of digits, or
    /// of one special character.
    fn name(&mut self) -> &'a str {
        let rest = self.rest;
        let end = match rest.chars().next() {
            Some(c) if c.is_ascii_digit() => rest.find(|c: char| !c.is_ascii_digit()),
            Some('@' | '*' | '#' | '?' | '-' | '$' | '!') => Some(1),
            _ => rest.find(|c: char| !c.is_alphanumeric() && c != '_'),
        };
        let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
        self.rest = rest;
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expands a word with three known variables. Returns the message of an error.
    fn of(word: &str) -> String {
        let known = |name: &str| match name {
            "A" => Some("one".to_owned()),
            "EMPTY" => Some(String::new()),
            "DOLLAR" => Some("$A".to_owned()),
            _ => None,
        };
        expand(word, known).unwrap_or_else(|e| format!("error: {e}"))
    }

    #[test]
    fn variables_have_their_values() {
        for (word, expected) in [
            ("$A", "one"),
            ("x${A}y$A/z", "xoneyone/z"),
            ("$NONE-", "-"),
            ("$A_", ""),
            ("${A:-x} ${EMPTY:-x} ${EMPTY-x} ${NONE-x}", "one x  x"),
            ("${A:+x} ${EMPTY:+x} ${EMPTY+x} ${NONE:+x}", "x  x "),
            ("${NONE:-${A:+in $A}}!", "in one!"),
            ("${NONE:-a b:c}", "a b:c"),
            ("$DOLLAR", "$A"),
            ("$ $/ a$", "$ $/ a$"),
            ("$1x $$", "x "),
            ("ü$A", "üone"),
        ] {
            assert_eq!(of(word), expected, "{word}");
        }
    }

    #[test]
    fn backslashes_count_before_dollars_only() {
        for (word, expected) in [
            (r"\$A", "$A"),
            (r"\\$A", r"\one"),
            (r"\\\$A", r"\$A"),
            (r"C:\dir\\x\", r"C:\dir\\x\"),
            (r"${NONE:-\$}", "$"),
        ] {
            assert_eq!(of(word), expected, "{word}");
        }
    }

    #[test]
    fn invalid_words_are_refused_with_their_cause() {
        for (word, expected) in [
            ("${A", "not closed"),
            ("${", "not closed"),
            ("${}", "not followed by a name"),
            ("${:-x}", "not followed by a name"),
            ("${A:-x", "not closed"),
            ("${A%x}", "'${A%…' is not supported"),
            ("${A:2}", "'${A:2…' is not supported"),
            ("${NONE:?say what}", "NONE: say what"),
            (&"${X:-".repeat(40), "deep"),
        ] {
            assert!(
                of(word).starts_with("error: ") && of(word).contains(expected),
                "{}",
                of(word)
            );
        }
        let large = "x".repeat(1000);
        let long = expand(&"$A".repeat(200), |_| Some(large.clone()));
        assert_eq!(long, Err(ExpandError::Long));
    }

    #[test]
    fn escaped_text_expands_to_itself() {
        for text in ["", "$A", r"\$A", r"\\$A\", "${", "a}b", r"\\\", "$$"] {
            assert_eq!(of(&escape(text)), text);
        }
    }
}

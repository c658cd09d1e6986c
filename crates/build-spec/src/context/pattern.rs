//! Path patterns with the semantics of Docker, for `.dockerignore` and the sources of `COPY`.

/// A compiled pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    parts: Vec<PatternPart>,
    /// Literal suffix, for a pattern of the form `**suffix`.
    suffix: Option<String>,
}

/// Part of a pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PatternPart {
    Plain(char),
    /// `?`: one character other than a slash.
    AnyChar,
    /// `*`: any characters other than slashes.
    Star,
    /// `**/`, or `**` before another character: no character, or any characters that end with a
    /// slash.
    Directories,
    /// `**` at the end: any characters.
    Rest,
    /// `[a-z]`, `[^a-z]`: ranges, and whether the class is negated.
    Class(Vec<(char, char)>, bool),
}

impl Pattern {
    /// Compiles a line of `.dockerignore`, in which `**` matches directories.
    pub(crate) fn ignoring(text: &str) -> Result<Self, &'static str> {
        let mut pattern = Self::read(text, true)?;
        // As in Docker, `**suffix` matches each path with this end, also within a name.
        let suffix = text.strip_prefix("**").filter(|s| !s.is_empty());
        pattern.suffix = suffix
            .filter(|s| !s.contains(['*', '?', '[', ']', '\\']))
            .map(str::to_owned);
        Ok(pattern)
    }

    /// Compiles a source of `COPY`, in which `**` equals `*`.
    pub(crate) fn source(text: &str) -> Result<Self, &'static str> {
        Self::read(text, false)
    }

    /// Parses a pattern. With `through`, `**` matches across slashes.
    fn read(text: &str, through: bool) -> Result<Self, &'static str> {
        let mut parts = Vec::new();
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            parts.push(match c {
                '*' if through && chars.peek() == Some(&'*') => {
                    chars.next();
                    chars.next_if_eq(&'/');
                    match chars.peek() {
                        None => PatternPart::Rest,
                        Some(_) => PatternPart::Directories,
                    }
                }
                '*' => PatternPart::Star,
                '?' => PatternPart::AnyChar,
                '\\' => PatternPart::Plain(chars.next().unwrap_or('\\')),
                '[' => class(&mut chars)?,
                c => PatternPart::Plain(c),
            });
        }
        // Consecutive stars equal one star, which is faster to match.
        parts.dedup_by(|a, b| *a == PatternPart::Star && *b == PatternPart::Star);
        Ok(Self {
            parts,
            suffix: None,
        })
    }

    /// Returns whether the pattern matches a path. The time is proportional to the product of both
    /// lengths.
    pub(crate) fn matches(&self, path: &str) -> bool {
        if let Some(suffix) = &self.suffix {
            // `**/name` also matches `name` at the root of the context.
            return path.ends_with(suffix.as_str()) || suffix.strip_prefix('/') == Some(path);
        }
        let path: Vec<char> = path.chars().collect();
        // `reached[n]` is set if the parts so far match the first `n` characters. Backtracking
        // would take exponential time for some patterns.
        let mut reached = vec![false; path.len() + 1];
        reached[0] = true;
        for part in &self.parts {
            reached = part.step(&path, &reached);
        }
        reached[path.len()]
    }
}

impl PatternPart {
    /// Returns the prefixes of `path` that the pattern matches up to and including this part.
    /// `before` has the prefixes that the pattern matches without this part. Element `n` of both
    /// states whether the prefix of `n` characters matches.
    fn step(&self, path: &[char], before: &[bool]) -> Vec<bool> {
        let mut after = vec![false; before.len()];
        // Set once a prefix has matched before this part.
        let mut started = false;
        // `last` is the character that a match of length `at` ends with.
        for at in 0..before.len() {
            let last = at.checked_sub(1).map(|i| path[i]);
            match self {
                Self::Star => {
                    after[at] = before[at] || at > 0 && after[at - 1] && last != Some('/');
                }
                Self::Rest => {
                    started |= before[at];
                    after[at] = started;
                }
                Self::Directories => {
                    after[at] = before[at] || started && last == Some('/');
                    started |= before[at];
                }
                part => {
                    after[at] =
                        at > 0 && before[at - 1] && last.is_some_and(|c| part.matches_char(c));
                }
            }
        }
        after
    }

    /// Returns whether the part matches one character. Parts that match several characters are
    /// handled by `step`.
    fn matches_char(&self, c: char) -> bool {
        match self {
            Self::Plain(plain) => *plain == c,
            Self::AnyChar => c != '/',
            Self::Class(ranges, negated) => {
                ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
            }
            _ => false,
        }
    }
}

/// Parses a character class after its opening bracket.
fn class(
    chars: &mut std::iter::Peekable<std::str::Chars<'_>>,
) -> Result<PatternPart, &'static str> {
    let open = "has a '[' without a closing ']'";
    let negated = chars.next_if_eq(&'^').is_some();
    let mut ranges = Vec::new();
    loop {
        let low = match chars.next().ok_or(open)? {
            // A bracket at the beginning of a class is an ordinary character.
            ']' if !ranges.is_empty() => return Ok(PatternPart::Class(ranges, negated)),
            '\\' => chars.next().ok_or(open)?,
            c => c,
        };
        let mut high = low;
        if chars.peek() == Some(&'-') {
            chars.next();
            high = match chars.next().ok_or(open)? {
                ']' => {
                    // A minus before the closing bracket is literal.
                    ranges.extend([(low, low), ('-', '-')]);
                    return Ok(PatternPart::Class(ranges, negated));
                }
                '\\' => chars.next().ok_or(open)?,
                c => c,
            };
        }
        if high < low {
            return Err("has a range whose end is before its start");
        }
        ranges.push((low, high));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_docker_matches() {
        for (pattern, yes, no) in [
            ("a/b", &["a/b"][..], &["a", "a/b/c", "x/a/b"][..]),
            ("*.md", &["a.md", ".md"], &["a/b.md", "amd", "a.mdx"]),
            ("*/temp*", &["x/temp", "x/temp1"], &["temp", "x/y/temp"]),
            ("temp?", &["tempa"], &["temp", "tempab", "temp/"]),
            (
                "**/x.go",
                &["x.go", "a/x.go", "a/b/x.go"],
                &["ax.go", "a/x.go/b"],
            ),
            ("**", &["a", "a/b"], &[]),
            ("**.log", &["a.log", "a/b.log", ".log"], &["a.logs"]),
            ("a/**", &["a/b", "a/b/c", "a/"], &["a", "ab"]),
            ("a/**/b", &["a/b", "a/x/b", "a/x/y/b"], &["a/xb", "a"]),
            ("**/a*/c", &["a/c", "x/ab/c"], &["a/b/c"]),
            ("[a-c]x[^0-9]", &["axb", "cx-"], &["dxb", "ax1"]),
            ("a\\*b", &["a*b"], &["axb"]),
            ("a.b+(c)", &["a.b+(c)"], &["axb+(c)"]),
            ("ä?", &["äö"], &["ä"]),
        ] {
            let compiled = Pattern::ignoring(pattern).unwrap();
            for path in yes {
                assert!(compiled.matches(path), "{pattern} {path}");
            }
            for path in no {
                assert!(!compiled.matches(path), "{pattern} {path}");
            }
        }
        assert!(Pattern::ignoring("a[").is_err() && Pattern::ignoring("[b-a]").is_err());
        assert!(!Pattern::source("**/a").unwrap().matches("x/y/a"));
    }

    #[test]
    fn matching_time_is_bounded() {
        let pattern = Pattern::ignoring(&"*a".repeat(200)).unwrap();
        assert!(!pattern.matches(&("a".repeat(4000) + "b")));
    }
}

//! Flags of an instruction: `--name=value` before its arguments.

use super::error::DockerfileError;
use super::instructions::Instruction;

/// A flag with its unparsed value.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Flag {
    pub name: String,
    pub value: Option<String>,
}

impl Flag {
    /// Returns the value of the flag, or an error if it is missing.
    pub(super) fn value(&self, line: &Instruction) -> Result<&str, DockerfileError> {
        let value = self.value.as_deref().filter(|v| !v.is_empty());
        value.ok_or_else(|| line.error(format!("--{} needs a value: --{0}=…", self.name)))
    }

    /// Returns the error for an unknown or unsupported flag. `instead` ends the message, for
    /// example with an alternative, and includes its punctuation.
    pub(super) fn unsupported(&self, line: &Instruction, instead: &str) -> DockerfileError {
        line.error(format!("--{} is not supported{instead}", self.name))
    }
}

/// Splits an instruction's flags from its arguments.
pub(super) fn split(rest: &str) -> (Vec<Flag>, &str) {
    let (mut flags, mut rest) = (Vec::new(), rest.trim_start());
    while let Some(flag) = rest.strip_prefix("--") {
        let end = end_of(flag);
        let (word, after) = flag.split_at(end);
        rest = after.trim_start();
        // `--` ends the flags, so that the arguments may begin with dashes.
        if word.is_empty() {
            break;
        }
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word, None),
        };
        flags.push(Flag {
            name: name.to_owned(),
            value,
        });
    }
    (flags, rest)
}

/// Returns the end of a flag: the position of the first space outside of quotes.
fn end_of(text: &str) -> usize {
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (None, c) if c.is_whitespace() => return at,
            (None, '"' | '\'') => quote = Some(c),
            // The other kind of quotation mark is an ordinary character.
            (Some(open), c) if open == c => quote = None,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_first() {
        let (flags, rest) = split("--from=a --chown='x y'  --link src --x /y");
        let seen: Vec<_> = flags
            .iter()
            .map(|f| (f.name.as_str(), f.value.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [
                ("from", Some("a")),
                ("chown", Some("'x y'")),
                ("link", None)
            ]
        );
        assert_eq!(rest, "src --x /y");
        assert_eq!(split("-- a"), (Vec::new(), "a"));
        assert_eq!(
            split("--x"),
            (
                vec![Flag {
                    name: "x".into(),
                    value: None
                }],
                ""
            )
        );
    }
}

//! Splits a Dockerfile into instructions: joins continued lines, removes comments, and extracts
//! here-documents.

use super::error::DockerfileError;
use super::words;

/// Maximum size of a Dockerfile in bytes.
const MAX_FILE_BYTES: usize = 1 << 20;
/// Instructions that may have here-documents.
const HERE_DOCUMENT_INSTRUCTIONS: [&str; 3] = ["RUN", "COPY", "ADD"];

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Instruction {
    /// Line number, starting at 1.
    pub number: u32,
    /// Keyword in upper case: `RUN`, `COPY`, ….
    pub keyword: String,
    /// Arguments.
    pub arguments: String,
    /// Here-documents in order.
    pub documents: Vec<HereDocument>,
}

/// A here-document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HereDocument {
    /// Delimiter. In `COPY` and `ADD`, it is also the name of the file.
    pub name: String,
    /// Lines of the document.
    pub content: String,
    /// Set if variables are expanded, because the delimiter is not quoted.
    pub expand: bool,
    /// Set if leading tabs are removed.
    pub strip: bool,
}

impl Instruction {
    /// Returns an error about this instruction.
    pub(super) fn error(&self, problem: impl Into<String>) -> DockerfileError {
        DockerfileError {
            line: self.number,
            instruction: self.keyword.clone(),
            problem: problem.into(),
        }
    }

    /// Returns the source text on one line.
    pub(super) fn text(&self) -> String {
        format!("{} {}", self.keyword, self.arguments)
    }
}

/// Instructions of a file, and its escape character.
pub(super) struct Instructions {
    pub lines: Vec<Instruction>,
    pub escape: char,
}

/// Parses a file into instructions.
pub(super) fn read(text: &str) -> Result<Instructions, DockerfileError> {
    let bad = |line, problem: String| DockerfileError {
        line,
        instruction: String::new(),
        problem,
    };
    if text.len() > MAX_FILE_BYTES {
        return Err(bad(
            1,
            format!("the file is larger than {} KiB", MAX_FILE_BYTES >> 10),
        ));
    }
    // Editors on Windows begin files with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let escape = escape_of(text).map_err(|(line, problem)| bad(line, problem))?;
    let mut source = (1..).zip(text.lines());
    let mut lines = Vec::new();
    while let Some((number, first)) = source.next() {
        let first = first.trim_start();
        if first.is_empty() || first.starts_with('#') {
            continue;
        }
        let (start, mut more) = continued(first, escape);
        let mut whole = start.to_owned();
        while more {
            // As Docker does, ignore a continuation at the end of the file.
            let Some((_, next)) = source.next() else {
                break;
            };
            let trimmed = next.trim_start();
            // Comments and empty lines are allowed inside a continued instruction.
            if trimmed.is_empty() || trimmed.starts_with('#') {
                continue;
            }
            let (next, is_continued) = continued(next, escape);
            whole.push_str(next);
            more = is_continued;
        }
        let whole = whole.trim();
        if whole.is_empty() {
            continue;
        }
        let (instruction, rest) = whole.split_once(char::is_whitespace).unwrap_or((whole, ""));
        let mut line = Instruction {
            number,
            keyword: instruction.to_ascii_uppercase(),
            // Missing arguments are reported by the parser of the instruction.
            arguments: rest.trim().to_owned(),
            documents: Vec::new(),
        };
        if HERE_DOCUMENT_INSTRUCTIONS.contains(&line.keyword.as_str())
            && line.arguments.contains("<<")
        {
            // The documents follow the instruction in the order in which the line announces them.
            for mut document in announced(&line.arguments, escape) {
                fill(&mut document, &mut source).map_err(|problem| line.error(problem))?;
                line.documents.push(document);
            }
        }
        lines.push(line);
    }
    if lines.is_empty() {
        return Err(bad(
            1,
            "the file has no instructions: the first must be FROM".to_owned(),
        ));
    }
    Ok(Instructions { lines, escape })
}

/// Returns the escape character of the `# escape=` directive, or `\`. Directives are only
/// recognized before the first other line.
fn escape_of(text: &str) -> Result<char, (u32, String)> {
    for (number, line) in (1..).zip(text.lines()) {
        let directive = line
            .trim()
            .strip_prefix('#')
            .and_then(|l| l.split_once('='));
        let Some((name, value)) = directive else {
            break;
        };
        match (name.trim().to_ascii_lowercase().as_str(), value.trim()) {
            ("escape", "\\") => return Ok('\\'),
            ("escape", "`") => return Ok('`'),
            ("escape", other) => {
                let problem = format!("'# escape={other}' is not supported: use \\ or `");
                return Err((number, problem));
            }
            // Directives of Docker's builder that have no effect here.
            ("syntax" | "check", _) => {}
            _ => break,
        }
    }
    Ok('\\')
}

/// Returns the line without its continuation character, and whether it had one.
fn continued(line: &str, escape: char) -> (&str, bool) {
    let trimmed = line.trim_end_matches([' ', '\t', '\r']);
    match trimmed.strip_suffix(escape) {
        Some(start) => (start, true),
        None => (line, false),
    }
}

/// Returns the here-documents that a line announces with words like `<<NAME`, `<<-NAME`,
/// `<<"NAME"`.
fn announced(rest: &str, escape: char) -> Vec<HereDocument> {
    words::split_leniently(rest, escape)
        .into_iter()
        .filter_map(|word| document(&word))
        .collect()
}

/// Returns the here-document that `word` announces. `None` if `word` announces no here-document, or
/// contains spaces outside of quotes.
pub(super) fn document(word: &str) -> Option<HereDocument> {
    let mut quote = None;
    for c in word.chars() {
        match (quote, c) {
            (None, c) if c.is_whitespace() => return None,
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            _ => {}
        }
    }
    // The number of a file descriptor may precede the operator: `3<<NAME`.
    let word = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let name = word.strip_prefix("<<")?;
    let (name, strip) = match name.strip_prefix('-') {
        Some(name) => (name, true),
        None => (name, false),
    };
    let plain: String = name
        .chars()
        .filter(|c| !matches!(c, '"' | '\'' | '\\'))
        .collect();
    // `<<<` is a here-string of the shell, and a path is not a delimiter.
    if plain.is_empty() || plain.contains(['<', '/']) {
        return None;
    }
    // A quoted delimiter differs from its plain form, and disables the expansion.
    Some(HereDocument {
        expand: plain == name,
        name: plain,
        content: String::new(),
        strip,
    })
}

/// Reads the lines of a here-document up to its delimiter.
fn fill<'a>(
    document: &mut HereDocument,
    source: &mut impl Iterator<Item = (u32, &'a str)>,
) -> Result<(), String> {
    for (_, line) in source {
        let stripped = if document.strip {
            line.trim_start_matches('\t')
        } else {
            line
        };
        // As in shells, the delimiter must be the whole line.
        if stripped == document.name {
            return Ok(());
        }
        document.content.push_str(stripped);
        document.content.push('\n');
    }
    Err(format!(
        "the here-document is not terminated: the line '{}' is missing",
        document.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the instructions of a file, each on one line.
    fn rests(text: &str) -> Vec<String> {
        read(text)
            .unwrap()
            .lines
            .into_iter()
            .map(|l| l.text())
            .collect()
    }

    #[test]
    fn continuations_are_joined_and_comments_removed() {
        let text = "\u{feff}# a comment\n\nfrom x\n  RUN a \\\n  # between\n\n  && b \\  \n && c # kept\r\nRUN d\\";
        assert_eq!(
            rests(text),
            ["FROM x", "RUN a   && b  && c # kept", "RUN d"]
        );
        assert_eq!(read(text).unwrap().lines[1].number, 4);
        assert_eq!(rests("# escape=`\nRUN a `\n b\\"), ["RUN a  b\\"]);
    }

    #[test]
    fn here_documents_belong_to_their_instruction() {
        let text = "RUN cat <<A >/a && cat <<-'B' 3<<C\n$x \\\n# no comment\nA\n\tin \
            B\n\tB\nC\nRUN echo $((1<<2)) <<<x\n";
        let lines = read(text).unwrap().lines;
        assert_eq!(lines.len(), 2);
        let seen: Vec<_> = (lines[0].documents.iter())
            .map(|d| (d.name.as_str(), d.content.as_str(), d.expand))
            .collect();
        assert_eq!(
            seen,
            [
                ("A", "$x \\\n# no comment\n", true),
                ("B", "in B\n", false),
                ("C", "", true)
            ]
        );
        assert!(lines[1].documents.is_empty());
        let open = read("FROM x\nRUN <<EOF\necho\n").err().unwrap();
        assert!(
            open.to_string()
                .contains("line 2: RUN: the here-document is not terminated"),
            "{open}"
        );
    }

    #[test]
    fn files_without_instructions_and_odd_escapes_are_refused() {
        assert!(read("# only\n\n").is_err());
        assert!(read("# escape=x\nFROM a").is_err());
        assert!(read(&"x".repeat(MAX_FILE_BYTES + 1)).is_err());
    }
}

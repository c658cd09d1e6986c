//! Rules of `.dockerignore` files, which exclude files from a build context.

use super::ContextError;
use super::pattern::Pattern;
use std::path::Path;

/// Maximum size of an ignore file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Rules of an ignore file.
#[derive(Debug, Default, Clone)]
pub struct DockerIgnore {
    rules: Vec<IgnoreRule>,
}

/// Line of a `.dockerignore`.
#[derive(Debug, Clone)]
struct IgnoreRule {
    pattern: Pattern,
    /// Set for a rule that starts with `!`: matching files are included.
    is_exception: bool,
}

impl DockerIgnore {
    /// Reads the ignore file next to the Dockerfile (`NAME.dockerignore`). If it does not exist,
    /// reads `.dockerignore` of the context. Returns no rules if neither exists.
    pub fn find(context: &Path, dockerfile: Option<&Path>) -> Result<Self, ContextError> {
        let specific = dockerfile.map(|path| {
            let mut name = path.as_os_str().to_owned();
            name.push(".dockerignore");
            name.into()
        });
        for path in specific.into_iter().chain([context.join(".dockerignore")]) {
            let failed = |source| ContextError::read(&path, source);
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.len() > MAX_FILE_BYTES => {
                    return Err(failed(std::io::Error::other(
                        "the file is larger than 1 MiB",
                    )));
                }
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(e) => return Err(failed(e)),
            }
            // The file of the Dockerfile replaces the file of the context, instead of extending it.
            let text = std::fs::read(&path).map_err(failed)?;
            return Self::parse(&String::from_utf8_lossy(&text)).map_err(|(line, problem)| {
                ContextError::Ignore {
                    path: path.clone(),
                    line,
                    problem,
                }
            });
        }
        Ok(Self::default())
    }

    /// Parses an ignore file. An error contains the number of its line.
    pub fn parse(text: &str) -> Result<Self, (u32, String)> {
        // Editors on Windows begin files with a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut rules = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let trimmed = line.trim();
            // As in Docker, a comment begins in the first column.
            if line.starts_with('#') || trimmed.is_empty() {
                continue;
            }
            let (is_exception, pattern) = match trimmed.strip_prefix('!') {
                Some(rest) => (true, rest.trim()),
                None => (false, trimmed),
            };
            if pattern.is_empty() {
                return Err((number, "'!' must be followed by a pattern".to_owned()));
            }
            // Patterns may begin with `./` or a slash, but the compared paths never do.
            let cleaned = clean(pattern);
            let pattern = Pattern::ignoring(&cleaned)
                .map_err(|problem| (number, format!("'{pattern}' {problem}")))?;
            rules.push(IgnoreRule {
                pattern,
                is_exception,
            });
        }
        Ok(Self { rules })
    }

    /// Returns whether a path is excluded. The last rule that matches the path or one of its
    /// parents decides.
    pub fn ignores(&self, path: &str) -> bool {
        // A rule for a directory applies to all files below, so every parent is compared.
        let hit = self.rules.iter().rev().find(|rule| {
            let ends = path.match_indices('/').map(|(at, _)| at);
            ends.chain([path.len()])
                .any(|end| rule.pattern.matches(&path[..end]))
        });
        hit.is_some_and(|rule| !rule.is_exception)
    }

    /// Returns whether files inside an excluded directory may be included.
    pub fn has_exceptions(&self) -> bool {
        self.rules.iter().any(|rule| rule.is_exception)
    }
}

/// Normalizes a path: removes `.`, repeated and outer slashes, and resolves `..` where possible.
fn clean(path: &str) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in path.split('/').filter(|n| !n.is_empty() && *n != ".") {
        match (name, names.last()) {
            ("..", Some(last)) if *last != ".." => {
                names.pop();
            }
            // The parent of the root is the root.
            ("..", None) if path.starts_with('/') => {}
            _ => names.push(name),
        }
    }
    if names.is_empty() {
        ".".to_owned()
    } else {
        names.join("/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the paths that the rules do not exclude.
    fn included<'a>(rules: &str, paths: &[&'a str]) -> Vec<&'a str> {
        let ignore = DockerIgnore::parse(rules).unwrap();
        paths
            .iter()
            .copied()
            .filter(|p| !ignore.ignores(p))
            .collect()
    }

    #[test]
    fn the_last_rule_that_matches_counts() {
        let paths = ["README.md", "README-secret.md", "a.md", "x/b.md", "src/a"];
        assert_eq!(
            included("*.md\n!README*.md\nREADME-secret.md", &paths),
            ["README.md", "x/b.md", "src/a"]
        );
        assert_eq!(
            included("*.md\nREADME-secret.md\n!README*.md", &paths),
            ["README.md", "README-secret.md", "x/b.md", "src/a"]
        );
        assert_eq!(included("**\n!src", &paths), ["src/a"]);
        assert_eq!(included("*\n!src/**", &paths), ["src/a"]);
    }

    #[test]
    fn an_excluded_directory_excludes_its_contents() {
        let paths = ["node_modules/a/b", "x/node_modules/c", "x/y"];
        assert_eq!(
            included("node_modules", &paths),
            ["x/node_modules/c", "x/y"]
        );
        assert_eq!(included("**/node_modules", &paths), ["x/y"]);
        assert_eq!(included("/x/\n!x/y", &paths), ["node_modules/a/b", "x/y"]);
        assert_eq!(
            included("./x/../node_modules//", &paths),
            ["x/node_modules/c", "x/y"]
        );
    }

    #[test]
    fn comments_and_blank_lines_are_skipped_and_invalid_lines_refused() {
        assert_eq!(
            included("\u{feff}# a\n  b  \n\n ! b/c\n", &["a", "b", "b/c", "# a"]),
            ["a", "b/c", "# a"]
        );
        assert_eq!(DockerIgnore::parse("a\n!\n").unwrap_err().0, 2);
        assert_eq!(DockerIgnore::parse("a[").unwrap_err().0, 1);
    }
}

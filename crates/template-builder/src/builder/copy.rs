//! Execution of `COPY` and `ADD`: the files are unpacked into a staging directory of the sandbox,
//! and moved from there to their destination.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps. A
//! *staged* file is a file in the staging directory.
//!
//! Uses only requests to the agent, so that images without a shell work.

use super::failure::BuildFailure;
use super::stage_config::StageConfig;
use jiffy_agent_client::{AgentClient, EntryInfo, EntryKind};
use jiffy_build_spec::spec::CopyAction;
use std::collections::HashSet;

/// Staging directory. The agent excludes it from layers.
pub const STAGING: &str = "/tmp/.jiffy-build";
/// Default owner of copied files.
pub const ROOT_USER: &str = "root";
/// Maximum number of matches of one pattern component.
const MAX_MATCHES: usize = 100_000;

/// Operands of a `COPY` with variables expanded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyRequest {
    pub sources: Vec<String>,
    pub to: String,
    pub owner: Option<String>,
    pub mode: Option<String>,
    /// True if archives are unpacked, as `ADD` does.
    pub unpack: bool,
}

impl CopyRequest {
    pub fn new(copy: &CopyAction, config: &StageConfig) -> Result<Self, String> {
        let expand = |word: &String| config.expand(word);
        let owner = copy.owner.as_ref().map(expand).transpose()?;
        Ok(Self {
            sources: copy.sources.iter().map(expand).collect::<Result<_, _>>()?,
            to: config.path(&copy.to)?,
            // Steps of E2B's clients may have an empty owner, which is the stage's user.
            owner: owner.map(|o| if o.is_empty() { config.user.clone() } else { o }),
            mode: copy.mode.as_ref().map(expand).transpose()?,
            unpack: copy.unpack,
        })
    }
}

/// A staged file or directory, and its name at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StagedFile {
    pub path: String,
    pub name: String,
    /// True for a directory.
    pub directory: bool,
}

/// Finds the files below `root` that `sources` match. Fails if a source matches no file.
pub async fn find_sources(
    agent: &AgentClient,
    root: &str,
    sources: &[String],
) -> Result<Vec<StagedFile>, BuildFailure> {
    let mut items: Vec<StagedFile> = Vec::new();
    // Files that are in `items` already. This is a set, because the guest determines the number of
    // matches: a search of `items` for each match would take quadratic time.
    let mut known = HashSet::new();
    for source in sources {
        let parts = path_components(source).ok_or_else(|| {
            BuildFailure::new(format!(
                "cannot copy `{source}`: the path is outside of the build context or stage"
            ))
        })?;
        let found = expand_pattern(agent, root, &parts).await?;
        if found.is_empty() {
            return Err(BuildFailure::new(format!(
                "cannot copy `{source}`: no such file; check the spelling and .dockerignore"
            )));
        }
        for item in found {
            // Patterns can overlap. Each file is copied once.
            if known.insert(item.clone()) {
                items.push(item);
            }
        }
    }
    Ok(items)
}

/// Returns the components of a relative path. `None` if the path leads out of its root.
fn path_components(path: &str) -> Option<Vec<String>> {
    let mut parts: Vec<String> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            // `..` fails at the root: a source must not leave its context or stage.
            ".." => drop(parts.pop()?),
            part => parts.push(part.to_owned()),
        }
    }
    Some(parts)
}

/// Returns the files below `root` that match the components of a path with wildcards, sorted by
/// path.
async fn expand_pattern(
    agent: &AgentClient,
    root: &str,
    parts: &[String],
) -> Result<Vec<StagedFile>, BuildFailure> {
    // Matches of the components so far, starting with the root itself.
    let mut matches = vec![StagedFile {
        path: root.to_owned(),
        name: String::new(),
        directory: true,
    }];
    for part in parts {
        let mut next = Vec::new();
        for parent in matches.iter().filter(|item| item.directory) {
            let base = parent.path.trim_end_matches('/');
            // A component without wildcards needs no listing of the directory.
            if !part.contains(['*', '?', '[', '\\']) {
                let path = format!("{base}/{part}");
                if let Some(entry) = stat(agent, &path).await? {
                    next.push(staged_file(path, part.clone(), &entry));
                }
                continue;
            }
            let list = agent.list_dir(&parent.path, Some(ROOT_USER), 1).await;
            let list =
                list.map_err(|e| BuildFailure::agent(&format!("list {}", parent.path), e))?;
            for entry in list {
                if glob(part, &entry.name) {
                    next.push(staged_file(
                        format!("{base}/{}", entry.name),
                        entry.name.clone(),
                        &entry,
                    ));
                }
            }
            // Bounds the memory of the host: the listings come from the guest.
            if next.len() > MAX_MATCHES {
                return Err(BuildFailure::new(format!(
                    "`{part}` matches more than {MAX_MATCHES} files"
                )));
            }
        }
        matches = next;
    }
    matches.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(matches)
}

fn staged_file(path: String, name: String, entry: &EntryInfo) -> StagedFile {
    StagedFile {
        path,
        name,
        // A link to a directory is copied as a link.
        directory: is_directory(entry) && !entry.is_symlink,
    }
}

fn is_directory(entry: &EntryInfo) -> bool {
    entry.kind == EntryKind::Directory
}

/// Returns the attributes of a file. `None` if the file does not exist.
async fn stat(agent: &AgentClient, path: &str) -> Result<Option<EntryInfo>, BuildFailure> {
    match agent.stat(path, Some(ROOT_USER)).await {
        Ok(entry) => Ok(Some(entry)),
        Err(e) if e.is_not_found() => Ok(None),
        Err(e) => Err(BuildFailure::agent(
            &format!("read the attributes of {path}"),
            e,
        )),
    }
}

/// Moves staged files to their destination: the contents of a directory into a directory, and a
/// file into a directory or to the given name.
pub async fn move_into_place(
    agent: &AgentClient,
    items: &[StagedFile],
    to: &str,
) -> Result<(), BuildFailure> {
    // `/dir/`, `/dir/.` and `/dir` denote the same directory.
    let target = to.trim_end_matches("/.").trim_end_matches('/');
    let target = if target.is_empty() { "/" } else { target };
    let existing = stat(agent, target).await?;
    let is_directory = existing.as_ref().is_some_and(is_directory);
    let named_directory = to.ends_with('/') || to.ends_with("/.");
    if items.len() > 1 && !named_directory && !is_directory {
        return Err(BuildFailure::new(format!(
            "the destination of several files must be a directory: write `{to}/`"
        )));
    }
    for item in items {
        let path = if !item.directory && (is_directory || named_directory) {
            format!("{}/{}", target.trim_end_matches('/'), item.name)
        } else {
            target.to_owned()
        };
        move_entry(agent, item, &path).await?;
    }
    Ok(())
}

/// Moves one entry to `to`. An existing directory is merged with a staged one.
async fn move_entry(agent: &AgentClient, item: &StagedFile, to: &str) -> Result<(), BuildFailure> {
    // Entries that are still to be moved: source, destination, and whether the source is a
    // directory. A list instead of recursion, because the guest determines the tree's depth.
    let mut waiting = vec![(item.path.clone(), to.to_owned(), item.directory)];
    while let Some((from, to, directory)) = waiting.pop() {
        match stat(agent, &to).await? {
            // An existing link to a directory is followed.
            Some(existing) if directory && is_directory(&existing) => {
                let list = agent.list_dir(&from, Some(ROOT_USER), 1).await;
                for entry in list.map_err(|e| BuildFailure::agent(&format!("list {from}"), e))? {
                    let directory = is_directory(&entry) && !entry.is_symlink;
                    let below = |at: &str| format!("{}/{}", at.trim_end_matches('/'), entry.name);
                    waiting.push((below(&from), below(&to), directory));
                }
                continue;
            }
            Some(existing) if is_directory(&existing) && !existing.is_symlink => {
                return Err(BuildFailure::new(format!(
                    "cannot write {to}: a directory of this name exists"
                )));
            }
            // A file or a link is removed first: `rename` cannot replace a file by a directory.
            Some(_) => {
                let removed = agent.remove(&to, Some(ROOT_USER)).await;
                removed.map_err(|e| BuildFailure::agent(&format!("replace {to}"), e))?;
            }
            None => create_parent(agent, &to).await?,
        }
        let moved = agent.rename(&from, &to, Some(ROOT_USER)).await;
        moved.map_err(|e| BuildFailure::agent(&format!("write {to}"), e))?;
    }
    Ok(())
}

/// Removes the staging directory.
pub async fn clear_staging(agent: &AgentClient) -> Result<(), BuildFailure> {
    let cleared = agent.remove(STAGING, Some(ROOT_USER)).await;
    cleared.map_err(|e| BuildFailure::agent(&format!("clear {STAGING}"), e))
}

async fn create_parent(agent: &AgentClient, path: &str) -> Result<(), BuildFailure> {
    match path.rsplit_once('/') {
        Some((parent, _)) if !parent.is_empty() => create_directory(agent, parent, ROOT_USER).await,
        _ => Ok(()),
    }
}

/// Creates a directory with its parents, unless it exists.
pub async fn create_directory(
    agent: &AgentClient,
    path: &str,
    user: &str,
) -> Result<(), BuildFailure> {
    if stat(agent, path).await?.is_some_and(|e| is_directory(&e)) {
        return Ok(());
    }
    let created = agent.make_dir(path, Some(user)).await;
    created
        .map(drop)
        .map_err(|e| BuildFailure::agent(&format!("create the directory {path}"), e))
}

/// Matches `name` against a `pattern` with `*`, `?`, `[a-z]`, `[^a-z]` and `\` escapes. The time is
/// at most proportional to the product of both lengths.
fn glob(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Position of the last star in the pattern, and the position in the name up to which it
    // matches.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
            continue;
        }
        if let Some(next) = match_one(&pattern, p, name[n]) {
            (p, n) = (next, n + 1);
            continue;
        }
        let Some((at, reached)) = star else {
            return false;
        };
        // Mismatch: let the last star match one more character. Earlier stars need no retry,
        // because the last one can match everything that they could.
        star = Some((at, reached + 1));
        (p, n) = (at + 1, reached + 1);
    }
    // The name is used up: only stars match the empty rest.
    pattern[p..].iter().all(|c| *c == '*')
}

/// Returns the position in the pattern after the element at `p` if that element matches `c`.
fn match_one(pattern: &[char], p: usize, c: char) -> Option<usize> {
    match *pattern.get(p)? {
        '?' => Some(p + 1),
        '\\' => (*pattern.get(p + 1)? == c).then_some(p + 2),
        '[' => {
            let negated = matches!(pattern.get(p + 1), Some('^' | '!'));
            let mut at = p + 1 + usize::from(negated);
            let mut fits = false;
            // A `]` directly after the opening bracket is a literal.
            let first = at;
            loop {
                let low = *pattern.get(at)?;
                if low == ']' && at > first {
                    break;
                }
                let range = pattern.get(at + 1) == Some(&'-')
                    && pattern.get(at + 2).is_some_and(|high| *high != ']');
                let high = if range { *pattern.get(at + 2)? } else { low };
                fits |= (low..=high).contains(&c);
                at += if range { 3 } else { 1 };
            }
            (fits != negated).then_some(at + 1)
        }
        literal => (literal == c).then_some(p + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, fits) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "a.txtx", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("?", "é", true),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[]x]", "]", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("[a", "a", false),
            ("", "", true),
            ("*", "", true),
        ] {
            assert_eq!(glob(pattern, name), fits, "{pattern} {name}");
        }
        // A match with exponential backtracking would not return.
        let long = "a".repeat(5000);
        assert!(!glob(&"*a".repeat(50), &format!("{long}b")));
    }

    #[test]
    fn sources_stay_inside_their_root() {
        assert_eq!(path_components("./a//b/../c/").unwrap(), ["a", "c"]);
        assert!(path_components(".").unwrap().is_empty());
        assert_eq!(path_components("../x"), None);
        assert_eq!(path_components("a/../../x"), None);
        assert_eq!(
            path_components("/a").unwrap(),
            ["a"],
            "absolute paths of stages"
        );
    }
}

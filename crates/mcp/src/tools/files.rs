//! Tools for files in a sandbox. `search.rs` has the search.
//!
//! The agent of the sandbox reads and writes the files. All results are bounded.

mod search;

use crate::catalog::{Effect, Reply, ToolEntry};
use crate::edit;
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::output::cut_text;
use crate::session::Session;
use jiffy_agent_client::{EntryInfo, EntryKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Maximum length of the text that file_read returns, in bytes.
const MAX_READ_BYTES: usize = 64 << 10;
/// Maximum length of the part of a file that file_read skips or returns.
const MAX_SCANNED_BYTES: u64 = 256 << 20;
/// Default number of lines that file_read returns.
const DEFAULT_LINES: u64 = 2000;
/// Maximum size of a file that file_edit changes.
const MAX_EDIT_BYTES: usize = 4 << 20;
/// Maximum number of entries that file_list returns.
const MAX_ENTRIES: usize = 1000;

/// Returns the tools.
pub fn tools() -> Vec<ToolEntry> {
    let group = ToolGroup::Files;
    vec![
        ToolEntry::new(
            "file_read",
            group,
            Effect::ReadOnly,
            "Read lines of a text file in a sandbox, at most 64 KiB.",
            read,
        ),
        ToolEntry::new(
            "file_write",
            group,
            Effect::Destructive,
            "Write a text file in a sandbox. Replaces an existing file and creates missing \
             directories.",
            write,
        ),
        ToolEntry::new(
            "file_edit",
            group,
            Effect::Destructive,
            "Replace text in a file in a sandbox. `old` must occur exactly once in the file.",
            edit,
        ),
        ToolEntry::new(
            "file_list",
            group,
            Effect::ReadOnly,
            "List a directory of a sandbox, at most 1000 entries.",
            list,
        ),
        ToolEntry::new(
            "file_search",
            group,
            Effect::ReadOnly,
            "Search text files in a sandbox for lines that match a regular expression, at most 200 \
             matches.",
            search::search,
        ),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ReadArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Path of the file. Relative paths are relative to the home directory.
    path: String,
    /// Number of the first line, from 1. Defaults to 1.
    #[schemars(range(min = 1))]
    offset: Option<u64>,
    /// Maximum number of lines. Defaults to 2000.
    #[schemars(range(min = 1))]
    limit: Option<u64>,
}

#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
struct ReadOutput {
    /// Text, with U+FFFD for bytes that are not UTF-8.
    content: String,
    /// Number of lines in `content`.
    lines: u64,
    /// Value of `offset` for the next lines. Absent at the end of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_offset: Option<u64>,
    /// True if a line was cut because it is too long.
    cut: bool,
}

/// Collects lines of a file.
struct LineReader {
    skip: u64,
    limit: u64,
    first: u64,
    bytes: Vec<u8>,
    lines: u64,
    /// True if a line was cut.
    cut: bool,
    /// True if there are further lines.
    has_more: bool,
}

impl LineReader {
    fn new(offset: u64, limit: u64) -> Self {
        Self {
            skip: offset.saturating_sub(1),
            limit,
            first: offset.max(1),
            bytes: Vec::new(),
            lines: 0,
            cut: false,
            has_more: false,
        }
    }

    /// Adds bytes of the file. Returns false if no further bytes are needed.
    fn push(&mut self, chunk: &[u8]) -> bool {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            let ends = part.ends_with(b"\n");
            if self.skip > 0 {
                self.skip -= u64::from(ends);
                continue;
            }
            if self.lines == self.limit {
                self.has_more = true;
                return false;
            }
            if self.bytes.len() + part.len() > MAX_READ_BYTES {
                self.has_more = true;
                self.stop_in_line(part);
                return false;
            }
            self.bytes.extend_from_slice(part);
            self.lines += u64::from(ends);
        }
        true
    }

    /// Returns the lines before a line that does not fit, or the beginning of this line.
    fn stop_in_line(&mut self, part: &[u8]) {
        match self.bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => self.bytes.truncate(end + 1),
            None => {
                let room = MAX_READ_BYTES - self.bytes.len();
                self.bytes.extend_from_slice(&part[..room.min(part.len())]);
                self.cut = true;
                self.lines = 1;
            }
        }
    }

    fn finish(mut self) -> ReadOutput {
        // The last line of a file may lack a line feed.
        let is_open = !self.has_more && !self.bytes.is_empty() && !self.bytes.ends_with(b"\n");
        self.lines += u64::from(is_open);
        let text = String::from_utf8_lossy(&self.bytes);
        ReadOutput {
            // Each invalid byte becomes three bytes.
            content: cut_text(&text, MAX_READ_BYTES),
            lines: self.lines,
            next_offset: self.has_more.then_some(self.first + self.lines),
            cut: self.cut || text.len() > MAX_READ_BYTES,
        }
    }
}

/// Returns lines of a text file of a sandbox.
async fn read(session: Arc<Session>, arguments: ReadArguments) -> ToolResult<Reply<ReadOutput>> {
    let path = &arguments.path;
    let agent = session.agent(&arguments.sandbox).await?;
    let limit = arguments.limit.unwrap_or(DEFAULT_LINES);
    let mut lines = LineReader::new(arguments.offset.unwrap_or(1), limit);
    let failed = |e| ToolError::of_path("read", path, &e);
    let mut file = agent.read_stream(path, None).await.map_err(failed)?;
    let mut scanned = 0;
    while let Some(chunk) = file.next().await.map_err(failed)? {
        if !lines.push(&chunk) {
            break;
        }
        scanned += chunk.len() as u64;
        if scanned > MAX_SCANNED_BYTES {
            return Err(ToolError::new(
                "the line is too far from the beginning of the file: use sandbox_exec with `sed -n`",
            ));
        }
    }
    Ok(lines.finish().into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WriteArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Path of the file. Relative paths are relative to the home directory.
    path: String,
    /// New content of the file.
    content: String,
}

#[derive(Serialize, JsonSchema)]
struct WriteOutput {
    /// Path of the file.
    path: String,
    /// Size of the file in bytes.
    bytes: usize,
}

async fn write(session: Arc<Session>, arguments: WriteArguments) -> ToolResult<Reply<WriteOutput>> {
    let WriteArguments { path, content, .. } = arguments;
    let agent = session.agent(&arguments.sandbox).await?;
    let bytes = content.len();
    let written = agent.write(&path, None, content).await;
    written.map_err(|e| ToolError::of_path("write", &path, &e))?;
    Ok(WriteOutput { path, bytes }.into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EditArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Path of the file. Relative paths are relative to the home directory.
    path: String,
    /// Text to replace, exactly as in the file. Must occur once.
    old: String,
    /// Replacement.
    new: String,
}

#[derive(Serialize, JsonSchema)]
struct EditOutput {
    /// Path of the file.
    path: String,
    /// Number of the first changed line.
    line: usize,
}

/// Replaces a text in a file.
async fn edit(session: Arc<Session>, arguments: EditArguments) -> ToolResult<Reply<EditOutput>> {
    let EditArguments { path, old, new, .. } = arguments;
    let agent = session.agent(&arguments.sandbox).await?;
    let content = agent.read(&path, None, MAX_EDIT_BYTES).await;
    let content = content.map_err(|e| ToolError::of_path("read", &path, &e))?;
    let content = std::str::from_utf8(&content).map_err(|_| {
        ToolError::new(format!(
            "`{path}` is not UTF-8 text: change it with sandbox_exec"
        ))
    })?;
    let edited = edit::replace(content, &old, &new)?;
    let written = agent.write(&path, None, edited.content).await;
    written.map_err(|e| ToolError::of_path("write", &path, &e))?;
    let line = edited.line;
    Ok(EditOutput { path, line }.into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Path of the directory. Relative paths are relative to the home directory.
    path: String,
}

#[derive(Serialize, JsonSchema)]
struct ListEntry {
    /// Name, with U+FFFD for bytes that are not UTF-8.
    name: String,
    /// Type: `file`, `directory`, `symlink` (without a target) or `other`.
    kind: &'static str,
    /// Size in bytes.
    bytes: u64,
    /// Time of the last change.
    modified: String,
    /// Target of a symbolic link.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

impl From<EntryInfo> for ListEntry {
    fn from(entry: EntryInfo) -> Self {
        Self {
            kind: match entry.kind {
                EntryKind::File => "file",
                EntryKind::Directory => "directory",
                EntryKind::Symlink => "symlink",
                EntryKind::Other => "other",
            },
            // The guest chose the texts.
            name: cut_text(&entry.name, 1024),
            bytes: entry.size.parse().unwrap_or_default(),
            modified: cut_text(&entry.modified_time, 64),
            target: entry.symlink_target.map(|target| cut_text(&target, 1024)),
        }
    }
}

#[derive(Serialize, JsonSchema)]
struct ListOutput {
    /// Entries, sorted by name.
    entries: Vec<ListEntry>,
    /// Number of further entries that are not in the list.
    omitted: usize,
}

async fn list(session: Arc<Session>, arguments: ListArguments) -> ToolResult<Reply<ListOutput>> {
    let path = &arguments.path;
    let agent = session.agent(&arguments.sandbox).await?;
    let entries = agent.list_dir(path, None, 1).await;
    let mut entries = entries.map_err(|e| ToolError::of_path("list", path, &e))?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let omitted = entries.len().saturating_sub(MAX_ENTRIES);
    entries.truncate(MAX_ENTRIES);
    let entries = entries.into_iter().map(ListEntry::from).collect();
    Ok(ListOutput { entries, omitted }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_lines(content: &[u8], offset: u64, limit: u64, chunk: usize) -> ReadOutput {
        let mut lines = LineReader::new(offset, limit);
        for chunk in content.chunks(chunk) {
            if !lines.push(chunk) {
                break;
            }
        }
        lines.finish()
    }

    #[test]
    fn the_requested_lines_are_returned_with_the_offset_of_the_next() {
        for chunk in [1, 2, 100] {
            let all = read_lines(b"a\nb\nc", 1, 10, chunk);
            assert_eq!(
                (&all.content[..], all.lines, all.next_offset),
                ("a\nb\nc", 3, None)
            );
            let middle = read_lines(b"a\nb\nc", 2, 1, chunk);
            assert_eq!((&middle.content[..], middle.next_offset), ("b\n", Some(3)));
            let last = read_lines(b"a\nb\n", 2, 1, chunk);
            assert_eq!(
                (&last.content[..], last.lines, last.next_offset),
                ("b\n", 1, None)
            );
            assert_eq!(read_lines(b"a\n", 5, 1, chunk), ReadOutput::default());
        }
    }

    #[test]
    fn long_files_and_lines_are_bounded() {
        let file = "0123456789abcde\n".repeat(100_000);
        let read = read_lines(file.as_bytes(), 1, u64::MAX, 1 << 16);
        assert_eq!(read.content.len(), MAX_READ_BYTES);
        assert_eq!(
            (read.lines, read.next_offset, read.cut),
            (4096, Some(4097), false)
        );
        let line = read_lines(&vec![0xff; 1 << 20], 1, 1, 1 << 16);
        assert!(line.cut && line.content.len() <= MAX_READ_BYTES);
        assert_eq!(line.next_offset, Some(2));
    }
}

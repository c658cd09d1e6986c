//! Search for lines in files of a sandbox, with the program `grep` of the sandbox.

use crate::catalog::Reply;
use crate::command::kill;
use crate::error::{ToolError, ToolResult};
use crate::output::cut_text;
use crate::session::Session;
use jiffy_agent_client::{ClientError, ProcessEvent, ProcessSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of matches.
const MAX_MATCHES: usize = 200;
/// Maximum length of a matching line in a result, in bytes.
const MAX_LINE_BYTES: usize = 300;
/// Maximum length of the output of `grep`.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Maximum duration of a search.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SearchArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Extended regular expression.
    pattern: String,
    /// Names of files to search, for example `*.py`. Defaults to all files.
    glob: Option<String>,
    /// Directory or file to search. Defaults to the working directory of the template.
    path: Option<String>,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct SearchMatch {
    /// Path of the file.
    path: String,
    /// Number of the line, from 1.
    line: u64,
    /// Text of the line, at most 300 bytes.
    text: String,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct SearchOutput {
    /// Matching lines.
    matches: Vec<SearchMatch>,
    /// True if there are further matches.
    more: bool,
}

/// Parses the output of `grep --null`: path, NUL, number, colon, text.
fn parse(output: &[u8]) -> Vec<SearchMatch> {
    let lines = output.split(|byte| *byte == b'\n');
    let matches = lines.filter_map(|line| {
        let end = line.iter().position(|byte| *byte == 0)?;
        let rest = String::from_utf8_lossy(&line[end + 1..]);
        let (number, text) = rest.split_once(':')?;
        Some(SearchMatch {
            path: cut_text(&String::from_utf8_lossy(&line[..end]), 1024),
            line: number.parse().ok()?,
            text: cut_text(text, MAX_LINE_BYTES),
        })
    });
    matches.take(MAX_MATCHES + 1).collect()
}

/// Searches files with `grep` in the sandbox.
pub(super) async fn search(
    session: Arc<Session>,
    arguments: SearchArguments,
) -> ToolResult<Reply<SearchOutput>> {
    let agent = session.agent(&arguments.sandbox).await?;
    let mut words = vec!["-rnIE".to_owned(), "--null".to_owned()];
    if let Some(glob) = arguments.glob {
        words.push(format!("--include={glob}"));
    }
    let path = arguments.path.unwrap_or_else(|| ".".to_owned());
    words.extend(["-e".to_owned(), arguments.pattern, "--".to_owned(), path]);
    let mut spec = ProcessSpec::new("grep", words);
    spec.timeout = Some(SEARCH_TIMEOUT);
    let mut process = agent.start(&spec).await.map_err(|e| match e {
        ClientError::CommandNotFound(_) => ToolError::new(
            "the sandbox has no `grep`: install it with sandbox_exec, or use another template",
        ),
        e => e.into(),
    })?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut lines = 0;
    let mut status = None;
    while let Some(event) = process.next_event().await? {
        match event {
            ProcessEvent::Stdout(chunk) => {
                lines += chunk.iter().filter(|byte| **byte == b'\n').count();
                stdout.extend_from_slice(&chunk);
            }
            ProcessEvent::Stderr(chunk) if stderr.len() < MAX_LINE_BYTES => {
                stderr.extend_from_slice(&chunk);
            }
            ProcessEvent::End(end) => status = Some(end.exit_code),
            _ => {}
        }
        if status.is_none() && (lines > MAX_MATCHES || stdout.len() > MAX_OUTPUT_BYTES) {
            kill(&agent, process.pid()).await;
            break;
        }
    }
    let mut matches = parse(&stdout);
    let more = matches.len() > MAX_MATCHES || status.is_none();
    matches.truncate(MAX_MATCHES);
    // Status 2 without matches: for example an invalid expression or a missing directory.
    if matches.is_empty() && status.is_some_and(|status| status > 1) {
        let reason = cut_text(&String::from_utf8_lossy(&stderr), MAX_LINE_BYTES);
        return Err(ToolError::new(format!("the search failed: {reason}")));
    }
    Ok(SearchOutput { matches, more }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_grep_are_parsed_and_bounded() {
        let output = b"./a:b\x00007:x:y\nBinary file matches\nc\0zz:1\n\xff\x001:\xff\n";
        let found = parse(output);
        assert_eq!(found.len(), 2);
        assert_eq!((&found[0].path[..], found[0].line), ("./a:b", 7));
        assert_eq!(found[0].text, "x:y");
        assert_eq!(found[1].path, "\u{fffd}");
        let many = b"f\x001:x\n".repeat(10_000);
        assert_eq!(parse(&many).len(), MAX_MATCHES + 1);
        let long = [b"f\x001:", &vec![b'x'; 1 << 20][..]].concat();
        assert_eq!(parse(&long)[0].text.len(), MAX_LINE_BYTES);
    }
}

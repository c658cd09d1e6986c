//! All processes of a guest, as its kernel describes them. The guest is untrusted: the parser
//! bounds all fields.

use super::{AgentCall, AgentClient};
use crate::error::ClientError;
use crate::request_body::RequestBody;
use hyper::Method;

/// Maximum length of a list in bytes. The agent sends about 4 MiB at most. The rest is a margin.
const MAX_LIST_BYTES: usize = (4 << 20) + 8192;
/// Maximum length of another response in bytes.
const MAX_ANSWER_BYTES: usize = 4096;
/// Maximum length of a name or command line in characters.
const MAX_TEXT: usize = 512;
/// Clock ticks per second in `/proc`, which is the same on all supported machines.
const TICKS_PER_SECOND: f64 = 100.0;
/// Process that is the parent of kernel threads.
const KERNEL_PARENT: u32 = 2;

/// Process of a guest. All texts are from the guest.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestProcess {
    /// Process id.
    pub pid: u32,
    /// Process id of the parent. 0 for the first process.
    pub parent: u32,
    /// Name of the user, or number.
    pub user: String,
    /// Name of the program.
    pub name: String,
    /// Command line. Empty if the process has none.
    pub command: String,
    /// State: a letter as in `ps`.
    pub state: char,
    /// Processor time in seconds.
    pub cpu_seconds: f64,
    /// Resident memory in bytes.
    pub memory_bytes: u64,
    /// Time since the start in seconds.
    pub age_seconds: f64,
    /// Start time in clock ticks since the start of the guest.
    pub start_ticks: u64,
}

impl AgentClient {
    /// Returns the processes of the guest, except threads of its kernel.
    ///
    /// # Errors
    /// [`ClientError::Status`] with status 404 if the agent is of an earlier version.
    pub async fn guest_processes(&self) -> Result<Vec<GuestProcess>, ClientError> {
        let call = AgentCall {
            method: Method::GET,
            path: "/processes?username=root",
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::Whole(None)).await?;
        let body = self.expect_success(answer).await?;
        // The guest determines the response, so its length is bounded.
        let body = body.collect(MAX_LIST_BYTES).await?;
        parse_list(&body)
            .ok_or_else(|| ClientError::Protocol("invalid response of /processes".to_owned()))
    }

    /// Sends signal number `signal` to a process. With `start_ticks`, only to a process with this
    /// start time.
    pub async fn signal_process(
        &self,
        pid: u32,
        signal: i32,
        start_ticks: Option<u64>,
    ) -> Result<(), ClientError> {
        let start = start_ticks.map(|ticks| format!("&start={ticks}"));
        let start = start.unwrap_or_default();
        let path = format!("/processes/signal?username=root&pid={pid}&signal={signal}{start}");
        let call = AgentCall {
            method: Method::POST,
            path: &path,
            content: "",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, RequestBody::Whole(None)).await?;
        let answer = self.expect_success(answer).await?;
        answer.collect(MAX_ANSWER_BYTES).await?;
        Ok(())
    }
}

/// Parses the response of an agent. `None` if its form is invalid.
pub fn parse_list(mut bytes: &[u8]) -> Option<Vec<GuestProcess>> {
    let uptime = field(&mut bytes)?;
    let uptime = std::str::from_utf8(uptime).ok()?;
    let uptime: f64 = uptime.split(' ').next()?.trim().parse().ok()?;
    let uptime = if uptime.is_finite() { uptime } else { 0.0 };
    let mut processes = Vec::new();
    while !bytes.is_empty() {
        let (user, stat) = (field(&mut bytes)?, field(&mut bytes)?);
        let command = field(&mut bytes)?;
        // A process whose description is invalid is omitted: the guest's kernel is not trusted.
        if let Some(process) = parse(uptime, user, stat, command) {
            processes.push(process);
        }
    }
    let has_kernel_threads = processes
        .iter()
        .any(|process| process.pid == KERNEL_PARENT && process.name == "kthreadd");
    if has_kernel_threads {
        processes.retain(|p| p.pid != KERNEL_PARENT && p.parent != KERNEL_PARENT);
    }
    Some(processes)
}

/// Removes the first field and returns it. A field consists of its length (16 bits, little-endian)
/// and its bytes.
fn field<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (field, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    *bytes = rest;
    Some(field)
}

/// Parses the fields of a process. `stat` is the content of `/proc/PID/stat` (proc(5)).
fn parse(uptime: f64, user: &[u8], stat: &[u8], command: &[u8]) -> Option<GuestProcess> {
    // The name may contain all characters: it ends at the last parenthesis.
    let open = stat.iter().position(|byte| *byte == b'(')?;
    let close = stat.iter().rposition(|byte| *byte == b')')?;
    let name = stat.get(open + 1..close)?;
    let pid = std::str::from_utf8(&stat[..open]).ok()?;
    let rest = std::str::from_utf8(&stat[close + 1..]).ok()?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The first field after the name is the third of `stat`. Numbers of the fields, from 1: 4
    // parent, 14 and 15 processor time in user mode and in the kernel, 22 start time, 24 resident
    // pages.
    let number = |index: usize| fields.get(index - 3)?.parse::<u64>().ok();
    let ticks = number(14)?.saturating_add(number(15)?);
    let start_ticks = number(22)?;
    let pages = fields.get(24 - 3)?.parse::<i64>().ok()?;
    let state = fields.first()?.chars().next()?;
    Some(GuestProcess {
        pid: pid.trim().parse().ok()?,
        parent: u32::try_from(number(4)?).ok()?,
        user: text(user),
        name: text(name),
        command: text(command.strip_suffix(&[0]).unwrap_or(command)),
        state: if state.is_ascii_alphabetic() {
            state
        } else {
            '?'
        },
        cpu_seconds: ticks as f64 / TICKS_PER_SECOND,
        memory_bytes: u64::try_from(pages).unwrap_or(0).saturating_mul(4096),
        age_seconds: (uptime - start_ticks as f64 / TICKS_PER_SECOND).max(0.0),
        start_ticks,
    })
}

/// Converts a text of the guest. Arguments are separated by zero bytes. Invalid UTF-8 and
/// characters that control terminals or the direction of text are replaced.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let shown = |c: char| match c {
        '\0' => ' ',
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
            char::REPLACEMENT_CHARACTER
        }
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().take(MAX_TEXT).map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes the response of an agent: each field after its length.
    fn list(fields: &[&[u8]]) -> Vec<u8> {
        let mut list = Vec::new();
        for field in fields {
            list.extend_from_slice(&u16::try_from(field.len()).unwrap().to_le_bytes());
            list.extend_from_slice(field);
        }
        list
    }

    /// Returns the content of `/proc/PID/stat` of a process in state `S` with 2 s of processor time
    /// (150 + 50 ticks), start time 1000 ticks and 25 resident pages.
    fn stat(pid: u32, name: &str, parent: u32) -> Vec<u8> {
        format!("{pid} ({name}) S {parent} 1 1 0 -1 0 1 2 3 4 150 50 7 8 20 0 3 0 1000 99 25 0\n")
            .into_bytes()
    }

    #[test]
    fn processes_are_parsed_and_kernel_threads_omitted() {
        let (init, shell) = (stat(1, "agent", 0), stat(7, "sh ) x (", 1));
        let (daemon, thread) = (stat(2, "kthreadd", 0), stat(3, "kworker/0:1", 2));
        let list = list(&[
            b"12.50 20.00\n",
            b"root",
            &init,
            b"/agent\0",
            b"root",
            &daemon,
            b"",
            b"root",
            &thread,
            b"",
            b"user",
            &shell,
            b"sh\0-c\0\x1b[2J\xff\0",
        ]);
        let processes = parse_list(&list).unwrap();
        assert_eq!(processes.iter().map(|p| p.pid).collect::<Vec<_>>(), [1, 7]);
        let expected = GuestProcess {
            pid: 7,
            parent: 1,
            user: "user".to_owned(),
            name: "sh ) x (".to_owned(),
            command: "sh -c \u{fffd}[2J\u{fffd}".to_owned(),
            state: 'S',
            cpu_seconds: 2.0,
            memory_bytes: 100 << 10,
            age_seconds: 2.5,
            start_ticks: 1000,
        };
        assert_eq!(processes[1], expected);
    }

    #[test]
    fn texts_cannot_control_terminals_or_the_direction_of_text() {
        assert_eq!(
            text("a\u{202e}b\u{2066}\u{9b}\n".as_bytes()),
            "a\u{fffd}b\u{fffd}\u{fffd}\u{fffd}"
        );
        assert_eq!(text("größer 日本".as_bytes()), "größer 日本");
    }

    #[test]
    fn hostile_lists_are_rejected_or_shortened() {
        for invalid in [&b""[..], b"\x05\0x", b"\x01\0x", b"\xff"] {
            assert_eq!(parse_list(invalid), None);
        }
        let valid = stat(9, "x", 1);
        for damaged in [
            &b""[..],
            b"1",
            b"(",
            b")(",
            b"x (y) S 1",
            b"-1 (y) S 1 1 1 0 -1 0 1 2 3 4 1 1 7 8 20 0 3 0 1 9 2",
            b"1 (y) S 99999999999 1 1 0 -1 0 1 2 3 4 1 1 7 8 20 0 3 0 1 9 2",
        ] {
            let list = list(&[b"1 1", b"u", damaged, b"", b"u", &valid, b"c"]);
            assert_eq!(parse_list(&list).unwrap().len(), 1, "{damaged:?}");
        }
        let long = vec![b'a'; 60_000];
        let list = list(&[b"1 1", &long, &valid, &long]);
        let process = &parse_list(&list).unwrap()[0];
        assert_eq!(
            (process.user.len(), process.command.len()),
            (MAX_TEXT, MAX_TEXT)
        );
    }
}

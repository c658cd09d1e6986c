//! `GET /processes`: all processes of the sandbox. `POST /processes/signal`: sends a signal to one.
//!
//! The list consists of fields of the kernel, which the host parses. The first is the content of
//! `/proc/uptime`. Each process has three: its user, the content of `stat` and the begin of
//! `cmdline`. A field is its length in two bytes, least significant first, and its bytes.

use super::error::RestError;
use super::file_query::parameter;
use crate::body::ReplyBody;
use crate::state::Agent;
use crate::users::Users;
use crate::workers::CallClass;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;

/// Maximum size of a list in bytes. Further processes are omitted.
const MAX_LIST_BYTES: usize = 4 << 20;
/// Maximum length of a field in bytes.
const MAX_FIELD: usize = 512;
/// Maximum length of the name of a user in bytes.
const MAX_USER: usize = 32;
/// Length of a command line if there are many processes, in bytes.
const MAX_SHORT_COMMAND: usize = 64;
/// Size of a list from which on command lines are short, in bytes.
const SHORT_FROM_BYTES: usize = 1 << 20;

/// Sends the list.
pub async fn list(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let user = parameter(request.uri(), "username");
    super::only_root(agent, user.as_deref(), "lists of processes are").await?;
    let what = "cannot list the processes";
    let work = |_: &_| read_all();
    let list = agent.workers.run(CallClass::Files, what, work).await?;
    Ok(Response::new(ReplyBody::whole(list)))
}

/// Returns the list of all processes in the format that the module describes. The list has a
/// maximum size: long command lines are cut, and further processes are omitted.
fn read_all() -> Vec<u8> {
    let mut list = Vec::new();
    add(
        &mut list,
        &read("/proc/uptime", MAX_FIELD).unwrap_or_default(),
    );
    let users = Users::load();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|n| n.parse::<u32>().is_ok()) else {
            continue;
        };
        let path = format!("/proc/{pid}");
        let max = if list.len() < SHORT_FROM_BYTES {
            MAX_FIELD
        } else {
            MAX_SHORT_COMMAND
        };
        // A process that exits meanwhile is omitted.
        let (Ok(owner), Ok(stat)) = (
            fs::metadata(&path),
            read(&format!("{path}/stat"), MAX_FIELD),
        ) else {
            continue;
        };
        let command = read(&format!("{path}/cmdline"), max).unwrap_or_default();
        let user = users.user_name(owner.uid());
        if list.len() + user.len().min(MAX_USER) + stat.len() + command.len() > MAX_LIST_BYTES {
            break;
        }
        add(&mut list, &user.as_bytes()[..user.len().min(MAX_USER)]);
        add(&mut list, &stat);
        add(&mut list, &command);
    }
    list
}

/// Reads the first bytes of a file.
fn read(path: &str, max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; max];
    let length = File::open(path)?.read(&mut bytes)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Appends a field to a list.
fn add(list: &mut Vec<u8>, field: &[u8]) {
    // A field is shorter than 64 KiB.
    list.extend_from_slice(&(field.len() as u16).to_le_bytes());
    list.extend_from_slice(field);
}

/// Sends the signal `signal` (number) to the process `pid`. The process must have the start time
/// `start` (field 22 of `stat`), unless this is absent.
pub async fn signal(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = |name: &str| parameter(request.uri(), name);
    super::only_root(agent, query("username").as_deref(), "signals are").await?;
    let number = |name: &str| query(name).and_then(|text| text.parse::<i32>().ok());
    let (Some(pid), Some(signal)) = (number("pid"), number("signal")) else {
        return Err(RestError::bad("the query has no pid or no signal"));
    };
    // Process 1 is the agent or the init process. Other numbers select several processes.
    if pid < 2 {
        return Err(RestError::bad("the process cannot receive signals"));
    }
    if let Some(start) = query("start") {
        let stat = read(&format!("/proc/{pid}/stat"), MAX_FIELD).unwrap_or_default();
        let stat = String::from_utf8_lossy(&stat);
        // The name (field 2), in parentheses, may contain all characters. The first field after it
        // is field 3, so field 22 has the index 19.
        let fields = stat.rsplit(')').next().unwrap_or_default();
        if fields.split_whitespace().nth(19) != Some(&start) {
            return Err(missing());
        }
    }
    // SAFETY: the call takes no pointers.
    if unsafe { libc::kill(pid, signal) } == 0 {
        return Ok(super::no_content());
    }
    Err(match io::Error::last_os_error().raw_os_error() {
        Some(libc::ESRCH) => missing(),
        _ => RestError::bad("the process cannot receive the signal"),
    })
}

/// Returns the error for a process that does not exist.
fn missing() -> RestError {
    RestError::new(StatusCode::NOT_FOUND, "the process does not exist")
}

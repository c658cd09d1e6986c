//! Unpacks archives in a separate confined process, because archives are not trusted. The process
//! sees only the directory that it fills.
//!
//! The process runs this program with [`UNPACK_ARGUMENT`] (see [`set_unpacker_program`]). The
//! parent sends the archive to standard input of the process. The process writes to standard
//! output, in this order:
//! - a line with the number of unpacked bytes, before each [`REPORT_BYTES`] that it unpacks;
//! - an [`UnpackOutcome`] as one line of JSON;
//! - the names of the directories that need overlayfs's opaque mark (`trusted.overlay.opaque`),
//!   which hides the directory of the same name in lower layers. Only the parent may set the mark,
//!   since the process has no `CAP_SYS_ADMIN`.
//!
//! The parent treats this output as untrusted, since a hostile archive may have taken over the
//! process.

use super::confined_dir::{ConfinedDir, LayerPath};
use super::unpack::{
    OVERLAY_OPAQUE, OverlayMarks, REPORT_BYTES, UnpackSinks, unpack_image_with, unpack_with,
};
use super::{ByteMeter, LayerError, UnpackLimits, UnpackedLayer, shown};
use crate::deadline::Deadline;
use crate::jail::{self, system_calls};
use jiffy_confinement::{
    CapabilitySet, FsView, close_descriptors, detach, end_with_parent, set_limit,
};
use nix::sys::resource::Resource;
use rustix::fs::{XattrFlags, fsetxattr};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

/// First argument of the unpacker process. The second argument is a [`UnpackTask`].
pub const UNPACK_ARGUMENT: &str = "--as-unpacker";
/// Time between the unpacker's own time limit and the kill by the parent. The process usually
/// reports its own timeout, with a better message.
const GRACE_PERIOD: Duration = Duration::from_secs(30);
/// Maximum length of the line with the outcome, in bytes.
const MAX_OUTCOME_BYTES: u64 = 1 << 20;
/// Memory limit of the process in bytes, in addition to [`UnpackLimits::names`] for the names that
/// the process remembers. Decompression windows need most of it.
const MEMORY_BYTES: u64 = 1 << 30;
/// Maximum number of bytes that the parent sends to the process in one write.
const CHUNK_BYTES: usize = 1 << 18;
/// Number of hexadecimal digits of a SHA-256.
const SHA256_DIGITS: usize = 64;
/// Prefix of lines that report the number of unpacked bytes. Outcomes are JSON and start
/// differently.
const REPORT_MARK: &[u8] = b"+";
/// Capabilities for setting any owner, mode and capability of a file.
const UNPACKER_CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETFCAP);

static UNPACKER_PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the program that unpacks layers from now on. The program must call [`unpacker`] if its
/// first argument is [`UNPACK_ARGUMENT`]. If no program is set, layers are unpacked in the calling
/// process.
pub fn set_unpacker_program(program: impl Into<PathBuf>) {
    // Ignore the error: later calls have no effect.
    let _ = UNPACKER_PROGRAM.set(program.into());
}

/// Task of the unpacker process.
#[derive(Debug, Serialize, Deserialize)]
struct UnpackTask {
    into: PathBuf,
    limits: UnpackLimits,
    /// True if the result is an EROFS image, false for a directory.
    is_image: bool,
}

/// Result of unpacking, as the process reports it.
#[derive(Debug, Serialize, Deserialize)]
enum UnpackOutcome {
    Done(UnpackedLayer),
    Truncated,
    DiskFull { entry: String },
    Failed(String),
}

/// Unpacks as [`super::unpack`] does, in a confined process if a program is set. Calls `meter`
/// before bytes are written.
pub(crate) fn unpack(
    packed: impl Read,
    into: &Path,
    limits: UnpackLimits,
    meter: ByteMeter<'_>,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<UnpackedLayer, LayerError> {
    match UNPACKER_PROGRAM.get() {
        None => {
            let on_unpacked =
                &mut |bytes| meter(bytes).map_err(|message| LayerError::Budget { message });
            let mut sinks = UnpackSinks {
                on_bytes,
                on_unpacked,
            };
            unpack_with(packed, into, limits, &mut sinks, OverlayMarks::Set)
        }
        Some(program) => {
            let process = UnpackerProcess::start(program, into, limits, None)?;
            process.unpack(packed, into, limits, meter, on_bytes)
        }
    }
}

/// Unpacks as [`super::unpack_image`] does.
pub(crate) fn unpack_image(
    image: &File,
    into: &Path,
    limits: UnpackLimits,
) -> Result<(), LayerError> {
    match UNPACKER_PROGRAM.get() {
        None => super::unpack_image(image, into, limits),
        Some(program) => {
            let image = image.try_clone().map_err(LayerError::Read)?;
            let process = UnpackerProcess::start(program, into, limits, Some(image))?;
            let unmetered = |_| Ok(());
            let run = process.run(io::empty(), into, limits, &unmetered, &mut |_| ());
            run.map(drop)
        }
    }
}

/// An unpacker process. It is killed on drop.
struct UnpackerProcess {
    child: Child,
    /// Kills the process after its time limit. Held until drop.
    _watch: Deadline,
}

impl Drop for UnpackerProcess {
    fn drop(&mut self) {
        // Ignore the error: the process may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl UnpackerProcess {
    /// Starts the unpacker process. Its standard input is `image`, or a pipe for an archive.
    fn start(
        program: &Path,
        into: &Path,
        limits: UnpackLimits,
        image: Option<File>,
    ) -> Result<Self, LayerError> {
        let task = UnpackTask {
            into: into.to_owned(),
            limits,
            is_image: image.is_some(),
        };
        let failed = |e: io::Error| LayerError::Process(e.to_string());
        let task = serde_json::to_string(&task).map_err(|e| failed(e.into()))?;
        let mut command = Command::new(program);
        command
            .args([UNPACK_ARGUMENT, &task])
            // The environment of the daemon may contain secrets. The process needs only
            // JIFFY_JAIL, which is set below.
            .env_clear()
            .current_dir("/")
            .stdin(image.map_or_else(Stdio::piped, Stdio::from))
            .stdout(Stdio::piped())
            // A hostile archive could fill the daemon's log through standard error.
            .stderr(Stdio::null());
        // The process decides by the same variable whether to confine itself (`jail::is_on`).
        if let Some(word) = std::env::var_os("JIFFY_JAIL") {
            command.env("JIFFY_JAIL", word);
        }
        // SAFETY: a system call without pointers.
        unsafe {
            command.pre_exec(end_with_parent);
        }
        let mut child = command.spawn().map_err(failed)?;
        // From here on, every error path must kill and reap the child.
        match Deadline::start(&child, limits.time.saturating_add(GRACE_PERIOD)) {
            Ok(watch) => Ok(Self {
                child,
                _watch: watch,
            }),
            Err(e) => {
                // Ignore errors: the process may have exited already.
                let _ = child.kill();
                let _ = child.wait();
                Err(failed(e))
            }
        }
    }

    /// Unpacks an archive as [`Self::run`] does. Checks the diff id, which becomes the name of a
    /// directory: the process could otherwise choose a path outside the store.
    fn unpack(
        self,
        packed: impl Read,
        into: &Path,
        limits: UnpackLimits,
        meter: ByteMeter<'_>,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<UnpackedLayer, LayerError> {
        let unpacked = self.run(packed, into, limits, meter, on_bytes)?;
        let id = &unpacked.diff_id;
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if id.len() == SHA256_DIGITS && id.bytes().all(is_hex) {
            return Ok(unpacked);
        }
        Err(LayerError::Process(
            "it reported an invalid diff id".to_owned(),
        ))
    }

    /// Sends the archive to the process and waits for the result. Kills the process if `meter`
    /// rejects the bytes that the process reports.
    fn run(
        mut self,
        packed: impl Read,
        into: &Path,
        limits: UnpackLimits,
        meter: ByteMeter<'_>,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<UnpackedLayer, LayerError> {
        let failed = |e: io::Error| LayerError::Process(e.to_string());
        // `take` cannot fail: `start` requested pipes.
        let output = self
            .child
            .stdout
            .take()
            .ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let input = self.child.stdin.take();
        // The process is not reaped before the reader thread has exited, so its pid is not reused.
        let process = Pid::from_child(&self.child);
        // Input and output are served by two threads. With one thread, both processes could block
        // on a full pipe.
        let (fed, read) = thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let read = read_output(output, &limits, meter);
                if read.is_err() {
                    // Ignore the error: the process may have exited.
                    let _ = kill_process(process, Signal::KILL);
                }
                read
            });
            (send_archive(input, packed, on_bytes), reader.join())
        });
        let read = read.map_err(|_| {
            failed(io::Error::other(
                "the thread that reads its output panicked",
            ))
        })?;
        let (line, marks) = match (read, fed) {
            // The meter rejected the bytes, so the reader thread killed the process. This error
            // takes precedence over an error of the archive's source.
            (Err(budget @ LayerError::Budget { .. }), _) => return Err(budget),
            // An error of the archive's source (for example a download) is the cause of any other
            // error.
            (_, Err(e)) => return Err(LayerError::read(e)),
            (read, Ok(())) => read?,
        };
        let status = self.child.wait().map_err(failed)?;
        if let Some(signal) = status.signal() {
            return Err(LayerError::Process(format!(
                "it was killed by signal {signal}"
            )));
        }
        let outcome = serde_json::from_slice(&line);
        // A process that panicked has written no outcome.
        match outcome
            .map_err(|_| LayerError::Process(format!("it exited without a result ({status})")))?
        {
            // The outcome comes from an untrusted process: marks and texts are checked.
            UnpackOutcome::Done(unpacked) => {
                set_opaque_marks(into, &marks, &limits)?;
                Ok(unpacked)
            }
            UnpackOutcome::Truncated => Err(LayerError::Truncated),
            UnpackOutcome::DiskFull { entry } => Err(LayerError::DiskFull {
                entry: shown(entry.as_bytes()),
            }),
            UnpackOutcome::Failed(why) => Err(LayerError::Reported(shown(why.as_bytes()))),
        }
    }
}

/// Writes the archive to the process until the process stops reading. Returns only errors of
/// reading the archive.
fn send_archive(
    input: Option<ChildStdin>,
    mut packed: impl Read,
    on_bytes: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let Some(mut input) = input else {
        return Ok(());
    };
    let (mut buffer, mut count) = (vec![0; CHUNK_BYTES], 0);
    loop {
        let n = match packed.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        // Ignore the error: if the process stops reading, it reports the reason itself.
        if input.write_all(&buffer[..n]).is_err() {
            return Ok(());
        }
        count += n as u64;
        on_bytes(count);
    }
}

/// Reads the output of the process: reports of unpacked bytes, the outcome, and the directories
/// that need a mark. The output is not trusted.
fn read_output(
    output: impl Read,
    limits: &UnpackLimits,
    meter: ByteMeter<'_>,
) -> Result<(Vec<u8>, Vec<u8>), LayerError> {
    let failed = |e: io::Error| LayerError::Process(e.to_string());
    let mut output = BufReader::new(output);
    // Number of bytes in the last report.
    let mut reported = 0;
    loop {
        let mut line = Vec::new();
        (&mut output)
            .take(MAX_OUTCOME_BYTES)
            .read_until(b'\n', &mut line)
            .map_err(failed)?;
        let Some(report) = line.strip_prefix(REPORT_MARK) else {
            let mut marks = Vec::new();
            // `limits.names` also bounds the names that the process itself remembers.
            let mut rest = output.take(limits.names);
            rest.read_to_end(&mut marks).map_err(failed)?;
            return Ok((line, marks));
        };
        let bytes = std::str::from_utf8(report).ok();
        let bytes: Option<u64> = bytes.and_then(|bytes| bytes.trim_end().parse().ok());
        // A minimum distance between reports bounds their number.
        let bytes = bytes.filter(|bytes| {
            *bytes <= limits.bytes && bytes.saturating_sub(reported) >= REPORT_BYTES
        });
        let Some(bytes) = bytes else {
            return Err(LayerError::Process("it wrote an invalid report".to_owned()));
        };
        reported = bytes;
        meter(bytes).map_err(|message| LayerError::Budget { message })?;
    }
}

/// Sets overlayfs's mark on directories in `into`. The process supplies their names, which are not
/// trusted.
fn set_opaque_marks(into: &Path, names: &[u8], limits: &UnpackLimits) -> Result<(), LayerError> {
    if names.is_empty() {
        return Ok(());
    }
    let failed = |path: &[u8], errno| LayerError::write("hide the lower layers of", path, errno);
    let place =
        ConfinedDir::open(into).map_err(|e| failed(into.as_os_str().as_encoded_bytes(), e))?;
    for name in names.split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let inside = LayerPath::of(name, limits).map_err(|p| LayerError::entry(name, p))?;
        // The descriptor is opened below `into` and follows no symbolic link, so that a hostile
        // name cannot mark a directory elsewhere on the host.
        place
            .open_directory(inside.bytes())
            .and_then(|fd| fsetxattr(fd, OVERLAY_OPAQUE, b"y", XattrFlags::empty()))
            .map_err(|errno| failed(name, errno))?;
    }
    place.sync().map_err(|e| failed(b"/", e))
}

/// Main function of the unpacker process: confines itself and unpacks.
pub fn unpacker() -> ExitCode {
    let mut marks = Vec::new();
    let outcome = match run_task(&mut marks) {
        Ok(unpacked) => UnpackOutcome::Done(unpacked),
        Err(LayerError::Truncated) => UnpackOutcome::Truncated,
        Err(LayerError::DiskFull { entry }) => UnpackOutcome::DiskFull { entry },
        Err(error) => UnpackOutcome::Failed(with_sources(&error)),
    };
    // The parent may still be writing the archive. Closing the pipe gives the parent an error. If
    // the pipe stayed open, the parent could block on the full pipe.
    // SAFETY: this process has stopped reading standard input.
    unsafe { libc::close(libc::STDIN_FILENO) };
    let mut line = serde_json::to_vec(&outcome).unwrap_or_default();
    line.push(b'\n');
    line.extend(marks.join(&0));
    match io::stdout()
        .write_all(&line)
        .and_then(|()| io::stdout().flush())
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Returns the message of an error with all its causes, as one line.
fn with_sources(error: &LayerError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Reads the task from the arguments, confines the process and unpacks.
fn run_task(marks: &mut Vec<Vec<u8>>) -> Result<UnpackedLayer, LayerError> {
    let task = std::env::args().nth(2).unwrap_or_default();
    let failed = |e: io::Error| LayerError::Process(format!("confining it: {e}"));
    let task: UnpackTask = serde_json::from_str(&task).map_err(|e| failed(e.into()))?;
    // An inherited descriptor could give access to files outside the directory.
    // SAFETY: no value in this process owns a descriptor above standard error yet.
    unsafe { close_descriptors(3) }.map_err(failed)?;
    let place = confine(&task.into, &task.limits).map_err(failed)?;
    let marks = OverlayMarks::Collect(marks);
    if !task.is_image {
        let on_unpacked = &mut |bytes: u64| {
            let mut output = io::stdout();
            output.write_all(REPORT_MARK).map_err(failed)?;
            output
                .write_all(format!("{bytes}\n").as_bytes())
                .map_err(failed)?;
            output.flush().map_err(failed)
        };
        let mut sinks = UnpackSinks {
            on_bytes: &mut |_| (),
            on_unpacked,
        };
        return unpack_with(io::stdin().lock(), &place, task.limits, &mut sinks, marks);
    }
    let image = io::stdin().as_fd().try_clone_to_owned();
    let image = File::from(image.map_err(LayerError::Read)?);
    unpack_image_with(&image, &place, task.limits, marks)?;
    Ok(UnpackedLayer::default())
}

/// Confines the process to the directory `into`. Returns the path of `into` in the new root.
fn confine(into: &Path, limits: &UnpackLimits) -> io::Result<PathBuf> {
    let filter = system_calls::unpacker()?;
    let memory = limits.names.saturating_add(MEMORY_BYTES);
    set_limit(Resource::RLIMIT_DATA, memory)?;
    set_limit(Resource::RLIMIT_FSIZE, limits.bytes)?;
    let mut place = into.to_owned();
    // Without a jail, only the limits and the system call filter apply.
    if jail::is_on() {
        let view = FsView::of(into)?;
        detach()?;
        view.enter()?;
        jail::drop_privileges(UNPACKER_CAPABILITIES)?;
        place = PathBuf::from("/");
    }
    // The filter is applied last, since it forbids the system calls above.
    filter.apply()?;
    Ok(place)
}

#[cfg(test)]
mod tests;

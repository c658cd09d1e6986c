//! Log of the daemon: structured lines on standard error. If standard error is a log file, the file
//! is rotated.

use crate::local_daemon::open_log;
use crate::traces::TraceExport;
use crate::{LogFormat, LogOptions};
use anyhow::Context;
use jiffy_engines::OLD_LOGS;
use parking_lot::{Mutex, MutexGuard};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Environment variable with the log filter, for example `jiffy_sandbox_manager=debug,info`.
const FILTER_VARIABLE: &str = "JIFFY_LOG";
/// Size in bytes at which a log file is rotated.
const MAX_LOG_BYTES: u64 = 8 << 20;

/// Starts logging, and forwards spans to `traces`. If `options.file` is set, standard error must
/// already refer to this file, which is then rotated.
pub fn init(options: &LogOptions, traces: Option<&TraceExport>) -> anyhow::Result<()> {
    let directives = std::env::var(FILTER_VARIABLE).unwrap_or_else(|_| "info".to_owned());
    let filter = EnvFilter::try_new(&directives).with_context(|| {
        format!("{FILTER_VARIABLE}={directives} is not a log filter: use for example `debug` or `jiffy_sandbox_manager=debug,info`")
    })?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(RotatingLog::new(options.file.as_deref(), MAX_LOG_BYTES))
        .with_ansi(false);
    let lines = match options.format {
        LogFormat::Json => lines.json().boxed(),
        LogFormat::Text => lines.boxed(),
    };
    let result = tracing_subscriber::registry()
        // The filter applies to the log only: traces have their own.
        .with(lines.with_filter(filter))
        .with(traces.map(TraceExport::layer))
        .try_init();
    result.map_err(|e| anyhow::anyhow!("cannot start logging: {e}"))
}

/// Writer to standard error that counts the bytes and rotates the log file.
struct RotatingLog(Mutex<LogState>);

/// Log file in use.
struct LogState {
    /// Log file to rotate. `None` without rotation.
    file: Option<PathBuf>,
    /// Size of the current file, in bytes.
    written: u64,
    /// Size at which the file is rotated, in bytes.
    max_bytes: u64,
}

impl RotatingLog {
    fn new(file: Option<&Path>, max_bytes: u64) -> Self {
        let written = file
            .and_then(|f| fs::metadata(f).ok())
            .map_or(0, |m| m.len());
        Self(Mutex::new(LogState {
            file: file.map(Path::to_owned),
            written,
            max_bytes,
        }))
    }
}

impl<'a> MakeWriter<'a> for RotatingLog {
    type Writer = LogWriter<'a>;

    fn make_writer(&'a self) -> LogWriter<'a> {
        LogWriter(self.0.lock())
    }
}

/// Exclusive access to the log while a line is written.
struct LogWriter<'a>(MutexGuard<'a, LogState>);

impl Write for LogWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = io::stderr().write(bytes)?;
        self.0.written += written as u64;
        if self.0.written > self.0.max_bytes
            && let Some(file) = self.0.file.clone()
        {
            // The counter is reset before the rotation, so that a failed rotation is not repeated
            // for every line.
            self.0.written = 0;
            let new = rotate(&file)?;
            // Standard error is replaced, so that other output, such as panics, is written to the
            // new file too.
            nix::unistd::dup2_stderr(&new)?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Renumbers the old logs, removes the oldest, and opens a new log.
fn rotate(file: &Path) -> io::Result<File> {
    let numbered = |n: usize| PathBuf::from(format!("{}.{n}", file.display()));
    for n in (1..OLD_LOGS).rev() {
        // The error is ignored, because an old log with this number may not exist yet.
        let _ = fs::rename(numbered(n), numbered(n + 1));
    }
    fs::rename(file, numbered(1))?;
    open_log(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_log_is_rotated_and_the_oldest_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("jiffy.log");
        for n in 0..6 {
            let mut log = open_log(&file).unwrap();
            write!(log, "{n}").unwrap();
            drop(rotate(&file).unwrap());
        }
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(read("jiffy.log"), "");
        assert_eq!(read("jiffy.log.1"), "5");
        assert_eq!(read("jiffy.log.3"), "3");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1 + OLD_LOGS);
    }
}

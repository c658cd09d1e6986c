//! The daemon's log: structured, on standard error, and bounded where that is a file of ours.

use crate::cli::LogFormat;
use anyhow::Context;
use jiffy_client::local_daemon::open_log;
use jiffy_host::OLD_LOGS;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Variable that chooses what is logged, as in `jiffy_host=debug,info`.
const FILTER: &str = "JIFFY_LOG";
/// A file that is longer gives way to a new one.
const LONGEST: u64 = 8 << 20;

/// Begins to log. With `file`, standard error is that file already, and it is kept short.
pub fn begin(format: LogFormat, file: Option<&Path>) -> anyhow::Result<()> {
    let chosen = std::env::var(FILTER).unwrap_or_else(|_| "info".to_owned());
    let filter = EnvFilter::try_new(&chosen).with_context(|| {
        format!("{FILTER}={chosen} is no filter: write it as `debug` or `jiffy_host=debug,info`")
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Log::new(file, LONGEST))
        .with_ansi(false);
    let begun = match format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => builder.try_init(),
    };
    begun.map_err(|e| anyhow::anyhow!("cannot begin the log: {e}"))
}

/// Standard error, and how much went there.
struct Log(Mutex<Inner>);

struct Inner {
    file: Option<PathBuf>,
    written: u64,
    longest: u64,
}

impl Log {
    fn new(file: Option<&Path>, longest: u64) -> Self {
        let written = file
            .and_then(|f| fs::metadata(f).ok())
            .map_or(0, |m| m.len());
        Self(Mutex::new(Inner {
            file: file.map(Path::to_owned),
            written,
            longest,
        }))
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Turn<'a>;

    fn make_writer(&'a self) -> Turn<'a> {
        Turn(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The turn to write one line.
struct Turn<'a>(MutexGuard<'a, Inner>);

impl Write for Turn<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = io::stderr().write(bytes)?;
        self.0.written += written as u64;
        if self.0.written > self.0.longest
            && let Some(file) = self.0.file.clone()
        {
            // Counted anew also where that fails, or every line would try again.
            self.0.written = 0;
            let new = rotate(&file)?;
            // Whatever else this process says goes there too, be it a panic.
            nix::unistd::dup2_stderr(&new)?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Gives the logs there are the next number, forgets the last, and opens a new one.
fn rotate(file: &Path) -> io::Result<File> {
    let numbered = |n: usize| PathBuf::from(format!("{}.{n}", file.display()));
    for n in (1..OLD_LOGS).rev() {
        // The first days of a log have no old ones.
        let _ = fs::rename(numbered(n), numbered(n + 1));
    }
    fs::rename(file, numbered(1))?;
    open_log(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_long_gives_way_and_the_oldest_is_forgotten() {
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

//! Processes that serve the files of volumes.
//!
//! A process serves one volume to the guests that have mounted it. It outlives the daemon, like the
//! guests.

use crate::{FileError, Volume, VolumeFiles};
use jiffy_volume_server::SessionRights;
use jiffy_volume_server::process::{self, ServerSettings, ServerWatch};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Log of all servers, in the runtime directory.
const LOG: &str = "volumes.log";
/// Size in bytes above which the log is removed at the next start of a server.
const MAX_LOG_BYTES: u64 = 4 << 20;

/// Program that serves a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerProgram {
    /// A confined process of this program, which must call [`process::main`] if its first argument
    /// is [`process::VOLUME_SERVER_ARGUMENT`].
    Own,
    /// A thread without confinement, for tests.
    Thread,
}

/// Servers of the volumes of a host. A server starts with the first session, outlives this process,
/// and exits some time after the last session.
#[derive(Debug)]
pub struct VolumeServers {
    /// Directory of the volumes.
    volumes: PathBuf,
    /// Directory of the sockets.
    run: PathBuf,
    program: ServerProgram,
    /// Lock of each volume, by volume id. Held while the server of the volume is started.
    starts: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

impl VolumeServers {
    /// Manages the servers of the data directory `home`, whose runtime directory is `run`.
    pub fn new(home: &Path, run: &Path, program: ServerProgram) -> io::Result<Self> {
        let (volumes, run) = (home.join("volumes"), run.join("volumes"));
        for directory in [&volumes, &run] {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o700).create(directory)?;
        }
        Ok(Self {
            volumes,
            run,
            program,
            starts: Mutex::default(),
        })
    }

    fn socket(&self, volume: &Volume) -> PathBuf {
        self.run.join(&volume.id)
    }

    /// Starts a session on `stream`, whose other end is the client. Starts the server if necessary.
    /// Ends an earlier session of the same `mount`.
    pub fn open_session(
        &self,
        volume: &Volume,
        stream: BorrowedFd<'_>,
        rights: SessionRights,
        mount: Option<u64>,
    ) -> io::Result<()> {
        self.with_server(volume, |socket| {
            process::open_session(socket, stream, rights, mount)
        })
    }

    /// Returns a connection that ends when the server exits. Starts the server if necessary.
    pub fn watch(&self, volume: &Volume) -> io::Result<ServerWatch> {
        self.with_server(volume, process::watch)
    }

    /// Calls a server. Starts the server if it does not run.
    fn with_server<T>(
        &self,
        volume: &Volume,
        call: impl Fn(&Path) -> io::Result<T>,
    ) -> io::Result<T> {
        let socket = self.socket(volume);
        match call(&socket) {
            Err(e) if has_exited(&e) => {}
            other => return other,
        }
        let start = self
            .starts
            .lock()
            .entry(volume.id.clone())
            .or_default()
            .clone();
        let _start = start.lock();
        // Another thread may have started the server.
        match call(&socket) {
            Err(e) if has_exited(&e) => {}
            other => return other,
        }
        self.start(volume, &socket)?;
        call(&socket)
    }

    /// Starts the server of a volume, as a process or a thread.
    fn start(&self, volume: &Volume, socket: &Path) -> io::Result<()> {
        let settings = ServerSettings {
            directory: self.volumes.join(&volume.id),
            bytes: volume.bytes,
            nodes: volume.files,
        };
        if self.program == ServerProgram::Thread {
            // A socket of an earlier daemon may exist. Other errors make `bind` fail.
            let _ = fs::remove_file(socket);
            return process::serve_on_thread(&settings, UnixListener::bind(socket)?);
        }
        let log = self.run.join(LOG);
        if fs::metadata(&log).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
            fs::remove_file(&log)?;
        }
        let mut options = File::options();
        let log = options.append(true).create(true).mode(0o600).open(&log)?;
        let mut child = process::spawn(&settings, socket, log)?;
        // Waits for the process, so that no zombie remains.
        let thread = std::thread::Builder::new().name("volume-exit".to_owned());
        let id = volume.id.clone();
        thread.spawn(move || match child.wait() {
            Ok(status) if status.success() => {}
            Ok(status) => tracing::warn!(volume = id, %status, "the server of a volume failed"),
            Err(e) => tracing::warn!(volume = id, error = %e, "cannot wait for a volume's server"),
        })?;
        Ok(())
    }

    /// Returns access to the files of a volume.
    pub fn files(&self, volume: &Volume) -> Result<VolumeFiles, FileError> {
        let (ours, theirs) = UnixStream::pair()?;
        let rights = SessionRights {
            is_read_only: false,
            is_daemon: true,
        };
        self.open_session(volume, theirs.as_fd(), rights, None)?;
        Ok(VolumeFiles::new(ours)?)
    }

    /// Creates the directory of a new volume. Returns its path.
    pub fn create(&self, volume: &Volume) -> io::Result<PathBuf> {
        let directory = self.volumes.join(&volume.id);
        fs::DirBuilder::new().mode(0o700).create(&directory)?;
        Ok(directory)
    }

    /// Writes an image of a volume to the empty file `image`. Starts the server if necessary.
    /// Returns the charged bytes of its files: their lengths, each rounded up to 4 KiB.
    pub fn write_image(&self, volume: &Volume, image: &File) -> io::Result<u64> {
        self.with_server(volume, |socket| process::write_image(socket, image))
    }

    /// Stops the server of a removed volume, and removes its files.
    pub fn remove(&self, volume: &Volume) -> io::Result<()> {
        let socket = self.socket(volume);
        process::stop(&socket);
        self.starts.lock().remove(&volume.id);
        match fs::remove_file(&socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        jiffy_volume_server::remove(&self.volumes.join(&volume.id))
    }

    /// Removes the files of volumes that no longer exist, for example after a crash during a
    /// removal.
    pub fn sweep(&self, exists: impl Fn(&str) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.volumes)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_str().is_some_and(|id| !exists(id)) {
                if entry.file_type()?.is_file() {
                    // The image of a snapshot, left by a daemon that was killed.
                    fs::remove_file(entry.path())?;
                    continue;
                }
                process::stop(&self.run.join(&name));
                jiffy_volume_server::remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// Returns whether an error of a call means that no server accepts calls. A second server must not
/// start while the first one is only slow or has too many sessions.
fn has_exited(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}

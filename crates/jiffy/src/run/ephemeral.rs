//! Guests of this process, which are independent of a daemon, for `jiffy run` without a daemon and
//! `jiffy doctor`. The guests and their network are removed when the process exits, even if it is
//! killed.
//!
//! A *slot* is a network namespace with its devices and rules. Slots are prepared in advance, and
//! each is assigned to one guest. The *identity* of a guest consists of id, host name, entropy and
//! clock. The *site* is the network in which the guests run. Its settings are certificate
//! authorities and a proxy.

use crate::cli::FeatureSwitch;
use anyhow::Context;
use jiffy_daemon::nic_kind;
use jiffy_engine_api::{
    AfterSnapshot, Engine, EngineError, EngineName, Guest, SandboxIdentity, SandboxSize,
    SnapshotRequest, new_id,
};
use jiffy_engines::{Host, PreparedTemplate, open_ephemeral_engine};
use jiffy_image::Home;
use jiffy_network::{Network, NetworkConfig};
use jiffy_proto::agent::SiteSettings;
use nix::fcntl::{Flock, FlockArg};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

/// First argument of the process that removes the network of another process.
pub const REMOVER_ARGUMENT: &str = "--as-network-remover";

/// Prefix of the directories of processes with guests.
const DIRECTORY_PREFIX: &str = ".tmp-run-";

/// Guests of one template and their snapshots, in a temporary directory.
pub struct EphemeralGuests {
    engine: Arc<dyn Engine>,
    template: String,
    network: Option<EphemeralNetwork>,
    directory: EphemeralDirectory,
    /// Certificate authorities and proxy of the guests.
    pub site: SiteSettings,
}

/// Network of this process. A helper process removes it after this process exits for any reason.
struct EphemeralNetwork {
    /// `None` if the host cannot provide a network. The helper also removes the remains of a failed
    /// start.
    network: Option<Network>,
    /// When this value is dropped, the helper also removes the directory of this process. The
    /// guests must have terminated before. `Err` if the helper could not be started.
    remover: io::Result<NetworkRemover>,
}

/// Helper process that removes the network. It waits until its standard input is closed, which
/// happens when this value is dropped or this process exits.
struct NetworkRemover {
    _stdin: Option<ChildStdin>,
}

impl NetworkRemover {
    /// Starts the helper, which removes `directory` and the networks of missing directories.
    fn start(directory: &Path) -> io::Result<Self> {
        // The running program, even if its file was replaced by an update.
        let mut child = Command::new("/proc/self/exe")
            .arg0("jiffy")
            .arg(REMOVER_ARGUMENT)
            .env_clear()
            // The helper runs `ip` and `nft`.
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // The helper must not receive signals of the terminal, such as Ctrl-C.
            .process_group(0)
            .spawn()?;
        let mut stdin = child.stdin.take();
        if let Some(stdin) = &mut stdin {
            // The directory is not an argument, because processes with guests are identified by the
            // directory in their command lines, for example by the tests.
            stdin.write_all(directory.as_os_str().as_bytes())?;
        }
        Ok(Self { _stdin: stdin })
    }
}

/// Main function of the helper process. Reads the path of the directory from standard input until
/// the parent closes the pipe. Then removes the directory and its network.
pub fn remover() -> ExitCode {
    // The parent holds the only write end of the pipe, so this returns when the parent closes the
    // pipe or exits.
    let mut name = Vec::new();
    let _ = io::stdin().read_to_end(&mut name);
    let directory = PathBuf::from(OsString::from_vec(name));
    // The path comes from another process: remove only a directory of this kind.
    let file_name = directory.file_name().map(OsStr::to_string_lossy);
    if file_name.is_some_and(|name| name.starts_with(DIRECTORY_PREFIX)) {
        // The directory is absent if the parent removed it.
        let _ = fs::remove_dir_all(&directory);
    }
    match Network::remove_dead() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

impl EphemeralNetwork {
    /// Closes the network. The helper process removes slots and rules in the background, because
    /// this takes longer than many commands. Without a helper, this function removes them.
    async fn close(self) {
        if let (Err(_), Some(network)) = (&self.remover, self.network) {
            // `close` blocks while it runs programs.
            let _ = tokio::task::spawn_blocking(move || network.close()).await;
        }
    }
}

/// Directory of this process. Networks are claimed by directories: the next process that opens a
/// network removes the networks of missing directories.
struct EphemeralDirectory {
    directory: TempDir,
    /// Lock that marks the directory as used.
    _lock: Flock<File>,
}

impl EphemeralDirectory {
    /// Creates the directory of this process, and removes the directories of killed processes.
    fn create(home: &Home) -> anyhow::Result<Self> {
        let run = home.run();
        let _lock = lock_run_directory(&run)?;
        remove_dead(&run);
        let directory = tempfile::Builder::new()
            .prefix(DIRECTORY_PREFIX)
            .tempdir_in(&run);
        let directory =
            directory.with_context(|| format!("cannot create a directory in {}", run.display()))?;
        // The kernel releases the lock when this process exits for any reason.
        let lock = Flock::lock(File::open(directory.path())?, FlockArg::LockExclusive)
            .map_err(|(_, e)| e)?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }
}

/// Locks the parent of the directories. The lock is held while a directory is created and locked,
/// and while unused directories are removed.
fn lock_run_directory(run: &Path) -> anyhow::Result<Flock<File>> {
    let context = || format!("cannot lock {}", run.display());
    let file = File::open(run).with_context(context)?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| e)
        .with_context(context)
}

/// Removes the directories of processes that were killed. Their networks are removed when the next
/// network is opened.
pub fn remove_dead_directories(home: &Home) {
    let run = home.run();
    if let Ok(_lock) = lock_run_directory(&run) {
        remove_dead(&run);
    }
}

/// Removes the directories that no process has locked. The caller must hold the lock of `run`.
fn remove_dead(run: &Path) {
    for entry in fs::read_dir(run).into_iter().flatten().flatten() {
        let has_prefix = entry
            .file_name()
            .to_string_lossy()
            .starts_with(DIRECTORY_PREFIX);
        let is_directory = entry.file_type().is_ok_and(|t| t.is_dir());
        if !has_prefix || !is_directory {
            continue;
        }
        let Ok(directory) = File::open(entry.path()) else {
            continue;
        };
        // A process holds the lock of its directory as long as it runs.
        if Flock::lock(directory, FlockArg::LockExclusiveNonblock).is_ok() {
            // The next process retries a failed removal.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl EphemeralGuests {
    /// Prepares guests of `template`, which was opened on `host`.
    pub async fn open(
        host: &Host,
        engine: EngineName,
        template: &str,
        prepared: PreparedTemplate,
        network: FeatureSwitch,
    ) -> anyhow::Result<Self> {
        let directory = EphemeralDirectory::create(host.home())?;
        let path = directory.directory.path();
        let network = open_network(path, engine, network).await?;
        let guest_network = network.as_ref().and_then(|own| own.network.clone());
        let result = open_ephemeral_engine(
            host.clone(),
            guest_network,
            engine,
            path,
            template,
            prepared,
        )
        .await;
        match result {
            Ok(engine) => Ok(Self {
                engine,
                template: template.to_owned(),
                network,
                directory,
                site: SiteSettings::default(),
            }),
            Err(e) => {
                if let Some(network) = network {
                    network.close().await;
                }
                Err(e.into())
            }
        }
    }

    /// Boots a guest. Returns after its agent has answered.
    pub async fn boot(&self, size: SandboxSize) -> Result<Arc<dyn Guest>, EngineError> {
        let unassigned = self.engine.boot(&self.template, size).await?;
        unassigned.assign_identity(&self.new_identity()?).await
    }

    /// Saves a guest as snapshot `id` and stops the guest.
    pub async fn save(&self, guest: &dyn Guest, id: &str) -> Result<(), EngineError> {
        let snapshot = guest.take_snapshot(SnapshotRequest::new(id, AfterSnapshot::Stop));
        snapshot.await.map(drop)
    }

    /// Restores a guest from a snapshot. Returns after its agent has received a new identity.
    pub async fn restore(&self, id: &str) -> Result<Arc<dyn Guest>, EngineError> {
        let unassigned = self.engine.restore(id, None).await?;
        unassigned.assign_identity(&self.new_identity()?).await
    }

    /// Returns the identity of a guest: a new id, without a name, with the settings of the site.
    fn new_identity(&self) -> Result<SandboxIdentity, EngineError> {
        Ok(SandboxIdentity {
            id: new_id().map_err(EngineError::failed)?,
            template: Some(self.template.clone()),
            site: self.site.clone(),
            ..SandboxIdentity::default()
        })
    }

    /// Stops all guests. Returns after all resources are released.
    pub async fn close(self) {
        self.engine.close().await;
        // Processes that use the network exit with the engine.
        drop(self.engine);
        if let Some(network) = self.network {
            network.close().await;
        }
        // The error is ignored: the helper process of the network or of gVisor may have removed the
        // directory already.
        let _ = self.directory.directory.close();
    }
}

/// Opens the network of the guests. `home` is the directory of this process, which claims the
/// network. If the host cannot provide a network and `mode` does not require it, prints a warning.
async fn open_network(
    home: &Path,
    engine: EngineName,
    mode: FeatureSwitch,
) -> anyhow::Result<Option<EphemeralNetwork>> {
    if mode == FeatureSwitch::Off {
        return Ok(None);
    }
    let config = NetworkConfig {
        slots: 1,
        // No slot is created in advance: `Network::open` itself creates the only slot.
        ready: 0,
        nic: nic_kind(engine),
        ..NetworkConfig::new(home)
    };
    let network = tokio::task::spawn_blocking(move || Network::open(&config));
    // Concurrently with the start of the network, which takes longer.
    let remover = NetworkRemover::start(home);
    match (network.await?, mode) {
        (Ok(network), _) => Ok(Some(EphemeralNetwork {
            network: Some(network),
            remover,
        })),
        (Err(e), FeatureSwitch::On) => Err(e).context("cannot create a network for the guest"),
        (Err(e), _) => {
            errln!(
                "jiffy: the guest has no network: {e} (use `--network off` to suppress this warning)"
            );
            Ok(Some(EphemeralNetwork {
                network: None,
                remover,
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_killed_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path()).unwrap();
        let used = EphemeralDirectory::create(&home).unwrap();
        let dead = home.run().join(format!("{DIRECTORY_PREFIX}dead"));
        let other = home.run().join(".tmpOther");
        fs::create_dir(&dead).unwrap();
        fs::create_dir(&other).unwrap();
        let another = EphemeralDirectory::create(&home).unwrap();
        assert!(!dead.exists() && other.exists());
        fs::create_dir(&dead).unwrap();
        remove_dead_directories(&home);
        assert!(!dead.exists());
        assert!(used.directory.path().exists() && another.directory.path().exists());
    }
}

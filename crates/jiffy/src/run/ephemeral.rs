//! Guests of this process, beside a daemon's: they end with it, and so does their network.

use crate::cli::FeatureSwitch;
use anyhow::Context;
use jiffy_daemon::nic_kind;
use jiffy_engine_api::{
    AfterSnapshot, Engine, EngineError, EngineName, Guest, SandboxIdentity, SandboxSize, new_id,
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

/// First argument of the process that removes a network.
pub const REMOVER_ARGUMENT: &str = "--as-network-remover";

/// Prefix of the directories of such processes.
const DIRECTORY_PREFIX: &str = ".tmp-run-";

/// Guests of one template, and their snapshots, in a directory of their own.
pub struct EphemeralGuests {
    engine: Arc<dyn Engine>,
    template: String,
    network: Option<EphemeralNetwork>,
    directory: EphemeralDirectory,
    /// Certificate authorities and proxy of their network.
    pub site: SiteSettings,
}

/// A network of this process. When the process ends, however it does, another one removes it.
struct EphemeralNetwork {
    /// `None` if the host cannot provide a network. What its failed start left is removed as well.
    network: Option<Network>,
    /// Also removes the directory of this process, and therefore lives as long as the guests.
    remover: io::Result<NetworkRemover>,
}

/// The process that removes the network, which waits for the end of this.
struct NetworkRemover {
    _until_closed: Option<ChildStdin>,
}

impl NetworkRemover {
    fn start(directory: &Path) -> io::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg0("jiffy")
            .arg(REMOVER_ARGUMENT)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Signals of our terminal are not for it.
            .process_group(0)
            .spawn()?;
        let mut until_closed = child.stdin.take();
        if let Some(stdin) = &mut until_closed {
            // Not in its command line, where it would look like one of ours.
            stdin.write_all(directory.as_os_str().as_bytes())?;
        }
        Ok(Self {
            _until_closed: until_closed,
        })
    }
}

/// The process that removes the network of the directory that its standard input names, once that
/// ends.
pub fn remover() -> ExitCode {
    let mut name = Vec::new();
    let _ = io::stdin().read_to_end(&mut name);
    let directory = PathBuf::from(OsString::from_vec(name));
    let ours = directory.file_name().map(OsStr::to_string_lossy);
    if ours.is_some_and(|name| name.starts_with(DIRECTORY_PREFIX)) {
        let _ = fs::remove_dir_all(&directory);
    }
    match Network::remove_dead() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

impl EphemeralNetwork {
    /// Lets go of it. Slots and rules go behind our back, as that takes longer than many commands.
    async fn close(self) {
        if let (Err(_), Some(network)) = (&self.remover, self.network) {
            // It waits for a thread that runs programs.
            let _ = tokio::task::spawn_blocking(move || network.close()).await;
        }
    }
}

/// A directory of this process. Networks are claimed by directories; that of one which is gone is
/// removed by the next process that opens one.
struct EphemeralDirectory {
    directory: TempDir,
    /// Says that the directory is in use.
    _lock: Flock<File>,
}

impl EphemeralDirectory {
    /// Makes one, and removes those of processes that were killed.
    fn make(home: &Home) -> anyhow::Result<Self> {
        let run = home.run();
        let _lock = lock_run_directory(&run)?;
        remove_dead(&run);
        let directory = tempfile::Builder::new()
            .prefix(DIRECTORY_PREFIX)
            .tempdir_in(&run);
        let directory =
            directory.with_context(|| format!("cannot make a directory in {}", run.display()))?;
        let lock = Flock::lock(File::open(directory.path())?, FlockArg::LockExclusive)
            .map_err(|(_, e)| e)?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }
}

/// Held while a directory is made and locked, or looked for.
fn lock_run_directory(run: &Path) -> anyhow::Result<Flock<File>> {
    let failed = || format!("cannot lock {}", run.display());
    let file = File::open(run).with_context(failed)?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| e)
        .with_context(failed)
}

/// Removes the directories of processes that were killed; their networks go when the next one is
/// opened.
pub fn remove_dead_directories(home: &Home) {
    let run = home.run();
    if let Ok(_lock) = lock_run_directory(&run) {
        remove_dead(&run);
    }
}

fn remove_dead(run: &Path) {
    for entry in fs::read_dir(run).into_iter().flatten().flatten() {
        let ours = entry
            .file_name()
            .to_string_lossy()
            .starts_with(DIRECTORY_PREFIX);
        let is_directory = entry.file_type().is_ok_and(|t| t.is_dir());
        if !ours || !is_directory {
            continue;
        }
        let Ok(directory) = File::open(entry.path()) else {
            continue;
        };
        if Flock::lock(directory, FlockArg::LockExclusiveNonblock).is_ok() {
            // One that stays is tried again by the next.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl EphemeralGuests {
    /// For guests of `template`, which was opened on `host`.
    pub async fn open(
        host: &Host,
        engine: EngineName,
        template: &str,
        prepared: PreparedTemplate,
        network: FeatureSwitch,
    ) -> anyhow::Result<Self> {
        let directory = EphemeralDirectory::make(host.home())?;
        let path = directory.directory.path();
        let network = open_network(path, engine, network).await?;
        let lent = network.as_ref().and_then(|own| own.network.clone());
        let opened =
            open_ephemeral_engine(host.clone(), lent, engine, path, template, prepared).await;
        match opened {
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

    /// Boots a guest and returns when its agent has answered.
    pub async fn boot(&self, size: SandboxSize) -> Result<Arc<dyn Guest>, EngineError> {
        let unassigned = self.engine.boot(&self.template, size).await?;
        unassigned.assign_identity(&self.anonymous()?).await
    }

    /// Ends a guest and makes it snapshot `id`.
    pub async fn save(&self, guest: &dyn Guest, id: &str) -> Result<(), EngineError> {
        let saved = guest.take_snapshot(id, None, AfterSnapshot::Stop, None, None);
        saved.await.map(drop)
    }

    /// Makes a guest of a snapshot and returns when its agent has taken a new identity.
    pub async fn restore(&self, id: &str) -> Result<Arc<dyn Guest>, EngineError> {
        let unassigned = self.engine.restore(id, None).await?;
        unassigned.assign_identity(&self.anonymous()?).await
    }

    fn anonymous(&self) -> Result<SandboxIdentity, EngineError> {
        Ok(SandboxIdentity {
            id: new_id().map_err(EngineError::failed)?,
            template: Some(self.template.clone()),
            site: self.site.clone(),
            ..SandboxIdentity::default()
        })
    }

    /// Ends what there is, and returns when nothing is left.
    pub async fn close(self) {
        self.engine.close().await;
        // Processes that hold the network end with the engine.
        drop(self.engine);
        if let Some(network) = self.network {
            network.close().await;
        }
        // The helper of gVisor removed it, unless it was killed.
        let _ = self.directory.directory.close();
    }
}

/// The network of the guests of this process, as it was asked for; where there can be none and it
/// was not insisted on, a note says so.
async fn open_network(
    home: &Path,
    engine: EngineName,
    wanted: FeatureSwitch,
) -> anyhow::Result<Option<EphemeralNetwork>> {
    if wanted == FeatureSwitch::Off {
        return Ok(None);
    }
    let config = NetworkConfig {
        slots: 1,
        // The first is made when it is opened, and there is no other.
        ready: 0,
        nic: nic_kind(engine),
        ..NetworkConfig::new(home)
    };
    let opening = tokio::task::spawn_blocking(move || Network::open(&config));
    let remover = NetworkRemover::start(home);
    match (opening.await?, wanted) {
        (Ok(network), _) => Ok(Some(EphemeralNetwork {
            network: Some(network),
            remover,
        })),
        (Err(e), FeatureSwitch::On) => {
            Err(e).context("the guest cannot have a network on this host")
        }
        (Err(e), _) => {
            errln!("jiffy: the guest has no network: {e} (`--network off` leaves this out)");
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
    fn directories_of_killed_processes_are_removed_and_used_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path()).unwrap();
        let used = EphemeralDirectory::make(&home).unwrap();
        let dead = home.run().join(format!("{DIRECTORY_PREFIX}dead"));
        let other = home.run().join(".tmpOther");
        fs::create_dir(&dead).unwrap();
        fs::create_dir(&other).unwrap();
        let another = EphemeralDirectory::make(&home).unwrap();
        assert!(!dead.exists() && other.exists());
        fs::create_dir(&dead).unwrap();
        remove_dead_directories(&home);
        assert!(!dead.exists());
        assert!(used.directory.path().exists() && another.directory.path().exists());
    }
}

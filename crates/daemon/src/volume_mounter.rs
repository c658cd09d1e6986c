//! Mounts volumes in guests: connects the server of a volume with the agent of a guest.
//!
//! The *server* of a volume is a process that answers the file requests of guests. The number of a
//! server distinguishes the processes that serve the same volume one after the other.

use async_trait::async_trait;
use jiffy_proto::agent::{VOLUME_ATTACHED, VOLUME_OK, VOLUME_PORT, VolumeAttachment};
use jiffy_sandbox_manager::{MountError, MountedVolume, VolumeMount, VolumeMounter};
use jiffy_volumes::{HostVolumes, ServerWatch, SessionRights, Volume, VolumeError};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Timeout of a mount.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum length of the agent's answer in bytes.
const MAX_ANSWER: usize = 1024;
/// Number of ended servers that may wait for the receiver.
const MAX_LOST: usize = 64;

/// Mounts volumes of this host.
#[derive(Debug)]
pub struct HostVolumeMounter {
    volumes: Arc<HostVolumes>,
    /// Numbers of the servers whose exit is awaited, by volume.
    watched: Arc<Mutex<HashMap<String, u64>>>,
    /// Sender for the volumes whose servers have exited.
    lost: mpsc::Sender<String>,
    lost_receiver: Mutex<Option<mpsc::Receiver<String>>>,
}

#[async_trait]
impl VolumeMounter for HostVolumeMounter {
    async fn mount(&self, mount: VolumeMount<'_>) -> Result<(), MountError> {
        for mounted in mount.volumes {
            let done = timeout(MOUNT_TIMEOUT, self.mount_one(&mount, mounted)).await;
            let done = done.unwrap_or_else(|_| Err(failed("the guest does not respond")));
            done.map_err(|e| e.of(&mounted.name))?;
        }
        Ok(())
    }

    fn take_lost(&self) -> Option<mpsc::Receiver<String>> {
        self.lost_receiver.lock().take()
    }
}

impl HostVolumeMounter {
    /// Creates a mounter for the volumes in `volumes`.
    pub fn new(volumes: Arc<HostVolumes>) -> Self {
        let (lost, receiver) = mpsc::channel(MAX_LOST);
        Self {
            volumes,
            watched: Arc::default(),
            lost,
            lost_receiver: Mutex::new(Some(receiver)),
        }
    }

    /// Mounts one volume in a guest: finds the volume of the owner, starts its server if necessary,
    /// connects to the agent, and passes the connection to the server.
    async fn mount_one(
        &self,
        mount: &VolumeMount<'_>,
        mounted: &MountedVolume,
    ) -> Result<(), MountError> {
        let id = mounted.volume.clone();
        let owner = mount.owner.unwrap_or_default().to_owned();
        let find = move |host: &HostVolumes| {
            // The owner is checked at every mount.
            let found = host.volumes().get(&owner, &id);
            let volume = found.map_err(|e| match e {
                VolumeError::Unknown(id) => MountError::Unknown(id),
                e => failed(e),
            })?;
            let watch = host.servers().watch(&volume).map_err(server_failed)?;
            Ok((volume, watch))
        };
        let (volume, watch) = self.blocking(find).await?;
        let server = watch.server;
        self.follow(&volume, watch).map_err(server_failed)?;
        let connected = mount.guest.connect(VOLUME_PORT).await;
        let mut stream = connected.map_err(failed)?;
        let request = VolumeAttachment {
            volume: volume.id.clone(),
            path: mounted.path.clone(),
            read_only: mounted.read_only,
            server,
            only_if_lost: mount.only_if_lost,
        };
        match attach(&mut stream, &request).await?.as_str() {
            VOLUME_OK => {}
            // With `only_if_lost`: the mount still has a stream, or the guest has removed it.
            VOLUME_ATTACHED => return Ok(()),
            "" => return Err(failed("the agent of this sandbox is of an earlier version")),
            other => {
                let reason = other.trim().trim_start_matches("ERR ");
                return Err(MountError::Path(reason.to_owned()));
            }
        }
        let stream = stream.into_std().map_err(failed)?;
        let rights = SessionRights {
            is_read_only: mounted.read_only,
            is_daemon: false,
        };
        let key = mount_key(mount.sandbox, &mounted.path);
        let open = move |host: &HostVolumes| {
            let servers = host.servers();
            let opened = servers.open_session(&volume, stream.as_fd(), rights, Some(key));
            opened.map_err(server_failed)
        };
        self.blocking(open).await
    }

    /// Runs blocking work on a separate thread.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&HostVolumes) -> Result<T, MountError> + Send + 'static,
    ) -> Result<T, MountError> {
        let host = self.volumes.clone();
        let done = tokio::task::spawn_blocking(move || work(&host)).await;
        done.map_err(failed)?
    }

    /// Reports the exit of a server, once.
    fn follow(&self, volume: &Volume, watch: ServerWatch) -> std::io::Result<()> {
        watch.connection.set_nonblocking(true)?;
        let mut connection = UnixStream::from_std(watch.connection)?;
        let previous = self.watched.lock().insert(volume.id.clone(), watch.server);
        if previous == Some(watch.server) {
            return Ok(());
        }
        let (watched, lost) = (self.watched.clone(), self.lost.clone());
        let id = volume.id.clone();
        tokio::spawn(async move {
            // The server sends nothing: the read ends with the process.
            let _ = connection.read_u8().await;
            {
                let mut watched = watched.lock();
                // A later server may be watched.
                if watched.get(&id) == Some(&watch.server) {
                    watched.remove(&id);
                }
            }
            // Ignore the error: without a receiver, the daemon stops.
            let _ = lost.send(id).await;
        });
        Ok(())
    }
}

fn failed(reason: impl ToString) -> MountError {
    MountError::Failed(reason.to_string())
}

fn server_failed(error: std::io::Error) -> MountError {
    failed(format!(
        "the server of the volume failed: {error}; see `volumes.log` in the runtime directory"
    ))
}

/// Returns the number of a mount, by which its server finds the previous session.
fn mount_key(sandbox: &str, path: &str) -> u64 {
    let hash = blake3::hash(format!("{sandbox}\0{path}").as_bytes());
    let start = hash.as_bytes().first_chunk().copied();
    // The number 0 is reserved for sessions of clients that are no mounts, such as the daemon.
    u64::from_le_bytes(start.unwrap_or_default()).max(1)
}

/// Sends a request to the agent. Returns its answer, a line, which is empty if the agent closes the
/// stream. Reads byte by byte, because requests of the guest's kernel follow.
async fn attach(stream: &mut UnixStream, request: &VolumeAttachment) -> Result<String, MountError> {
    let mut line = serde_json::to_vec(request).map_err(failed)?;
    line.push(b'\n');
    stream.write_all(&line).await.map_err(failed)?;
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') && answer.len() < MAX_ANSWER {
        match stream.read_u8().await {
            Ok(byte) => answer.push(byte),
            Err(_) => return Ok(String::new()),
        }
    }
    // The guest determines the text.
    let text: String = String::from_utf8_lossy(&answer).into_owned();
    Ok(text.replace(|c: char| c.is_control() && c != '\n', " "))
}

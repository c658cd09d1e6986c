//! Mounts of volumes: the host opens a stream (`jiffy_proto::agent::VOLUME_PORT`), names a volume
//! and a directory, and then answers the requests of this guest's kernel on the stream.
//!
//! The *pump* of a mount passes messages between the kernel (`/dev/fuse`) and the stream.

mod fuse_device;
mod lock_record;
mod message;
mod pump;

use jiffy_proto::agent::{MAX_VOLUME_REQUEST, VOLUME_ATTACHED, VOLUME_OK, VolumeAttachment};
use pump::Pump;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Timeout of the host's request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of the stack of a thread. Messages are on the heap.
const STACK_BYTES: usize = 128 << 10;

/// Mounted volumes by directory.
#[derive(Clone, Default)]
pub struct VolumeMounts(Arc<Mutex<HashMap<String, Mounted>>>);

/// Mounted volume.
#[derive(Clone)]
struct Mounted {
    volume: String,
    pump: Arc<Pump>,
}

impl VolumeMounts {
    /// Serves a stream of the host on a thread of its own.
    pub fn serve(&self, stream: tokio::net::UnixStream) {
        let this = self.clone();
        let serve = move || {
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            this.attach(stream)
        };
        let thread = std::thread::Builder::new().name("volume".to_owned());
        // Ignore the result: without a thread, the stream is closed, which the host reports.
        let _ = thread.stack_size(STACK_BYTES).spawn(move || {
            let _ = serve();
        });
    }

    /// Mounts a volume, or gives its mount a new stream, and passes replies on until the stream
    /// ends.
    fn attach(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        let request: VolumeAttachment = serde_json::from_slice(&read_line(&mut stream)?)?;
        stream.set_read_timeout(None)?;
        let pump = match self.mounted(&request) {
            Ok(Some(pump)) => pump,
            Ok(None) => return stream.write_all(VOLUME_ATTACHED.as_bytes()),
            Err(e) => {
                let line = format!("ERR cannot mount the volume on {}: {e}\n", request.path);
                return stream.write_all(line.as_bytes());
            }
        };
        stream.write_all(VOLUME_OK.as_bytes())?;
        pump.pass_replies(stream, request.server)
    }

    /// Returns the mount of a request. Creates the mount unless it exists. For a request that only
    /// restores lost streams (`only_if_lost`), returns `None` if the mount has a stream, or does
    /// not exist.
    fn mounted(&self, request: &VolumeAttachment) -> io::Result<Option<Arc<Pump>>> {
        let mut mounts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mounted) = mounts.get(&request.path)
            && mounted.pump.is_mounted()
        {
            if mounted.volume == request.volume {
                let is_served = request.only_if_lost && mounted.pump.is_attached(request.server);
                return Ok((!is_served).then(|| mounted.pump.clone()));
            }
            fuse_device::unmount(&request.path)?;
        }
        if request.only_if_lost {
            return Ok(None);
        }
        let device = fuse_device::mount(request)?;
        let pump = Arc::new(Pump::new(device));
        let requests = pump.clone();
        let thread = std::thread::Builder::new().name("volume".to_owned());
        thread
            .stack_size(STACK_BYTES)
            .spawn(move || requests.pass_requests())?;
        let mounted = Mounted {
            volume: request.volume.clone(),
            pump: pump.clone(),
        };
        mounts.insert(request.path.clone(), mounted);
        Ok(Some(pump))
    }
}

/// Reads the line of the request. The host sends nothing after it until this guest has answered.
fn read_line(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut part = [0; 512];
    loop {
        let length = stream.read(&mut part)?;
        line.extend_from_slice(part.get(..length).unwrap_or_default());
        if line.last() == Some(&b'\n') {
            return Ok(line);
        }
        if length == 0 || line.len() > MAX_VOLUME_REQUEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

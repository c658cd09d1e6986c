//! Unix sockets in the guest whose connections lead to the host (`jiffy_proto::agent::TCP_PORT`).
//! Steps of a build reach the SSH agent of the build's client through such a socket.

use jiffy_proto::agent::{SOCKET_READY, SocketListener, TCP_OK};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::rc::{Rc, Weak};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{UnixListener, UnixStream};

/// Size of the buffer for each direction of a connection. Messages of SSH agents are short.
const COPY_BUFFER_BYTES: usize = 4096;

/// Sockets by path. Each exists as long as a stream uses it.
#[derive(Default)]
pub struct GuestSockets(RefCell<HashMap<String, Weak<GuestSocket>>>);

/// A socket with its listener. Dropping this value removes the socket.
struct GuestSocket {
    listener: UnixListener,
    path: String,
}

impl Drop for GuestSocket {
    fn drop(&mut self) {
        // Ignore the error: the host may have removed the directory of the socket.
        let _ = fs::remove_file(&self.path);
    }
}

impl GuestSockets {
    /// Serves a stream of the host: listens on the socket, waits for a connection of a program, and
    /// copies data in both directions. Returns when either side has closed.
    pub async fn serve(&self, stream: &mut UnixStream, request: &SocketListener) -> io::Result<()> {
        let socket = match self.socket(request) {
            Ok(socket) => socket,
            Err(e) => {
                let line = format!("ERR cannot listen on {}: {e}\n", request.path);
                return stream.write_all(line.as_bytes()).await;
            }
        };
        stream.write_all(SOCKET_READY.as_bytes()).await?;
        // The host sends nothing before the connection of a program, so that a result of `read_u8`
        // means that the host has closed the stream.
        if request.only_retains {
            return stream.read_u8().await.map(drop);
        }
        let mut program = tokio::select! {
            accepted = socket.listener.accept() => accepted?.0,
            closed = stream.read_u8() => return closed.map(drop),
        };
        stream.write_all(TCP_OK.as_bytes()).await?;
        let size = COPY_BUFFER_BYTES;
        copy_bidirectional_with_sizes(stream, &mut program, size, size).await?;
        Ok(())
    }

    /// Returns the socket of a request. Creates the socket unless it exists.
    fn socket(&self, request: &SocketListener) -> io::Result<Rc<GuestSocket>> {
        let mut sockets = self.0.borrow_mut();
        if let Some(socket) = sockets.get(&request.path).and_then(Weak::upgrade) {
            return Ok(socket);
        }
        let socket = Rc::new(GuestSocket {
            listener: UnixListener::bind(&request.path)?,
            path: request.path.clone(),
        });
        chown(&request.path, Some(request.uid), Some(request.gid))?;
        fs::set_permissions(&request.path, Permissions::from_mode(request.mode & 0o7777))?;
        sockets.retain(|_, socket| socket.strong_count() > 0);
        sockets.insert(request.path.clone(), Rc::downgrade(&socket));
        Ok(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a stream to a socket of this user. Returns the end of the host.
    fn begin(sockets: &Rc<GuestSockets>, path: &str, only_retains: bool) -> UnixStream {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
        let request = SocketListener {
            path: path.to_owned(),
            uid: uid.as_raw(),
            gid: gid.as_raw(),
            mode: 0o600,
            only_retains,
        };
        let sockets = Rc::clone(sockets);
        tokio::task::spawn_local(async move {
            let _ = sockets.serve(&mut guest, &request).await;
        });
        host
    }

    async fn expect(stream: &mut UnixStream, text: &str) {
        let mut received = vec![0; text.len()];
        stream.read_exact(&mut received).await.unwrap();
        assert_eq!(String::from_utf8(received).unwrap(), text);
    }

    #[tokio::test]
    async fn each_stream_receives_one_connection_and_the_last_one_removes_the_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let path = path.to_str().unwrap().to_owned();
        let sockets = Rc::new(GuestSockets::default());
        let work = async {
            let mut retaining = begin(&sockets, &path, true);
            expect(&mut retaining, SOCKET_READY).await;
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            for _ in 0..2 {
                let mut host = begin(&sockets, &path, false);
                expect(&mut host, SOCKET_READY).await;
                let mut program = UnixStream::connect(&path).await.unwrap();
                expect(&mut host, TCP_OK).await;
                program.write_all(b"question").await.unwrap();
                expect(&mut host, "question").await;
                host.write_all(b"answer").await.unwrap();
                expect(&mut program, "answer").await;
            }
            drop(retaining);
            while fs::exists(&path).unwrap() {
                tokio::task::yield_now().await;
            }
            // The directory is missing.
            let mut host = begin(&sockets, "/nowhere/socket", false);
            expect(&mut host, "ERR cannot listen on /nowhere/socket").await;
        };
        let local = tokio::task::LocalSet::new();
        let limit = std::time::Duration::from_secs(20);
        tokio::time::timeout(limit, local.run_until(work))
            .await
            .unwrap();
    }
}

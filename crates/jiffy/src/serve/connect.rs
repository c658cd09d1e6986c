//! Raw streams between a client of the daemon and a port in a guest.

use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use std::os::unix::net::UnixStream;

/// Passes bytes both ways once the client's connection has become a stream.
pub fn splice(request: Request<Incoming>, guest: UnixStream) -> std::io::Result<()> {
    guest.set_nonblocking(true)?;
    let mut guest = tokio::net::UnixStream::from_std(guest)?;
    tokio::spawn(async move {
        if let Ok(client) = hyper::upgrade::on(request).await {
            // Either side may break off.
            let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut guest).await;
        }
    });
    Ok(())
}

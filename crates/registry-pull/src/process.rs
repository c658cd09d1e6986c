//! The puller process: confines itself, and executes the parent's requests with an HTTP client.
//!
//! The *puller* is the confined process that downloads images from registries.

mod challenge;
mod client;
mod confine;
mod control;
mod responses;
mod seccomp;
mod url;

use crate::error::PullFault;
use crate::wire::{PullRequest, PullResponse};
use client::RegistryClient;
use control::ParentSocket;
use rustls::RootCertStore;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::rc::Rc;
use tokio::runtime::{Builder, Runtime};

/// First argument of a program that runs as a puller.
pub const PULLER_ARGUMENT: &str = "--as-puller";
/// Environment variables that a puller inherits: locations of TLS authorities.
pub const INHERITED_VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Main function of a puller process, whose standard input is the socket to the parent. Must be
/// called while the process is single-threaded, because parts of the confinement apply to the
/// calling thread only.
pub fn main() -> ExitCode {
    // SAFETY: descriptor 0 is open for as long as the process runs, and no other object owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(0) };
    let control = Rc::new(ParentSocket::new(UnixStream::from(socket)));
    let prepared = prepare();
    let (runtime, roots) = match prepared {
        Ok(prepared) => prepared,
        Err(e) => {
            let fault = PullFault::Confinement(PullFault::text(&e.to_string()));
            // Ignore the error: if the parent has closed the socket, no process waits for the
            // report.
            let _ = control.send_response(&PullResponse::Failed(fault));
            return ExitCode::FAILURE;
        }
    };
    match serve(&runtime, &control, roots) {
        // The client could not be set up. The parent has received `Failed`, so the exit status
        // reports no further error.
        Ok(()) => ExitCode::SUCCESS,
        // Includes the normal end of a puller: the parent has closed the socket.
        Err(_) => ExitCode::FAILURE,
    }
}

/// Reads the required files, then confines the process.
fn prepare() -> io::Result<(Runtime, RootCertStore)> {
    // SAFETY: no code in this process owns a descriptor above standard error yet.
    unsafe { jiffy_confinement::close_descriptors(3) }?;
    // The certificates are read now, because the process has no files afterwards.
    let roots = authorities();
    confine::limit_resources()?;
    // Leave the host's namespaces, files, user and privileges.
    confine::leave_everything()?;
    // Create the event loop before the filter denies its system calls.
    let runtime = Builder::new_current_thread().enable_io().build()?;
    seccomp::enter()?;
    Ok((runtime, roots))
}

/// Returns the TLS authorities of this host.
fn authorities() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

/// Runs a puller without confinement on a thread of a test.
#[cfg(feature = "testing")]
pub(crate) fn serve_unconfined(socket: UnixStream) {
    let control = Rc::new(ParentSocket::new(socket));
    if let Ok(runtime) = Builder::new_current_thread().enable_io().build() {
        let _ = serve(&runtime, &control, authorities());
    }
}

/// Serves requests until the parent closes the socket.
///
/// # Errors
/// Always ends with an error after a successful setup: receiving fails when the parent has closed
/// the socket. Returns `Ok` only if the setup failed and the parent has received
/// [`PullResponse::Failed`].
fn serve(runtime: &Runtime, control: &Rc<ParentSocket>, roots: RootCertStore) -> io::Result<()> {
    control.send_response(&PullResponse::Ready)?;
    // The second value of a received request is a file descriptor. Only `Connected` has a
    // descriptor, and `ParentSocket::connect` receives that request.
    let PullRequest::Setup {
        registry,
        repository,
        plain_http,
        login,
    } = control.receive_request()?.0
    else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let client = RegistryClient::new(control.clone(), roots, plain_http, login);
    let mut client = match client.and_then(|c| c.of(&registry, &repository)) {
        Ok(client) => client,
        Err(fault) => return control.send_response(&PullResponse::Failed(fault)),
    };
    loop {
        let (request, _) = control.receive_request()?;
        let response = runtime.block_on(async {
            match &request {
                PullRequest::Manifest { reference, most } => {
                    client.manifest(reference, *most).await?;
                    Ok(PullResponse::Done)
                }
                PullRequest::Blob {
                    digest,
                    offset,
                    most,
                } => {
                    client.blob(digest, *offset, *most).await?;
                    Ok(PullResponse::Done)
                }
                PullRequest::File {
                    target,
                    offset,
                    most,
                } => {
                    client.file(target, *offset, *most).await?;
                    Ok(PullResponse::Done)
                }
                PullRequest::Has { digest, size } => {
                    client.has(digest, *size).await.map(PullResponse::Has)
                }
                _ => Err(PullFault::Refused("unknown request".to_owned())),
            }
        });
        control.send_response(&response.unwrap_or_else(PullResponse::Failed))?;
    }
}

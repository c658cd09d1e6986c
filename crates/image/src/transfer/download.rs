//! Downloads an exported template from an `https` URL through the puller process.
//!
//! The *puller* is the confined process that downloads images from registries.

use crate::file::OnPath;
use crate::import::ImportError;
use crate::layer::UnpackLimits;
use crate::progress::{Phase, Progress};
use crate::templates::Templates;
use jiffy_registry_pull::{
    Cancel, ConnectionGate, FileUrl, PullError, PullFault, PullSettings, PullTarget, Puller,
    PullerProgram, Registries,
};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Maximum number of times that a download is resumed after progress.
const MAX_RESUMES: usize = 5;

/// Downloads the file at an `https` URL into an unnamed file. The size may not exceed the default
/// limit of unpacked bytes. The content is not checked.
pub fn download_template(
    templates: &Templates,
    url: &str,
    program: PullerProgram,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<File, ImportError> {
    let registries = Registries {
        program,
        ..Registries::default()
    };
    download_from(templates, url, registries, on_progress)
}

/// Downloads a file through a puller process to an unnamed file. An interrupted download is
/// resumed.
pub(super) fn download_from(
    templates: &Templates,
    url: &str,
    registries: Registries,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<File, ImportError> {
    let cancel = Cancel::new().map_err(|e| ImportError::Download {
        url: url.to_owned(),
        source: PullError::Start(e),
    })?;
    // `false`: the host's owner requests the download, not an API key.
    let pull = registries.pull(false, &cancel);
    let limit = UnpackLimits::default().bytes;
    download_file(templates, url, &pull, limit, on_progress)
}

/// Downloads a file of at most `max_bytes` bytes through a puller process to an unnamed file.
pub fn download_file(
    templates: &Templates,
    url: &str,
    pull: &PullSettings,
    max_bytes: u64,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<File, ImportError> {
    let plain_http = &pull.registries.plain_http;
    let address = FileUrl::parse(url, plain_http).map_err(ImportError::Choice)?;
    on_progress(Progress::Phase(Phase::Download));
    let failed = |source: PullError| ImportError::Download {
        url: url.to_owned(),
        source,
    };
    let target = PullTarget {
        registry: address.authority.clone(),
        // Only requests for images contain a repository. The path is passed to `Puller::file`.
        repository: String::new(),
        plain_http: pull.registries.plain_http.clone(),
        login: None,
    };
    let gate = ConnectionGate::new(pull, &address.authority).map_err(failed)?;
    let program = pull.registries.program;
    let mut puller = Puller::start(program, target, gate, &pull.cancel).map_err(failed)?;
    let directory = templates.home.blobs();
    // The file has no name, so the kernel removes it when the import is finished or crashes.
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(&directory)
        .on("create a file in", &directory)?;
    // The file has the same deadlines as a layer of an image. All attempts share them.
    let mut deadlines = puller.layer();
    let mut length = 0;
    for resumes in 0.. {
        let before = length;
        let mut write = |bytes: &[u8]| -> io::Result<()> {
            file.write_all_at(bytes, length)?;
            length += bytes.len() as u64;
            Ok(())
        };
        match puller.file(
            &mut deadlines,
            &address.target,
            before,
            max_bytes,
            &mut write,
        ) {
            Ok(()) => break,
            // A download is resumed only after progress, so a server cannot cause endless attempts.
            Err(PullError::Fault(PullFault::Broken(_)))
                if length > before && resumes < MAX_RESUMES => {}
            Err(e) => return Err(failed(e)),
        }
    }
    Ok(file)
}

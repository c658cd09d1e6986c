//! Exports templates to files, and imports them from files, from a network or from a shared store.
//!
//! The *version* of a template is a hash of its images, defaults and startup settings. A snapshot
//! is bound to the version of its template ([`crate::version`]). A *stock template* is a template
//! that Jiffy can build itself, and its *recipe* is the source of this build.
//!
//! The file is a tar archive, compressed with zstd: `template.json`, then the images in order,
//! lowest first. Files are not trusted: their size is bounded, every image must have the digest in
//! the manifest, and only guests mount the images.

use crate::file::OnPath;
use crate::images::ImageStore;
use crate::import::{ImportError, check_defaults, check_name};
use crate::layer::{LayerError, LayerStream, UnpackLimits};
use crate::progress::{Phase, Progress};
use crate::template_model::{
    ImageSum, MANIFEST, Reference, Template, TemplateError, TemplateManifest, Visibility,
};
use crate::templates::Templates;
use crate::version;
use crate::work_dir::WorkDir;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use tar::{Archive, Builder, Entry, EntryType, Header};

/// Maximum size of a manifest in bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Default level of zstd: images are written once and read rarely.
const ZSTD_LEVEL: i32 = 3;
/// Offset and value of the magic number in an EROFS super block (linux/fs/erofs/erofs_fs.h).
const EROFS_MAGIC: (u64, [u8; 4]) = (1024, 0xe0f5_e1e2_u32.to_le_bytes());
/// Size of the buffer for copies in bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// Returns the name of an image's entry in the archive.
fn entry_name(sum: &ImageSum) -> String {
    format!("sha256-{}.erofs", sum.sha256)
}

/// Exports a template to a file. The images are verified first, and are not removed before the
/// export ends.
pub fn export_template(
    templates: &Templates,
    name: &str,
    to: impl Write,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<TemplateManifest, TemplateError> {
    let template = templates.get(name)?;
    let written = write_archive(&template, to, on_progress);
    written.on("write", Path::new(name))?;
    Ok(template.manifest)
}

/// Writes a template to a compressed archive: the manifest, then the images.
fn write_archive(
    template: &Template,
    to: impl Write,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> io::Result<()> {
    let manifest = &template.manifest;
    // Owner and visibility are specific to this host and are not exported.
    let about = TemplateManifest {
        owner: None,
        visibility: Visibility::default(),
        ..manifest.clone()
    };
    let text = version::text(&about, Path::new(MANIFEST)).map_err(io::Error::other)?;
    let header = |size| {
        let mut header = Header::new_ustar();
        header.set_size(size);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(manifest.created);
        header
    };
    let mut archive = Builder::new(zstd::Encoder::new(to, ZSTD_LEVEL)?);
    archive.append_data(&mut header(text.len() as u64), MANIFEST, &text[..])?;
    // An empty template would divide by zero.
    let (all, mut done) = (manifest.size().max(1), 0);
    for (sum, image) in manifest.images.iter().zip(&template.images) {
        let content = FileAt {
            file: &image.file,
            offset: 0,
            on_read: &mut |n| on_progress(percent(done + n, all)),
        };
        archive.append_data(&mut header(sum.size), entry_name(sum), content)?;
        done += sum.size;
    }
    archive.into_inner()?.finish()?.flush()
}

/// Adds the images of a template from another host. Publishes the template under its name if
/// `published` is true. Otherwise stores only the version of the template, so that snapshots of
/// another host that refer to this version can be restored here.
fn import_images<R: Read>(
    templates: &Templates,
    mut manifest: TemplateManifest,
    reference: &Reference,
    visibility: Option<Visibility>,
    published: bool,
    mut images: Images<
        impl FnMut(&ImageSum) -> Result<R, ImportError>,
        impl FnOnce() -> Result<(), ImportError>,
    >,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(), ImportError> {
    // The manifest of the file is not trusted.
    check_defaults(&manifest.defaults, &manifest.startup)?;
    if manifest.size() > images.limit {
        let limit_mib = images.limit >> 20;
        let problem = format!(
            "its images have {} MiB, but the limit is {limit_mib} MiB",
            manifest.size() >> 20
        );
        return Err(ImportError::image(problem));
    }
    manifest.visibility = templates.visibility(reference, visibility);
    // Lists show when the template became available on this host.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    manifest.created = now.unwrap_or_default().as_secs();

    // Lock order: the template first, then the images.
    let lock = templates.lock(reference, &mut |()| {
        on_progress(Progress::Phase(Phase::Waiting))
    })?;
    let store = ImageStore::new(&templates.home);
    let shared = store.share()?;
    let work = WorkDir::create(templates.unfinished(reference))?;
    on_progress(Progress::Phase(Phase::Layers));
    let (all, mut done) = (manifest.size().max(1), 0);
    for sum in &manifest.images {
        let content = (images.open)(sum)?;
        import_image(&store, &work, sum, content)?;
        done += sum.size;
        on_progress(percent(done, all));
    }
    // An error leaves unreferenced images. Garbage collection removes them.
    (images.confirm)()?;
    if published {
        templates.publish(&manifest, &work, &lock)?
    } else {
        version::store(&templates.home, &manifest)?
    }
    drop(shared);
    Ok(())
}

/// Images of a template from another host.
struct Images<F, C> {
    /// Maximum total size in bytes.
    limit: u64,
    /// Opens an image; called once for each image, in order.
    open: F,
    /// Checks the source after all images were read and before the template is published.
    confirm: C,
}

/// Settings of the import of an exported template.
#[derive(Debug, Clone, Default)]
pub struct FileImport {
    /// Name of the template. Defaults to the name in the file.
    pub name: Option<String>,
    /// Visibility as in [`crate::Import`]. The file specifies no visibility.
    pub visibility: Option<Visibility>,
    /// Limits of the unpacked archive.
    pub limits: UnpackLimits,
    /// Requirements on the recipe and the digest of the file. They apply to files under the name of
    /// a stock template, to files from a network, and if the caller specifies a digest.
    pub trust: FileTrust,
}

impl FileImport {
    /// Imports the template in a file. Temporary disk space is not required beyond the template's
    /// images.
    ///
    /// # Errors
    /// The template is not published if the file is damaged, or if [`Self::trust`] does not cover
    /// the file.
    pub fn run(
        &self,
        templates: &Templates,
        from: impl Read,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Template, ImportError> {
        let FileImport { limits, trust, .. } = self;
        // Rejects a malformed digest before the file is read.
        trust.check()?;
        let mut file = HashedReader::new(from);
        let packed = LayerStream::open(file.clone(), limits).map_err(unreadable)?;
        let mut archive = Archive::new(packed);
        // Raw entries, because exports have no extended headers. Extended headers of another file
        // would be read into memory.
        let mut entries = archive.entries().map_err(unreadable_io)?.raw(true);
        let mut manifest = read_manifest(entries.next())?;
        // An owner in the file is a key of another host. The file must not choose a key of this
        // host, whose templates it would replace.
        manifest.owner = None;
        let own_name = || manifest.reference();
        let name = self.name.clone().unwrap_or_else(own_name);
        let (reference, visibility) = match Reference::parse(&name)? {
            // A stock template is public even if the caller requests another visibility.
            stock if stock.is_stock() => (stock, Some(Visibility::Public)),
            _ => (check_name(&name, self.visibility)?, self.visibility),
        };
        // Under the name of a stock template, the file must state the recipe of this program.
        trust.check_recipe(&reference, &manifest)?;
        manifest.rename(&reference);
        let images = Images {
            limit: limits.bytes,
            open: |sum: &ImageSum| expect_entry(entries.next(), &entry_name(sum), Some(sum.size)),
            // The digest covers the whole file, so it is known only after the last image.
            confirm: || {
                let digest = || file.finish(limits.bytes).map_err(unreadable_io);
                trust.check_digest(&reference, digest)
            },
        };
        let imported = import_images(
            templates,
            manifest,
            &reference,
            visibility,
            true,
            images,
            on_progress,
        );
        if let Err(error) = imported {
            // Images of the file may have been added to the store before the error.
            templates.prune_if_idle();
            return Err(error);
        }
        // Opens and verifies the published images.
        let template = templates.get(&name)?;
        // The replaced template may have been the last user of its images.
        templates.prune_if_idle();
        Ok(template)
    }
}

/// Reads one image unless it exists. Adds the image to the store if its digest matches.
fn import_image(
    store: &ImageStore,
    work: &WorkDir,
    sum: &ImageSum,
    mut entry: impl Read,
) -> Result<(), ImportError> {
    // An image that exists is not read. `Archive` skips its entry.
    if store.open(sum).is_ok() {
        return Ok(());
    }
    let path = work.0.join("image.erofs");
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .on("create", &path)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let n = match entry.read(&mut buffer).map_err(unreadable_io)? {
            0 => break,
            n => n,
        };
        file.write_all(&buffer[..n]).on("write", &path)?;
    }
    file.sync_all().on("flush", &path)?;
    // A cheap check with a clear message. The digest is verified below.
    let mut magic = [0; 4];
    let read = file.read_exact_at(&mut magic, EROFS_MAGIC.0);
    if read.is_err() || magic != EROFS_MAGIC.1 {
        let problem = format!("{} is not an EROFS image", entry_name(sum));
        return Err(ImportError::image(problem));
    }
    drop(file);
    let added = store.add_expected(&path, sum)?;
    added.map_err(|found| ImportError::Digest {
        what: entry_name(sum),
        found,
    })
}

/// Next entry of an archive, or `None` at its end.
type NextEntry<'a, R> = Option<io::Result<Entry<'a, R>>>;

/// Returns the next entry, which must have this name and size.
fn expect_entry<'a, R: Read>(
    entry: NextEntry<'a, R>,
    name: &str,
    size: Option<u64>,
) -> Result<Entry<'a, R>, ImportError> {
    let missing =
        || ImportError::image(format!("it is not an exported template: {name} is missing"));
    let entry = entry.ok_or_else(missing)?.map_err(unreadable_io)?;
    is_entry(&entry, name, size)
        .then_some(entry)
        .ok_or_else(missing)
}

/// Returns whether an entry is a file with this name and size.
fn is_entry<R: Read>(entry: &Entry<'_, R>, name: &str, size: Option<u64>) -> bool {
    entry.path_bytes() == name.as_bytes()
        && entry.header().entry_type() == EntryType::Regular
        && size.is_none_or(|size| entry.size() == size)
}

/// Returns whether the first bytes of a file are not the header of an archive. False for errors of
/// the system, truncated files and limits.
fn is_invalid_header(error: &io::Error) -> bool {
    error.raw_os_error().is_none()
        && error.kind() != io::ErrorKind::UnexpectedEof
        && !error.get_ref().is_some_and(|e| e.is::<LayerError>())
}

/// Reads the manifest, which must be the first entry.
fn read_manifest<R: Read>(entry: NextEntry<'_, R>) -> Result<TemplateManifest, ImportError> {
    let entry = match entry {
        // The error of an invalid header contains bytes of the file.
        Some(Err(e)) if is_invalid_header(&e) => return Err(ImportError::NotExported),
        Some(Err(e)) => return Err(unreadable_io(e)),
        Some(Ok(entry)) if is_entry(&entry, MANIFEST, None) => entry,
        Some(Ok(_)) | None => return Err(ImportError::NotExported),
    };
    if entry.size() > MAX_MANIFEST_BYTES {
        return Err(ImportError::image(format!("its {MANIFEST} is too large")));
    }
    let mut text = Vec::new();
    let read = entry.take(MAX_MANIFEST_BYTES).read_to_end(&mut text);
    read.map_err(unreadable_io)?;
    TemplateManifest::parse(&text)
        .map_err(|problem| ImportError::image(format!("{MANIFEST}: {problem}")))
}

fn unreadable(source: LayerError) -> ImportError {
    ImportError::Layer {
        what: "the exported template".to_owned(),
        source,
    }
}

fn unreadable_io(error: io::Error) -> ImportError {
    unreadable(LayerError::read(error))
}

fn percent(done: u64, all: u64) -> Progress<'static> {
    let percent = u128::from(done) * 100 / u128::from(all);
    Progress::Percent(u8::try_from(percent).unwrap_or(100).min(100))
}

/// Reader of a file by position. Clones of the descriptor have a shared offset, which this reader
/// does not use.
struct FileAt<'a> {
    file: &'a File,
    offset: u64,
    on_read: &'a mut dyn FnMut(u64),
}

impl Read for FileAt<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        (self.on_read)(self.offset);
        Ok(n)
    }
}

mod download;
mod search;
mod shared;
mod trust;
pub use download::{download_file, download_template};
pub use search::UnusableFile;
pub(crate) use search::import_stock;
pub use shared::TemplateFiles;
use trust::HashedReader;
pub use trust::{FileTrust, KnownDigests};

#[cfg(test)]
mod tests;

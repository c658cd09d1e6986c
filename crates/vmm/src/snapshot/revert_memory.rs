//! Guest memory put back to the layers of a snapshot in the process that runs the guest.
//!
//! A chunk that the same file lies behind before and after loses only the pages that are the
//! guest's own, or has them read anew if a restored guest writes them first. One of the snapshot
//! that was taken of this very memory last is put back the same way, over what lay below it then.
//! The others are mapped anew. A failure half-way leaves memory of no moment: the guest must not
//! run again.

use super::failed;
use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::map_layers::{MappingPlan, map_layers, read};
use super::memory_layers::MemoryLayers;
use super::populate::{make_private, runs};
use crate::error::VmmError;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use nix::errno::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

const PAGE: u64 = MEMORY_PAGE as u64;
const CHUNK_PAGES: u64 = CHUNK_SIZE / PAGE;
/// Most pages of a captured snapshot that are read anew, 16 MiB: more are better shared with its
/// file.
const MAX_CAPTURED_PAGES: u64 = 4096;

/// Device and inode of a layer's file. No other file has them while it is mapped.
type FileIdentity = (u64, u64);

/// Files behind guest memory: runs of chunks and the file that each is mapped from, ascending.
/// Everything else is anonymous.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappedFiles(Vec<(FileIdentity, Range<u64>)>);

/// Pages that were the guest's own when the newest layer was taken of this memory.
#[derive(Debug)]
pub struct CapturedPages {
    layer: FileIdentity,
    own: UnitSet,
}

impl CapturedPages {
    /// Pages at the moment that `layer` holds.
    pub fn new(layer: &File, own: UnitSet) -> Result<Self, VmmError> {
        let layer = identity(Some(layer))?;
        Ok(Self { layer, own })
    }

    /// True if `layers` end with the layer that was taken then.
    pub fn are_of(&self, layers: &MemoryLayers) -> bool {
        let newest = layers.len().checked_sub(1);
        let newest = newest.and_then(|newest| layers.file(newest));
        identity(newest).is_ok_and(|newest| newest == self.layer)
    }
}

/// The guest's own pages, as sets of [`MEMORY_PAGE`]s.
#[derive(Debug, Clone, Copy)]
pub struct OwnPages<'a> {
    /// Those of now.
    pub now: &'a UnitSet,
    /// Those that may stay so, being written first.
    pub may_stay: Option<&'a UnitSet>,
    /// Those of the moment to which memory is put back, if it was taken of this very memory, and
    /// memory was put back to no other since.
    pub captured: Option<&'a CapturedPages>,
    /// True if a fork may have protected pages since memory was last put back.
    pub protected: bool,
}

impl OwnPages<'_> {
    /// Chunks that `to` maps from the captured layer, and whose content is in their own pages and
    /// in what lies below: as all pages that were written until then are still the guest's own, the
    /// others are as they were. One of which the guest gave pages back is not among them.
    fn captured_chunks(&self, to: &MappedFiles, chunks: u64) -> UnitSet {
        let mut set = UnitSet::empty(chunks);
        let Some(captured) = self.captured else {
            return set;
        };
        let mut left = MAX_CAPTURED_PAGES;
        let runs = to.0.iter().filter(|(file, _)| *file == captured.layer);
        for chunk in runs.flat_map(|(_, run)| run.clone()) {
            let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
            let mut before = captured.own.iter_range(pages.clone());
            if before.all(|page| self.now.contains(page)) {
                left = left.saturating_sub(self.now.iter_range(pages).count() as u64);
                if left == 0 {
                    break;
                }
                set.insert(chunk);
            }
        }
        set
    }
}

fn identity(file: Option<&File>) -> Result<FileIdentity, VmmError> {
    let metadata = file.map(File::metadata);
    let metadata = metadata.unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()));
    let metadata = metadata.map_err(|e| VmmError::host("file of a memory layer", e))?;
    Ok((metadata.dev(), metadata.ino()))
}

impl MappedFiles {
    /// Files that `plan` maps from `layers`.
    pub fn of(plan: &MappingPlan, layers: &MemoryLayers) -> Result<Self, VmmError> {
        let identities = (0..layers.len()).map(|number| identity(layers.file(number)));
        let identities = identities.collect::<Result<Vec<FileIdentity>, VmmError>>()?;
        let mapped = plan.map.iter().filter_map(|(layer, run)| {
            let identity = identities.get(*layer)?;
            Some((*identity, run.clone()))
        });
        Ok(Self(mapped.collect()))
    }

    fn chunks(&self, chunks: u64) -> UnitSet {
        let mut set = UnitSet::empty(chunks);
        for (_, run) in &self.0 {
            set.insert_range(run.clone());
        }
        set
    }

    /// Chunks that the same file lies behind in both.
    fn common(&self, other: &Self, chunks: u64) -> UnitSet {
        let mut set = UnitSet::empty(chunks);
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some((a, here)), Some((b, there))) = (ours.peek(), theirs.peek()) {
            let both = here.start.max(there.start)..here.end.min(there.end);
            if a == b && !both.is_empty() {
                set.insert_range(both);
            }
            match here.end <= there.end {
                true => ours.next().map(drop),
                false => theirs.next().map(drop),
            };
        }
        set
    }

    /// The same, but `chunks` lie before what `other` has there.
    fn except(self, chunks: &UnitSet, other: &Self) -> Self {
        let outside = complement(chunks);
        let of = |files: &Self, set: &UnitSet| -> Vec<(FileIdentity, Range<u64>)> {
            let parts = files.0.iter().flat_map(|(file, run)| {
                let parts = runs(set, run.clone()).into_iter();
                parts.map(|part| (*file, part))
            });
            parts.collect()
        };
        let mut files = of(&self, &outside);
        files.extend(of(other, chunks));
        files.sort_unstable_by_key(|(_, run)| run.start);
        Self(files)
    }
}

/// Units of a memory's size that are not in `set`.
fn complement(set: &UnitSet) -> UnitSet {
    let words: Vec<u64> = set.words().iter().map(|word| !word).collect();
    UnitSet::from_words(set.units(), &words)
}

/// Changes that lead from one set of mapped files to another.
struct RevertPlan {
    /// Mapped from the same file: private pages are dropped.
    kept: UnitSet,
    /// As they were below the captured snapshot: private pages are read.
    captured: UnitSet,
    /// Anonymous before and after: chunks with private pages are dropped.
    anonymous: UnitSet,
    /// Mapped from a file until now, and anonymous afterwards.
    unmapped: UnitSet,
    /// Mapped from another file or none until now, and chunks to read.
    remaining: MappingPlan,
}

impl RevertPlan {
    fn new(
        from: &MappedFiles,
        to: &MappedFiles,
        plan: &MappingPlan,
        own: &OwnPages<'_>,
        chunks: u64,
    ) -> Self {
        let (before, after) = (from.chunks(chunks), to.chunks(chunks));
        let kept = from.common(to, chunks);
        let captured = own.captured_chunks(to, chunks).without(&kept);
        let combine = |word: fn(u64, u64) -> u64| {
            let words = before.words().iter().zip(after.words());
            let words: Vec<u64> = words.map(|(&a, &b)| word(a, b)).collect();
            UnitSet::from_words(chunks, &words)
        };
        let changed = complement(&kept).without(&captured);
        let remapped = plan.map.iter().flat_map(|(layer, run)| {
            let changed = runs(&changed, run.clone()).into_iter();
            changed.map(|run| (*layer, run))
        });
        Self {
            anonymous: combine(|before, after| !(before | after)),
            unmapped: combine(|before, after| before & !after),
            remaining: MappingPlan {
                map: remapped.collect(),
                copy: plan.copy.clone(),
                ..MappingPlan::default()
            },
            kept,
            captured,
        }
    }
}

/// Puts memory back to what `plan` makes of `layers` on fresh memory. `from` are the files behind
/// it now, and `own` the pages that are the guest's own. No vCPU or device may be running. Returns
/// the files behind it afterwards, and the pages that stayed its own.
pub fn revert_memory(
    from: &MappedFiles,
    plan: &MappingPlan,
    layers: &MemoryLayers,
    linear: &LinearMemory,
    pages: OwnPages<'_>,
) -> Result<(MappedFiles, UnitSet), VmmError> {
    let chunks = linear.chunks();
    let to = MappedFiles::of(plan, layers)?;
    let revert = RevertPlan::new(from, &to, plan, &pages, chunks);
    let dropping = failed("dropping written memory");
    let mut own = UnitSet::empty(chunks * CHUNK_PAGES);
    let mut read_anew = UnitSet::empty(chunks * CHUNK_PAGES);
    let stays = |page| pages.may_stay.is_some_and(|pages| pages.contains(page));
    for run in runs(pages.now, 0..chunks * CHUNK_PAGES) {
        for page in run {
            let chunk = page / CHUNK_PAGES;
            if revert.captured.contains(chunk) {
                read_anew.insert(page);
            } else if revert.kept.contains(chunk) {
                let set = if stays(page) {
                    &mut read_anew
                } else {
                    &mut own
                };
                set.insert(page);
            } else if revert.anonymous.contains(chunk) {
                // Whole chunks: fewer calls, and huge pages are split less.
                own.insert_range(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES);
            }
        }
    }
    for run in runs(&own, 0..chunks * CHUNK_PAGES) {
        drop_pages(linear, run).map_err(&dropping)?;
    }
    for (layer, run) in &plan.map {
        let file = layers.file(*layer).ok_or(Errno::ENOENT);
        let file = file.map_err(failed("reading a memory layer"))?;
        for run in runs(&read_anew, run.start * CHUNK_PAGES..run.end * CHUNK_PAGES) {
            linear
                .each_extent_of_pages(run, |offset, bytes, host| {
                    if pages.protected {
                        // The fork of a snapshot has protected them, and each would be a fault
                        // of the read otherwise.
                        make_private(host, bytes);
                    }
                    read(file, offset, bytes as u64, host)
                })
                .map_err(failed("reading a memory layer"))?;
        }
    }
    for run in runs(&revert.unmapped, 0..chunks) {
        make_anonymous(linear, run).map_err(failed("unmapping a memory layer"))?;
    }
    map_layers(&revert.remaining, layers, linear)?;
    Ok((to.except(&revert.captured, from), read_anew))
}

/// Drops private pages: what lies below them shows again, a file or zeroes.
fn drop_pages(linear: &LinearMemory, pages: Range<u64>) -> Result<(), Errno> {
    linear.each_extent_of_pages(pages, |_, bytes, host| {
        // SAFETY: the range lies inside guest memory, which is private, and which nothing uses now.
        let done = unsafe { libc::madvise(host.cast(), bytes, libc::MADV_DONTNEED) };
        Errno::result(done).map(drop)
    })
}

/// Puts zeroed anonymous memory in place of mapped chunks.
fn make_anonymous(linear: &LinearMemory, run: Range<u64>) -> Result<(), Errno> {
    for (_, chunks, host) in linear.extents(run) {
        let length = usize::try_from(chunks * CHUNK_SIZE).map_err(|_| Errno::EOVERFLOW)?;
        // SAFETY: the range lies inside guest memory, which is ours, and which nothing uses now; it
        // stays private and writable.
        let at = unsafe {
            libc::mmap(
                host.cast(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        // SAFETY: advice on the mapping just made. Kernels without huge pages refuse it, which
        // costs speed only.
        let _ = unsafe { libc::madvise(at, length, libc::MADV_HUGEPAGE) };
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! Reverts guest memory to the layers of a snapshot, in the process that runs the guest.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory.
//!
//! Files of layers are mapped privately: the first write to a page of the guest creates a private
//! copy of the page. All other pages show the mapping below: a file, or zeroes. A snapshot does not
//! change the mappings. Its content of a chunk consists of the private pages at that time and of
//! the mapping below.
//!
//! Each chunk is handled in one of three ways:
//! - If the same file is mapped before and after the rollback, the chunk retains its mapping.
//!   Private pages that the guest has written since the target snapshot are dropped. Pages that a
//!   restored guest writes first are read from the file again instead, and remain private.
//! - If the target is the latest snapshot of this memory, a chunk may retain its mapping as well.
//!   The condition is that all pages that were private at that time are still private. The chunk is
//!   not mapped from the layer that contains its content. Instead, private pages that the guest has
//!   written since are read from this layer.
//! - All other chunks are mapped again, or replaced by zeroes.
//!
//! If writes are tracked ([`super::write_tracker`]) and a chunk retains its mapping, private pages
//! that the guest has not written since the target snapshot are retained, too.
//!
//! If the revert fails, memory is inconsistent, and the guest must not run again.

use super::failed;
use super::linear_memory::{CHUNK_SIZE, LinearMemory};
use super::map_layers::{MappingPlan, map_layers, read};
use super::memory_layers::MemoryLayers;
use super::pagemap_scan::PrivatePagesFound;
use super::populate::{make_private, runs};
use crate::error::VmmError;
use jiffy_proto::layer::{MEMORY_PAGE, UnitSet};
use nix::errno::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

const PAGE: u64 = MEMORY_PAGE as u64;
const CHUNK_PAGES: u64 = CHUNK_SIZE / PAGE;
/// Maximum number of pages of a captured snapshot that are read again: 16 MiB. For more pages,
/// mapping the file is better, because guests then share its pages.
const MAX_CAPTURED_PAGES: u64 = 4096;

/// Device and inode of a layer's file. The pair is unique as long as the file is open or mapped.
type FileIdentity = (u64, u64);

/// Files mapped into guest memory: runs of chunks with the file of each run, in ascending order.
/// All other memory is anonymous.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappedFiles(Vec<(FileIdentity, Range<u64>)>);

/// Guest's private pages at the time of the newest snapshot of this memory.
#[derive(Debug)]
pub struct CapturedPages {
    /// File of the snapshot's layer.
    layer: FileIdentity,
    /// Guest's private pages at the time of the snapshot.
    own: UnitSet,
    /// True if pages that were written since the snapshot can be found.
    tracked: bool,
}

impl CapturedPages {
    /// Creates the set of private pages at the time of `layer`. `tracked` is true if a
    /// [`super::write_tracker::WriteTracker`] has protected the pages at that time.
    pub fn new(layer: &File, own: UnitSet, tracked: bool) -> Result<Self, VmmError> {
        let layer = identity(Some(layer))?;
        Ok(Self {
            layer,
            own,
            tracked,
        })
    }

    /// Returns the pages that were private at the time of the snapshot and have not been written
    /// since: they have the content of the snapshot. `current` are the guest's private pages now. A
    /// page that the guest returned to the host and used again is new, and counts as written.
    pub fn unwritten(&self, current: &PrivatePagesFound) -> UnitSet {
        if !self.tracked {
            return UnitSet::empty(self.own.units());
        }
        let returned = self.own.without(&current.all);
        self.own.without(&returned).without(&current.written)
    }

    /// Returns whether `chunk` had private pages at the time of the snapshot, and all of them are
    /// in `current`, the guest's private pages now. The chunk then differs from the snapshot only
    /// in private pages, so the caller can revert the chunk by reading these pages.
    ///
    /// If a page is no longer private, the guest has returned the page to the host (balloon), and
    /// the page shows the mapping below instead. If the chunk had no private pages, the guest may
    /// have returned all of them before the snapshot. The layers then still have the former content
    /// of the chunk, which differs from the mapping below.
    pub(super) fn still_private(&self, chunk: u64, current: &UnitSet) -> bool {
        let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
        let mut before = self.own.iter_range(pages).peekable();
        before.peek().is_some() && before.all(|page| current.contains(page))
    }

    /// Returns whether the newest of `layers` is the layer of this snapshot.
    pub fn belong_to(&self, layers: &MemoryLayers) -> bool {
        let newest = layers.len().checked_sub(1);
        let newest = newest.and_then(|newest| layers.file(newest));
        identity(newest).is_ok_and(|newest| newest == self.layer)
    }
}

/// Guest's private pages, as sets of [`MEMORY_PAGE`]s.
#[derive(Debug, Clone, Copy)]
pub struct PrivatePages<'a> {
    /// Private pages now.
    pub current: &'a UnitSet,
    /// Private pages that have the content of the target snapshot.
    pub unwritten: &'a UnitSet,
    /// Pages that may remain private because a restored guest writes them first.
    pub retainable: Option<&'a UnitSet>,
    /// Private pages at the time of the target snapshot. `None` unless it was taken of this memory,
    /// and memory was not reverted to another snapshot since.
    pub captured: Option<&'a CapturedPages>,
    /// True if private pages of this process may be write-protected: since the last rollback, a
    /// snapshot has forked (fork(2)) a writer process, or tracks writes.
    pub protected: bool,
}

impl PrivatePages<'_> {
    /// Returns the chunks of `remapped` that can be reverted without mapping another file. The
    /// content of such a chunk consists of its private pages at the time of the capture and the
    /// mapping below, which has not changed since. These pages must still be private: a chunk is
    /// excluded if the guest has returned one of these pages to the host since.
    fn captured_chunks(&self, remapped: &UnitSet, chunks: u64) -> UnitSet {
        let mut set = UnitSet::empty(chunks);
        let Some(captured) = self.captured else {
            return set;
        };
        // Limits the number of pages that are read, over all chunks.
        let mut remaining_pages = MAX_CAPTURED_PAGES;
        for chunk in remapped.iter() {
            if captured.still_private(chunk, self.current) {
                let pages = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
                let is_written = |page: &u64| !self.unwritten.contains(*page);
                let written = self.current.iter_range(pages).filter(is_written);
                remaining_pages = remaining_pages.saturating_sub(written.count() as u64);
                if remaining_pages == 0 {
                    break;
                }
                set.insert(chunk);
            }
        }
        set
    }
}

/// Returns the identity of a layer's file.
fn identity(file: Option<&File>) -> Result<FileIdentity, VmmError> {
    let metadata = file
        .map(File::metadata)
        .unwrap_or_else(|| Err(std::io::ErrorKind::NotFound.into()))
        .map_err(|e| VmmError::host("file of a memory layer", e))?;
    Ok((metadata.dev(), metadata.ino()))
}

impl MappedFiles {
    /// Returns the files that `plan` maps from `layers`.
    pub fn of(plan: &MappingPlan, layers: &MemoryLayers) -> Result<Self, VmmError> {
        let identities = (0..layers.len())
            .map(|number| identity(layers.file(number)))
            .collect::<Result<Vec<FileIdentity>, VmmError>>()?;
        let mapped = plan.map.iter().filter_map(|(layer, run)| {
            let identity = identities.get(*layer)?;
            Some((*identity, run.clone()))
        });
        Ok(Self(mapped.collect()))
    }

    /// Returns the mapped chunks of a memory with this number of chunks.
    fn chunks(&self, chunks: u64) -> UnitSet {
        let mut set = UnitSet::empty(chunks);
        for (_, run) in &self.0 {
            set.insert_range(run.clone());
        }
        set
    }

    /// Returns the chunks that are mapped from the same file in both.
    fn common(&self, other: &Self, chunks: u64) -> UnitSet {
        let mut set = UnitSet::empty(chunks);
        // Both lists ascend: repeatedly compare the first runs, and advance the list whose run ends
        // first.
        let (mut ours, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some((a, here)), Some((b, there))) = (ours.peek(), theirs.peek()) {
            let both = here.start.max(there.start)..here.end.min(there.end);
            if a == b && !both.is_empty() {
                set.insert_range(both);
            }
            if here.end <= there.end {
                ours.next().map(drop)
            } else {
                theirs.next().map(drop)
            };
        }
        set
    }

    /// Returns these mapped files, but with the mappings of `other` for `chunks`.
    fn with_mappings_of(self, chunks: &UnitSet, other: &Self) -> Self {
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

/// Returns all units that are not in `set`.
fn complement(set: &UnitSet) -> UnitSet {
    // `from_words` ignores bits beyond the last unit.
    let words: Vec<u64> = set.words().iter().map(|word| !word).collect();
    UnitSet::from_words(set.units(), &words)
}

/// Returns the pages that may differ from `layers`, the layers of all snapshots of this memory so
/// far. `mapped` are the mapped files, `private` the guest's private pages, and `captured` the
/// private pages at the time of the newest snapshot. `captured` is `None` if this process did not
/// take the newest snapshot, for example after a restore or a rollback to an earlier snapshot.
///
/// Chunks without private pages are never compared. The guest has not written them, or has returned
/// all of their private pages to the host. The content of returned pages is undefined, so layers
/// may contain their former content.
///
/// If `captured` is `Some`, pages that are private now can differ. Pages that were private at the
/// time of the snapshot, and that the guest has returned to the host since, can differ as well.
///
/// If `captured` is `None`, all pages of a chunk with private pages can differ from the layers.
/// There are two exceptions, in which only the private pages can differ:
/// - A chunk that is mapped from the layer with its stored content.
/// - A chunk that is anonymous memory and not stored: its other pages are zero in both.
pub fn pages_to_compare(
    private: &UnitSet,
    mapped: &MappedFiles,
    layers: &MemoryLayers,
    captured: Option<&CapturedPages>,
) -> Result<UnitSet, VmmError> {
    let chunks = private.units() / CHUNK_PAGES;
    let candidates = private.coarser(CHUNK_PAGES);
    let mut pages = private.clone();
    if let Some(captured) = captured {
        // A chunk of which the guest has returned all private pages is not compared: the content of
        // returned pages is undefined.
        let is_candidate = |page: &u64| candidates.contains(page / CHUNK_PAGES);
        let returned = captured.own.without(private);
        let returned = returned.iter().filter(is_candidate);
        returned.for_each(|page| pages.insert(page));
        return Ok(pages);
    }
    let stored = MappingPlan {
        map: layers.runs(chunks),
        ..MappingPlan::default()
    };
    let stored = MappedFiles::of(&stored, layers)?;
    let in_files = stored.chunks(chunks).with(&mapped.chunks(chunks));
    let only_private = stored.common(mapped, chunks).with(&complement(&in_files));
    for chunk in candidates.without(&only_private).iter() {
        pages.insert_range(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES);
    }
    Ok(pages)
}

/// Changes from one set of mapped files to another.
struct RevertPlan {
    /// Chunks mapped from the same file: private pages are dropped, or read again.
    unchanged: UnitSet,
    /// Chunks of a captured snapshot that retain their present mapping: private pages are read from
    /// the layer.
    captured: UnitSet,
    /// Chunks that are anonymous before and after: if a chunk has private pages, the whole chunk is
    /// dropped.
    anonymous: UnitSet,
    /// Chunks mapped from a file before, and anonymous afterwards.
    unmapped: UnitSet,
    /// Part of the plan that [`map_layers`] executes: chunks mapped from another file or none
    /// before, and chunks to read.
    remaining: MappingPlan,
}

impl RevertPlan {
    /// Divides the chunks by the method of reverting them.
    fn new(
        from: &MappedFiles,
        to: &MappedFiles,
        plan: &MappingPlan,
        pages: &PrivatePages<'_>,
        chunks: u64,
    ) -> Self {
        let (before, after) = (from.chunks(chunks), to.chunks(chunks));
        let unchanged = from.common(to, chunks);
        let captured = pages.captured_chunks(&after.without(&unchanged), chunks);
        // Words of 64 chunks are combined at a time.
        let combine = |word: fn(u64, u64) -> u64| {
            let words = before.words().iter().zip(after.words());
            let words: Vec<u64> = words.map(|(&a, &b)| word(a, b)).collect();
            UnitSet::from_words(chunks, &words)
        };
        let changed = complement(&unchanged).without(&captured);
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
                // Memory that is fetched from a store when it is accessed (lazy memory) cannot be
                // reverted, so `later` and `registered` are empty.
                ..MappingPlan::default()
            },
            unchanged,
            captured,
        }
    }
}

/// Reverts memory to the result of executing `plan` with `layers` on new memory. `from` are the
/// currently mapped files, and `pages` the guest's private pages. No vCPU or device may be running.
/// Returns the mapped files afterwards, and the pages that remained private.
pub fn revert_memory(
    from: &MappedFiles,
    plan: &MappingPlan,
    layers: &MemoryLayers,
    linear: &LinearMemory,
    pages: PrivatePages<'_>,
) -> Result<(MappedFiles, UnitSet), VmmError> {
    let chunks = linear.chunks();
    let to = MappedFiles::of(plan, layers)?;
    let revert = RevertPlan::new(from, &to, plan, &pages, chunks);
    let dropping = failed("dropping written memory");
    let mut to_drop = UnitSet::empty(chunks * CHUNK_PAGES);
    let mut to_read = UnitSet::empty(chunks * CHUNK_PAGES);
    let mut retained = UnitSet::empty(chunks * CHUNK_PAGES);
    let is_retainable = |page| pages.retainable.is_some_and(|pages| pages.contains(page));
    // Sort the private pages by the method of reverting them.
    for run in runs(pages.current, 0..chunks * CHUNK_PAGES) {
        for page in run {
            let chunk = page / CHUNK_PAGES;
            let keeps_mapping = revert.captured.contains(chunk) || revert.unchanged.contains(chunk);
            if keeps_mapping && pages.unwritten.contains(page) {
                retained.insert(page);
            } else if revert.captured.contains(chunk) {
                to_read.insert(page);
            } else if revert.unchanged.contains(chunk) {
                let set = if is_retainable(page) {
                    &mut to_read
                } else {
                    &mut to_drop
                };
                set.insert(page);
            } else if revert.anonymous.contains(chunk) {
                // Drop whole chunks: this needs fewer calls and splits fewer huge pages.
                to_drop.insert_range(chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES);
            }
        }
    }
    for run in runs(&to_drop, 0..chunks * CHUNK_PAGES) {
        drop_pages(linear, run).map_err(&dropping)?;
    }
    // `plan.map` names the layer of each chunk that `to_read` contains.
    for (layer, run) in &plan.map {
        let file = layers
            .file(*layer)
            .ok_or(Errno::ENOENT)
            .map_err(failed("reading a memory layer"))?;
        for run in runs(&to_read, run.start * CHUNK_PAGES..run.end * CHUNK_PAGES) {
            linear
                .each_extent_of_pages(run, |offset, bytes, host| {
                    if pages.protected {
                        // The pages may be write-protected. Without this call, each page would
                        // fault during the read.
                        make_private(host, bytes);
                    }
                    read(file, offset, bytes as u64, host)
                })
                .map_err(failed("reading a memory layer"))?;
        }
    }
    // Unmap before mapping: `map_layers` then also reads chunks into the anonymous memory.
    for run in runs(&revert.unmapped, 0..chunks) {
        make_anonymous(linear, run).map_err(failed("unmapping a memory layer"))?;
    }
    map_layers(&revert.remaining, layers, linear)?;
    // Captured chunks retain their former mapping.
    let mapped = to.with_mappings_of(&revert.captured, from);
    Ok((mapped, retained.with(&to_read)))
}

/// Drops private pages. The mapping below (a file or zeroes) becomes visible again.
fn drop_pages(linear: &LinearMemory, pages: Range<u64>) -> Result<(), Errno> {
    linear.each_extent_of_pages(pages, |_, bytes, host| {
        // SAFETY: the range is inside guest memory, which is private and currently unused.
        let done = unsafe { libc::madvise(host.cast(), bytes, libc::MADV_DONTNEED) };
        Errno::result(done).map(drop)
    })
}

/// Replaces mapped chunks by zeroed anonymous memory.
fn make_anonymous(linear: &LinearMemory, run: Range<u64>) -> Result<(), Errno> {
    for (_, chunks, host) in linear.extents(run) {
        let length = usize::try_from(chunks * CHUNK_SIZE).map_err(|_| Errno::EOVERFLOW)?;
        // SAFETY: the range is inside guest memory, which is currently unused, and stays private
        // and writable.
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
        // SAFETY: advice for the mapping that was just created. It fails on kernels without huge
        // pages, on which memory is only slower.
        let _ = unsafe { libc::madvise(at, length, libc::MADV_HUGEPAGE) };
    }
    Ok(())
}

#[cfg(test)]
mod tests;

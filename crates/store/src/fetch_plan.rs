//! Plan of a pull. Chunks are stored in packs (objects with many chunks). The plan combines
//! requested chunks that are near each other in a pack to ranges, so that few requests suffice.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *frame* is a compressed and encrypted chunk in a
//! pack.

use crate::data_keys::Hash;
use crate::locations::Location;
use crate::pack::PackId;
use std::collections::{BTreeMap, HashMap};

/// Maximum length of a range. A short remainder may extend it.
pub(crate) const MAX_RANGE_BYTES: u64 = 4 << 20;
/// Maximum gap between two frames of a range whose length is at least [`MIN_RANGE_BYTES`]. Reading
/// the gap is cheaper than another request. The limit exceeds the length of an incompressible
/// frame, so that one unneeded frame does not split a range.
const MAX_GAP_BYTES: u64 = 128 << 10;
/// Length below which a range may include gaps of up to this length.
const MIN_RANGE_BYTES: u64 = 256 << 10;

/// Requested chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkRequest {
    /// Number of the chunk in its part.
    pub number: u64,
    pub hash: Hash,
    pub location: Location,
}

/// Frame in a range, with the numbers of all chunks that have its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedFrame {
    pub location: Location,
    pub hash: Hash,
    pub numbers: Vec<u64>,
}

/// Bytes `start..end` of a pack, which contain `frames`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedRange {
    pub pack: PackId,
    pub start: u64,
    pub end: u64,
    pub frames: Vec<PlannedFrame>,
}

/// Plans the ranges of `wanted`. Packs are ordered by their first requested chunk, and the ranges
/// of a pack by offset.
pub(crate) fn plan(wanted: &[ChunkRequest]) -> Vec<PlannedRange> {
    let mut order: Vec<PackId> = Vec::new();
    let mut packs: HashMap<PackId, BTreeMap<u32, PlannedFrame>> = HashMap::new();
    for chunk in wanted {
        let pack = packs.entry(chunk.location.pack).or_insert_with(|| {
            order.push(chunk.location.pack);
            BTreeMap::new()
        });
        let frame = pack
            .entry(chunk.location.offset)
            .or_insert_with(|| PlannedFrame {
                location: chunk.location,
                hash: chunk.hash,
                numbers: Vec::new(),
            });
        frame.numbers.push(chunk.number);
    }
    let mut ranges: Vec<PlannedRange> = Vec::new();
    for pack in order {
        for frame in packs.remove(&pack).unwrap_or_default().into_values() {
            let start = u64::from(frame.location.offset);
            let end = start + u64::from(frame.location.length);
            match ranges.last_mut() {
                Some(last) if last.pack == pack && joins(last, start, end) => {
                    last.end = last.end.max(end);
                    last.frames.push(frame);
                }
                _ => {
                    join_rest(&mut ranges);
                    ranges.push(PlannedRange {
                        pack,
                        start,
                        end,
                        frames: vec![frame],
                    });
                }
            }
        }
    }
    join_rest(&mut ranges);
    ranges
}

/// Joins the last two ranges if they belong to the same pack, the last one is short, and the gap
/// between them is small. The joined range may exceed [`MAX_RANGE_BYTES`].
fn join_rest(ranges: &mut Vec<PlannedRange>) {
    let [.., before, last] = &ranges[..] else {
        return;
    };
    let is_short = last.end - last.start < MIN_RANGE_BYTES;
    let gap = last.start.saturating_sub(before.end);
    if before.pack != last.pack || !is_short || gap > MIN_RANGE_BYTES {
        return;
    }
    if let Some(rest) = ranges.pop()
        && let Some(before) = ranges.last_mut()
    {
        before.end = before.end.max(rest.end);
        before.frames.extend(rest.frames);
    }
}

/// Returns whether the frame from `start` to `end` is fetched with the range before it. The bytes
/// of the gap are then fetched in vain, which costs less than another request.
fn joins(range: &PlannedRange, start: u64, end: u64) -> bool {
    let gap = start.saturating_sub(range.end);
    let allowed = if range.end - range.start < MIN_RANGE_BYTES {
        MIN_RANGE_BYTES
    } else {
        MAX_GAP_BYTES
    };
    gap <= allowed && end.saturating_sub(range.start) <= MAX_RANGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(number: u64, pack: u8, offset: u32, length: u32) -> ChunkRequest {
        let location = Location {
            pack: [pack; 16],
            offset,
            length,
        };
        ChunkRequest {
            number,
            hash: Hash([0; 32]),
            location,
        }
    }

    #[test]
    fn neighbours_are_read_together_and_ranges_have_a_limit() {
        let frames: Vec<ChunkRequest> = (0..200)
            .map(|n| wanted(n.into(), 1, 64 + n * 60_000, 60_000))
            .collect();
        let ranges = plan(&frames);
        assert_eq!(ranges.len(), 3);
        assert!(
            ranges
                .iter()
                .all(|range| range.end - range.start <= MAX_RANGE_BYTES + MIN_RANGE_BYTES)
        );
    }

    #[test]
    fn a_rest_that_is_short_is_read_with_the_range_before_it() {
        let end = MAX_RANGE_BYTES as u32;
        let ranges = plan(&[
            wanted(0, 1, 64, end - 64),
            wanted(1, 1, end, 100_000),
            wanted(2, 1, end + 150_000, 50_000),
            wanted(3, 1, end + 700_000, 100_000),
        ]);
        let places: Vec<_> = ranges
            .iter()
            .map(|range| (range.start, range.end, range.frames.len()))
            .collect();
        let end = MAX_RANGE_BYTES;
        let far = (end + 700_000, end + 800_000, 1);
        assert_eq!(places, [(64, end + 200_000, 3), far]);
    }

    #[test]
    fn distant_frames_and_other_packs_are_read_apart_in_the_order_wanted() {
        let ranges = plan(&[
            wanted(0, 2, 64, 100),
            wanted(1, 1, 64, 100),
            wanted(2, 2, 1 << 20, 100),
        ]);
        let places: Vec<_> = ranges
            .iter()
            .map(|range| (range.pack[0], range.start))
            .collect();
        assert_eq!(places, [(2, 64), (2, 1 << 20), (1, 64)]);
    }

    #[test]
    fn a_frame_of_several_chunks_is_read_once() {
        let ranges = plan(&[wanted(0, 1, 64, 100), wanted(9, 1, 64, 100)]);
        assert_eq!(ranges.len(), 1);
        assert_eq!(ranges[0].frames[0].numbers, [0, 9]);
    }
}

//! Buckets: the gradients that one all-reduce carries.
//!
//! A model has hundreds of gradients, from four bytes to a tenth of the model. A small one costs the latency of an operation,
//! and a large one keeps the others waiting. [`pack`] merges and splits them into buckets of nearly one size (AIACC-Training,
//! section V-B). It is a pure function of what all ranks know of the gradients, so all ranks cut the same buckets without a
//! message.

use penstock_types::ByteRange;
use std::collections::HashMap;

/// A gradient that is to be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The number by which all ranks know it.
    pub index: u32,
    /// Its length.
    pub bytes: u64,
    /// Entries of different classes (dtypes, reductions) never share a bucket.
    pub class: u32,
}

impl Entry {
    fn whole(self) -> Piece {
        Piece { index: self.index, range: ByteRange::new(0, self.bytes) }
    }
}

/// A part of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The entry's index.
    pub index: u32,
    /// The bytes of the entry.
    pub range: ByteRange,
}

/// Pieces of entries that one all-reduce carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The class of all its pieces.
    pub class: u32,
    /// The pieces, in the order in which they lie in the bucket.
    pub pieces: Vec<Piece>,
}

impl Bucket {
    fn whole(entry: Entry) -> Bucket {
        Bucket { class: entry.class, pieces: vec![entry.whole()] }
    }

    /// The length of all pieces.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.range.len()).sum()
    }
}

/// Merges whole entries into buckets of at most `bucket_bytes`; returns the entries' indices. A larger entry has a bucket of its
/// own. Entries of a class keep their order. Buckets come in the order of their first entries.
///
/// [`pack`] does this to its small entries. Fronts that are given complete lists (Horovod's fusion, JAX, TensorFlow) need only this.
///
/// Costs one pass over the entries.
#[must_use]
pub fn merge(entries: impl IntoIterator<Item = Entry>, bucket_bytes: u64) -> Vec<Vec<u32>> {
    let mut merger = Merger::new(bucket_bytes);
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut place = HashMap::new();
    for (position, entry) in entries.into_iter().enumerate() {
        place.entry(entry.index).or_insert(position);
        if entry.bytes >= bucket_bytes {
            buckets.push(Bucket::whole(entry));
        } else {
            buckets.extend(merger.add(entry));
        }
    }
    buckets.extend(merger.finish());
    buckets.sort_by_key(|bucket| place[&bucket.pieces[0].index]);
    buckets.into_iter().map(|bucket| bucket.pieces.iter().map(|piece| piece.index).collect()).collect()
}

/// Packs entries into buckets of at most `bucket_bytes`, rounded down to whole cache lines (but at least one).
///
/// A larger entry is cut at cache lines into nearly equal pieces, each a bucket of its own. A smaller one of at least
/// [`ALONE_BYTES`] is a bucket of its own. The others share buckets with their neighbours of the same class. Buckets come in
/// the order in which they are full; empty entries are in none.
///
/// Costs one pass over the entries.
#[must_use]
pub fn pack(entries: impl IntoIterator<Item = Entry>, bucket_bytes: u64) -> Vec<Bucket> {
    let bucket_bytes = (bucket_bytes - bucket_bytes % LINE_BYTES).max(LINE_BYTES);
    let mut buckets = Vec::new();
    let mut merger = Merger::new(bucket_bytes);
    for entry in entries.into_iter().filter(|entry| entry.bytes > 0) {
        let Entry { index, bytes, class } = entry;
        if bytes > bucket_bytes {
            let count = bytes.div_ceil(bucket_bytes);
            let each = (bytes.div_ceil(count)).next_multiple_of(LINE_BYTES).min(bucket_bytes);
            let starts = (0..).map(|piece| piece * each).take_while(|start| *start < bytes);
            let ranges = starts.map(|start| ByteRange::new(start, (start + each).min(bytes)));
            buckets.extend(ranges.map(|range| Bucket { class, pieces: vec![Piece { index, range }] }));
        } else if bytes >= ALONE_BYTES {
            buckets.push(Bucket::whole(entry));
        } else {
            buckets.extend(merger.add(entry));
        }
    }
    buckets.extend(merger.finish());
    buckets
}

/// The buckets that are not full yet, one a class.
struct Merger {
    bucket_bytes: u64,
    /// Each with its bytes.
    open: Vec<(u64, Bucket)>,
}

impl Merger {
    fn new(bucket_bytes: u64) -> Merger {
        Merger { bucket_bytes, open: Vec::new() }
    }

    /// Adds an entry to the open bucket of its class. Returns that bucket first if the entry has no room in it.
    fn add(&mut self, entry: Entry) -> Option<Bucket> {
        let Some((filled, bucket)) = self.open.iter_mut().find(|(_, bucket)| bucket.class == entry.class) else {
            self.open.push((entry.bytes, Bucket::whole(entry)));
            return None;
        };
        if *filled + entry.bytes > self.bucket_bytes {
            *filled = entry.bytes;
            return Some(std::mem::replace(bucket, Bucket::whole(entry)));
        }
        *filled += entry.bytes;
        bucket.pieces.push(entry.whole());
        None
    }

    /// The buckets that are left, none of them empty.
    fn finish(self) -> impl Iterator<Item = Bucket> {
        self.open.into_iter().map(|(_, bucket)| bucket)
    }
}

/// An operation costs some 100 us of the engine's time on each rank, as much as copying 1 MiB into a bucket and back. Half of
/// that size is a guess: the copy also keeps the engine from other work.
pub const ALONE_BYTES: u64 = 512 << 10;
/// Large entries are cut at whole cache lines, as chunks are; element sizes divide it.
pub const LINE_BYTES: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let large = ALONE_BYTES - 2..ALONE_BYTES + 2;
        let bytes = prop_oneof![Just(0), 1u64..2000, 1u64..100, Just(4096), 100_000u64..300_000, large];
        prop::collection::vec((bytes, 0u32..3), 0..60).prop_map(|list| {
            let entry = |(index, (bytes, class))| Entry { index: index as u32, bytes, class };
            list.into_iter().enumerate().map(entry).collect()
        })
    }

    proptest! {
        /// Whatever is packed, every byte of every entry is in one bucket, once; no bucket is too large or mixes classes; and no
        /// two buckets of a class could have been one.
        #[test]
        fn every_byte_is_in_one_bucket(entries in entries(), bucket_bytes in prop_oneof![1u64..10_000, 1u64..4 << 20]) {
            let buckets = pack(entries.iter().copied(), bucket_bytes);
            let limit = (bucket_bytes / LINE_BYTES * LINE_BYTES).max(LINE_BYTES);
            for entry in &entries {
                let mut ranges: Vec<ByteRange> = buckets.iter().flat_map(|bucket| &bucket.pieces)
                    .filter(|piece| piece.index == entry.index).map(|piece| piece.range).collect();
                ranges.sort();
                let mut end = 0;
                for range in &ranges {
                    prop_assert!(range.start == end && !range.is_empty(), "{:?}", ranges);
                    end = range.end;
                }
                prop_assert_eq!(end, entry.bytes);
                prop_assert!(entry.bytes > limit || ranges.len() <= 1, "{:?} was split", entry);
                prop_assert!(ranges.iter().all(|range| range.start % LINE_BYTES == 0));
            }
            for bucket in &buckets {
                prop_assert!(bucket.bytes() <= limit && bucket.bytes() > 0);
                prop_assert!(bucket.pieces.iter().all(|piece| entries[piece.index as usize].class == bucket.class));
            }
            for class in 0..3 {
                let merged: Vec<u64> = buckets.iter().filter(|bucket| bucket.class == class)
                    .filter(|bucket| {
                        let bytes = entries[bucket.pieces[0].index as usize].bytes;
                        bytes < ALONE_BYTES && bytes <= limit
                    }).map(Bucket::bytes).collect();
                prop_assert!(merged.windows(2).all(|pair| pair[0] + pair[1] > limit), "{:?}", merged);
            }
        }
    }

    proptest! {
        /// Every entry, empty ones too, is in one bucket. A bucket holds one class in its order, and more than one entry only
        /// within the limit. No two neighbouring buckets of merged entries could have been one.
        #[test]
        fn every_entry_is_merged_once(entries in entries(), bucket_bytes in prop_oneof![0u64..10_000, 1u64..4 << 20]) {
            let buckets = merge(entries.iter().copied(), bucket_bytes);
            let mut all: Vec<u32> = buckets.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..entries.len() as u32).collect::<Vec<_>>());
            let of = |bucket: &Vec<u32>| bucket.iter().map(|&index| entries[index as usize]).collect::<Vec<_>>();
            let bytes = |bucket: &[Entry]| bucket.iter().map(|entry| entry.bytes).sum::<u64>();
            prop_assert!(buckets.windows(2).all(|pair| pair[0][0] < pair[1][0]));
            for bucket in &buckets {
                prop_assert!(bucket.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", bucket);
                let bucket = of(bucket);
                prop_assert!(bucket.iter().all(|entry| entry.class == bucket[0].class));
                prop_assert!(bucket.len() == 1 || bytes(&bucket) <= bucket_bytes);
            }
            for class in 0..3 {
                let merged: Vec<_> = buckets.iter().map(of)
                    .filter(|bucket| bucket[0].class == class && bucket[0].bytes < bucket_bytes).collect();
                let fits = |pair: &[Vec<Entry>]| bytes(&pair[0]) + pair[1][0].bytes <= bucket_bytes;
                prop_assert!(!merged.windows(2).any(fits), "{:?}", merged);
            }
        }
    }

    /// A list of a model's gradients, cut as the documentation says.
    #[test]
    fn a_model() {
        let sizes = [40, 100, 100, 2500, 100, 900, 120, 4].map(|kib| kib << 10);
        let entries = sizes.iter().enumerate().map(|(index, &bytes)| Entry { index: index as u32, bytes, class: 0 });
        let buckets = pack(entries, 1000 << 10);
        let cut: Vec<Vec<(u32, u64, u64)>> = buckets
            .iter()
            .map(|bucket| {
                let range = |piece: &Piece| (piece.index, piece.range.start >> 10, piece.range.end >> 10);
                bucket.pieces.iter().map(range).collect()
            })
            .collect();
        let expected = [
            vec![(3, 0, 833)],
            vec![(3, 833, 1666)],
            vec![(3, 1666, 2500)],
            vec![(5, 0, 900)],
            vec![(0, 0, 40), (1, 0, 100), (2, 0, 100), (4, 0, 100), (6, 0, 120), (7, 0, 4)],
        ];
        assert_eq!(cut, expected);
    }
}

//! Buckets: the gradients that one all-reduce carries.
//!
//! A model has hundreds of gradients, from four bytes to a tenth of the model. A small one costs the latency of an operation,
//! and a large one keeps the others waiting. [`pack`] merges and splits them into buckets of nearly one size (AIACC-Training,
//! section V-B). It is a pure function of what all ranks know of the gradients, so all ranks cut the same buckets without a
//! message.

use penstock_types::ByteRange;

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
    /// The length of all pieces.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.range.len()).sum()
    }
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
    let mut open: Vec<(u64, Bucket)> = Vec::new();
    for Entry { index, bytes, class } in entries.into_iter().filter(|entry| entry.bytes > 0) {
        if bytes > bucket_bytes {
            let count = bytes.div_ceil(bucket_bytes);
            let each = (bytes.div_ceil(count)).next_multiple_of(LINE_BYTES).min(bucket_bytes);
            let starts = (0..).map(|piece| piece * each).take_while(|start| *start < bytes);
            let ranges = starts.map(|start| ByteRange::new(start, (start + each).min(bytes)));
            buckets.extend(ranges.map(|range| Bucket { class, pieces: vec![Piece { index, range }] }));
            continue;
        }
        if bytes >= ALONE_BYTES {
            buckets.push(Bucket { class, pieces: vec![Piece { index, range: ByteRange::new(0, bytes) }] });
            continue;
        }
        let at = match open.iter().position(|(_, bucket)| bucket.class == class) {
            Some(at) => at,
            None => {
                open.push((0, Bucket { class, pieces: Vec::new() }));
                open.len() - 1
            }
        };
        let (filled, bucket) = &mut open[at];
        if *filled + bytes > bucket_bytes {
            buckets.push(Bucket { class, pieces: std::mem::take(&mut bucket.pieces) });
            *filled = 0;
        }
        *filled += bytes;
        bucket.pieces.push(Piece { index, range: ByteRange::new(0, bytes) });
    }
    buckets.extend(open.into_iter().map(|(_, bucket)| bucket).filter(|bucket| !bucket.pieces.is_empty()));
    buckets
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

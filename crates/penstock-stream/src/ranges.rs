//! A set of numbers as ranges: what was granted, which bytes are here.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint half-open ranges that never touch: as many as the set has pieces.
#[derive(Debug, Default)]
pub struct Ranges {
    /// Maps the start of each range to its end.
    ranges: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Adds a range; parts that are in the set already stay.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&old_start, &old_end)) = self.ranges.range(..=end).next_back()
            && old_end >= start
        {
            self.ranges.remove(&old_start);
            start = start.min(old_start);
            end = end.max(old_end);
        }
        self.ranges.insert(start, end);
    }

    /// Whether all of the range is in the set.
    #[must_use]
    pub fn covers(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.ranges.range(..=range.start).next_back().is_some_and(|(_, end)| *end >= range.end)
    }

    /// Whether any of the range is in the set.
    #[must_use]
    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        !range.is_empty() && self.ranges.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }

    /// Adds another set.
    pub fn extend(&mut self, other: Ranges) {
        other.ranges.into_iter().for_each(|(start, end)| self.insert(start..end));
    }

    /// Removes a range; parts that are not in the set are ignored.
    pub fn remove(&mut self, range: Range<u64>) {
        while let Some((&start, &end)) = self.ranges.range(..range.end).next_back()
            && end > range.start
            && !range.is_empty()
        {
            self.ranges.remove(&start);
            if end > range.end {
                self.ranges.insert(range.end, end);
            }
            if start < range.start {
                self.ranges.insert(start, range.start);
            }
        }
    }

    /// How many numbers it holds.
    #[cfg(test)]
    pub(crate) fn total(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }

    /// Whether it holds no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many disjoint ranges the set consists of.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ranges.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The set agrees with a plain list of booleans, and never holds two ranges that could be one.
        #[test]
        fn agrees_with_a_bitmap(changes in proptest::collection::vec((0u64..60, 0u64..9, any::<bool>()), 0..20)) {
            let mut ranges = Ranges::default();
            let mut bitmap = [false; 70];
            for (start, len, add) in changes {
                if add {
                    ranges.insert(start..start + len);
                } else {
                    ranges.remove(start..start + len);
                }
                bitmap[start as usize..(start + len) as usize].fill(add);
                for from in 0..69u64 {
                    for to in [from, from + 1, (from + 7).min(70)] {
                        let bits = &bitmap[from as usize..to as usize];
                        prop_assert_eq!(ranges.covers(&(from..to)), bits.iter().all(|bit| *bit));
                        prop_assert_eq!(ranges.overlaps(&(from..to)), bits.iter().any(|bit| *bit));
                    }
                }
                let runs = (0..70).filter(|at| bitmap[*at] && (*at == 0 || !bitmap[at - 1])).count();
                prop_assert_eq!((ranges.count(), ranges.is_empty()), (runs, runs == 0));
                prop_assert_eq!(ranges.total(), bitmap.iter().filter(|bit| **bit).count() as u64);
            }
        }
    }
}

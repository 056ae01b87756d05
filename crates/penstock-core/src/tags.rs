//! How many messages were issued under each tag.

use std::collections::BTreeMap;

/// A counter for each tag. Neighbouring tags with the same count share an entry, so a program that uses consecutive tags, each
/// once, does not make it grow.
#[derive(Debug, Default)]
pub struct Tags {
    /// First tag of a run to its last tag and count. Runs are disjoint; neighbouring runs differ in their count.
    runs: BTreeMap<u32, (u32, u64)>,
}

impl Tags {
    /// How many there were under a tag.
    #[must_use]
    pub fn count(&self, tag: u32) -> u64 {
        self.run_of(tag).map_or(0, |(_, _, count)| count)
    }

    /// Increments a tag's count, and returns the count before.
    pub fn add(&mut self, tag: u32) -> u64 {
        let run = self.run_of(tag);
        let before = run.map_or(0, |(.., count)| count);
        if let Some((first, last, count)) = run {
            self.runs.remove(&first);
            if first < tag {
                self.runs.insert(first, (tag - 1, count));
            }
            if tag < last {
                self.runs.insert(tag + 1, (last, count));
            }
        }
        let count = before + 1;
        let (mut first, mut last) = (tag, tag);
        if let Some((start, _, _)) = tag.checked_sub(1).and_then(|left| self.run_of(left)).filter(|run| run.2 == count)
        {
            self.runs.remove(&start);
            first = start;
        }
        if let Some((start, end, _)) =
            tag.checked_add(1).and_then(|right| self.run_of(right)).filter(|run| run.2 == count)
        {
            self.runs.remove(&start);
            last = end;
        }
        self.runs.insert(first, (last, count));
        before
    }

    /// First tag, last tag and count of the run that contains a tag.
    fn run_of(&self, tag: u32) -> Option<(u32, u32, u64)> {
        let (&first, &(last, count)) = self.runs.range(..=tag).next_back()?;
        (tag <= last).then_some((first, last, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// In any order of tags, also the first and the last one there are, the counts are those of a plain map, and no two
    /// neighbouring runs could be one.
    #[test]
    fn agrees_with_a_map() {
        for seed in 0..200u64 {
            let mut random = fastrand::Rng::with_seed(seed);
            let offset = if seed % 2 == 0 { 0 } else { u32::MAX - 11 };
            let (mut tags, mut plain) = (Tags::default(), HashMap::new());
            for _ in 0..200 {
                let tag = offset + random.u32(0..12);
                let count: &mut u64 = plain.entry(tag).or_default();
                assert_eq!(tags.add(tag), *count, "seed {seed}");
                *count += 1;
            }
            assert!((0..12).all(|tag| tags.count(offset + tag) == plain.get(&(offset + tag)).copied().unwrap_or(0)));
            let runs: Vec<_> = tags.runs.iter().map(|(first, (last, count))| (*first, *last, *count)).collect();
            assert!(runs.windows(2).all(|pair| pair[0].1 < pair[1].0), "{runs:?}");
            assert!(runs.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0 || pair[0].2 != pair[1].2), "{runs:?}");
        }
    }

    /// A tag a message, in turn, takes one entry.
    #[test]
    fn tags_in_turn_take_one_entry() {
        let mut tags = Tags::default();
        for tag in 0..10_000 {
            tags.add(tag);
        }
        assert_eq!((tags.runs.len(), tags.count(9_999), tags.count(10_000)), (1, 1, 0));
    }
}

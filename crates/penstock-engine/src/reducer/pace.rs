//! What is just worth a round and a bucket: how large the smallest ones are, at the beginning of a pass and at its end.

use std::time::Duration;

/// How fast a reducer's rounds and buckets have been at best.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Of the shortest round: what it takes to ask all ranks when none keeps the others waiting.
    round: Option<Duration>,
    /// Of the fastest bucket, which shared the link with few others.
    bytes_per_s: Option<f64>,
}

impl Pace {
    /// A round has ended.
    pub(super) fn add_round(&mut self, took: Duration) {
        self.round = Some(self.round.map_or(took, |shortest| shortest.min(took)));
    }

    /// A bucket has ended, of so many bytes of gradients. How long a small one takes says nothing of the rate.
    pub(super) fn add_bucket(&mut self, bytes: u64, took: Duration) {
        if bytes >= FEWEST_BYTES {
            let rate = bytes as f64 / took.as_secs_f64().max(f64::MIN_POSITIVE);
            self.bytes_per_s = Some(self.bytes_per_s.map_or(rate, |fastest| fastest.max(rate)));
        }
    }

    /// The least that a round carries before the end of a pass. Every byte of it leaves earlier than it would otherwise, by up to
    /// the time that so many bytes take. The round costs a round's time, if the next one has to wait for it; and processor
    /// time for one more round and bucket.
    pub(super) fn least_bytes(&self) -> u64 {
        // Nothing was measured before the end of the first pass: all rounds carry a bucket.
        let (Some(round), Some(rate)) = (self.round, self.bytes_per_s) else { return u64::MAX };
        ((WORTH * round.as_secs_f64() * rate) as u64).max(FEWEST_BYTES)
    }
}

/// How many rounds' time its bytes must take: one that the next round may wait, one of processor time, and as much to be gained.
const WORTH: f64 = 4.0;
/// Four frames of a link that carries few. An operation of less costs no less processor time.
const FEWEST_BYTES: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// The shortest round and the fastest bucket count, whatever comes before and after them; small buckets do not count. One that
    /// takes no time is no defect.
    #[test]
    fn the_best_of_each_counts() {
        let mut pace = Pace::default();
        pace.add_bucket(100, Duration::ZERO);
        assert_eq!(pace.least_bytes(), u64::MAX);
        for (round_ms, bytes) in [(3, 1 << 20), (1, 1 << 10), (20, 1 << 21), (2, 1 << 20)] {
            pace.add_round(Duration::from_millis(round_ms));
            pace.add_bucket(bytes, Duration::from_millis(10));
        }
        // 2 MiB in 10 ms, four times 1 ms.
        assert!(pace.least_bytes().abs_diff((1 << 21) * 4 / 10) <= 1, "{pace:?}");
        pace.add_round(Duration::from_micros(1));
        assert_eq!(pace.least_bytes(), FEWEST_BYTES);
        pace.add_bucket(1 << 20, Duration::ZERO);
        assert_eq!(pace.least_bytes(), u64::MAX);
    }
}

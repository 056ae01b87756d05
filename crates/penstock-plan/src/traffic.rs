//! The bytes between ranks: [`traffic`].

use crate::{Collective, Placement, PlanError, Request, Thresholds, choose, segment_bytes, steps};

/// The payload bytes that each of `world` ranks, every one on a host of its own, sends to each rank in one operation. Entry
/// `[a][b]` goes from `a` to `b`. `bytes` is [`Request::bytes`].
///
/// The algorithm is the one for large messages, whatever `bytes` is, because it sends the fewest bytes.
///
/// # Errors
/// Those of [`steps`].
///
/// Cost: makes the plans of all ranks, some microseconds for each step.
pub fn traffic(collective: Collective, world: u32, bytes: u64) -> Result<Vec<Vec<u64>>, PlanError> {
    let placement = Placement::separate_hosts(world);
    let thresholds = Thresholds::default();
    let only_large =
        Thresholds { exchange_bytes: 0, doubling_bytes: 0, latency_chunk_bytes: 0, tree_bytes: 0, ..thresholds };
    let segment_bytes = segment_bytes(collective, placement.medium(), world, bytes, &thresholds);
    let sent = |rank| {
        let placement = placement.clone();
        let request =
            Request { collective, world, rank, placement, bytes, element_bytes: 1, splits: None, segment_bytes };
        let (algorithm, _) = choose(&request, &only_large);
        Ok(steps(&request, algorithm)?.sent_bytes(world))
    };
    (0..world).map(sent).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring for large all-reduces and a chain for large broadcasts, also where so few bytes would take another algorithm.
    #[test]
    fn takes_the_algorithms_for_large_messages() {
        let ring = vec![vec![0, 256, 0], vec![0, 0, 256], vec![256, 0, 0]];
        assert_eq!(traffic(Collective::AllReduce, 3, 192).unwrap(), ring);
        let chain = vec![vec![0, 0, 0], vec![5, 0, 0], vec![0, 5, 0]];
        assert_eq!(traffic(Collective::Reduce { root: 0 }, 3, 5).unwrap(), chain);
        assert_eq!(traffic(Collective::AllReduce, 1, 3).unwrap(), vec![vec![0]]);
    }

    /// What does not divide by the ranks is no all-gather.
    #[test]
    fn refuses_what_has_no_plan() {
        assert!(traffic(Collective::AllGather, 3, 4).is_err());
    }
}

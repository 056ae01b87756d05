//! What of a tensor goes to which server: what the plan of an aggregated all-reduce pushes.

use penstock_plan::{Action, Algorithm, Collective, Placement, Plans, Request};
use penstock_types::DType;
use std::ops::Range;

/// Asks for one group's plans.
pub(super) struct Shares {
    rank: u32,
    world: u32,
    placement: Placement,
    plans: Plans,
}

impl Shares {
    /// `weights`: of each server, its part of each tensor.
    pub(super) fn new(rank: u32, world: u32, weights: &[u32]) -> Shares {
        let placement = Placement::separate_hosts(world).with_servers(weights);
        Shares { rank, world, placement, plans: Plans::default() }
    }

    /// The bytes that each server adds, in the order of the servers; alike on all ranks. A packet is for `block_bytes` of them.
    pub(super) fn of(&mut self, dtype: DType, bytes: usize, block_bytes: usize) -> Vec<Range<usize>> {
        let request = Request {
            collective: Collective::AllReduce,
            world: self.world,
            rank: self.rank,
            placement: self.placement.clone(),
            bytes: bytes as u64,
            element_bytes: dtype.size() as u32,
            splits: None,
            segment_bytes: block_bytes as u64,
        };
        let steps = self.plans.steps(&request, Algorithm::Aggregated).expect("whole elements, and there are servers");
        let mut shares = vec![Range::default(); self.placement.servers().len()];
        for step in &steps.steps {
            let Action::Push { server, src } = step.action else { continue };
            shares[server as usize] = src.start as usize..(src.start + src.len) as usize;
        }
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte goes to one server, by weight, cut at cache lines; a tensor that is too short leaves a server nothing.
    #[test]
    fn servers_share_a_tensor() {
        let mut shares = Shares::new(1, 3, &[3, 1]);
        assert_eq!(shares.of(DType::F32, 4096, 1408), [0..3072, 3072..4096]);
        assert_eq!(shares.of(DType::F16, 1002, 1408), [0..768, 768..1002]);
        assert_eq!(shares.of(DType::F32, 60, 1408), [0..0, 0..60]);
        assert_eq!(Shares::new(0, 2, &[1, 1, 2]).of(DType::BF16, 130, 64), [0..0, 0..64, 64..130]);
    }
}

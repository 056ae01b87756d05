//! A request for a plan: [`Request`], and why it has none: [`PlanError`].

use crate::{Algorithm, Collective, Placement};

/// How an all-to-all with unequal parts cuts this rank's buffers, in bytes. Part `p` of `input` goes to rank `p`; part
/// `p` of `output` comes from rank `p`; the parts lie one after the other in rank order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Splits {
    /// Bytes for each rank; as many entries as ranks.
    pub input: Vec<u64>,
    /// Bytes from each rank; as many entries as ranks. The entry of rank `p` equals `p`'s `input` entry for us.
    pub output: Vec<u64>,
}

/// One rank's part of one operation, as far as its plan depends on it. All ranks pass the same values, but for `rank`,
/// `splits`, and the direction of a send.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// What to do.
    pub collective: Collective,
    /// Ranks in the group.
    pub world: u32,
    /// This rank.
    pub rank: u32,
    /// Which ranks share a host.
    pub placement: Placement,
    /// How much, by the collective:
    ///
    /// | collective | `bytes` | input buffer | output buffer |
    /// |---|---|---|---|
    /// | all-reduce, broadcast, reduce | the tensor | none | `bytes` |
    /// | reduce-scatter | the whole, `world` equal chunks | `bytes` | `bytes / world` |
    /// | all-gather | the whole, `world` equal chunks | `bytes / world` | `bytes` |
    /// | gather | one rank's part | `bytes` | root: `world * bytes` |
    /// | scatter | one rank's part | root: `world * bytes` | `bytes` |
    /// | all-to-all | this rank's whole buffer, `world` equal parts; not read when there are splits | `bytes` | `bytes` |
    /// | all-to-all with splits | | sum of `input` | sum of `output` |
    /// | send | the message | `bytes` | none |
    /// | recv | the message | none | `bytes` |
    /// | barrier | not read | none | none |
    pub bytes: u64,
    /// Bytes an element: a power of two up to 16 where the collective reduces, any where it only moves bytes. No
    /// reduction starts or ends within an element.
    pub element_bytes: u32,
    /// All-to-all only: unequal parts. `None` means equal parts.
    pub splits: Option<Splits>,
    /// The size of the pieces that flow through the steps one after the other; a positive multiple of 16.
    /// [`crate::segment_bytes`] gives a good one. Smaller: less time to fill a pipeline, more messages.
    pub segment_bytes: u64,
}

impl Request {
    /// Length of the buffer that [`crate::Buf::Input`] means on this rank.
    #[must_use]
    pub fn input_bytes(&self) -> u64 {
        match self.collective {
            Collective::ReduceScatter | Collective::Gather { .. } | Collective::Send { .. } => self.bytes,
            Collective::AllGather => self.bytes / u64::from(self.world),
            Collective::Scatter { root } if root == self.rank => self.bytes * u64::from(self.world),
            Collective::AllToAll => self.splits.as_ref().map_or(self.bytes, |splits| splits.input.iter().sum()),
            _ => 0,
        }
    }

    /// Length of the buffer that [`crate::Buf::Output`] means on this rank.
    #[must_use]
    pub fn output_bytes(&self) -> u64 {
        match self.collective {
            Collective::AllReduce
            | Collective::Broadcast { .. }
            | Collective::Reduce { .. }
            | Collective::AllGather
            | Collective::Scatter { .. }
            | Collective::Recv { .. } => self.bytes,
            Collective::ReduceScatter => self.bytes / u64::from(self.world),
            Collective::Gather { root } if root == self.rank => self.bytes * u64::from(self.world),
            Collective::AllToAll => self.splits.as_ref().map_or(self.bytes, |splits| splits.output.iter().sum()),
            _ => 0,
        }
    }

    /// Checks whether there is a plan; the error says why not.
    pub(crate) fn validate(&self) -> Result<(), PlanError> {
        let Request { collective, world, rank, bytes, element_bytes, .. } = *self;
        if rank >= world {
            return Err(PlanError::Rank { rank, world });
        }
        if self.placement.world() != world {
            return Err(PlanError::Placement { hosts_of: self.placement.world(), world });
        }
        if let Some(named) = collective.named_rank() {
            if named >= world {
                return Err(PlanError::Rank { rank: named, world });
            }
            if named == rank && matches!(collective, Collective::Send { .. } | Collective::Recv { .. }) {
                return Err(PlanError::ToSelf { collective: collective.name(), rank });
            }
        }
        if self.segment_bytes == 0 || !self.segment_bytes.is_multiple_of(16) {
            return Err(PlanError::Segment { segment_bytes: self.segment_bytes });
        }
        if collective.reduces() && !(element_bytes.is_power_of_two() && element_bytes <= 16) {
            return Err(PlanError::Element { element_bytes });
        }
        let parts = match collective {
            Collective::ReduceScatter | Collective::AllGather => u64::from(world),
            Collective::AllToAll if self.splits.is_none() => u64::from(world),
            _ => 1,
        };
        let unit = if collective.reduces() { parts * u64::from(element_bytes) } else { parts };
        if bytes % unit != 0 {
            return Err(PlanError::Uneven { collective: collective.name(), bytes, unit });
        }
        if bytes.checked_mul(u64::from(world)).is_none() {
            return Err(PlanError::TooLarge { bytes, world });
        }
        let Some(splits) = &self.splits else { return Ok(()) };
        if collective != Collective::AllToAll {
            return Err(PlanError::Splits { what: "only an all-to-all takes splits" });
        }
        if splits.input.len() != world as usize || splits.output.len() != world as usize {
            return Err(PlanError::Splits { what: "there must be one input and one output split for each rank" });
        }
        if splits.input[rank as usize] != splits.output[rank as usize] {
            return Err(PlanError::Splits { what: "this rank's input split for itself differs from its output split" });
        }
        let total = |parts: &[u64]| parts.iter().try_fold(0u64, |sum, &part| sum.checked_add(part));
        if total(&splits.input).is_none() || total(&splits.output).is_none() {
            return Err(PlanError::Splits { what: "the splits add up to more than 64 bits hold" });
        }
        Ok(())
    }
}

impl Algorithm {
    /// Whether it does what is asked for.
    pub(crate) fn is_for(self, request: &Request) -> bool {
        let aggregated = self == Algorithm::Aggregated && request.collective == Collective::AllReduce;
        Algorithm::of(request.collective).contains(&self) || aggregated && !request.placement.servers().is_empty()
    }
}

/// Why there is no plan. Every one is the caller's to fix; nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The algorithm does not do this collective; [`Algorithm::of`] lists those that do.
    #[error("{algorithm} is no algorithm for {collective}; choose one of: {}", Algorithm::names(.offered))]
    NotFor {
        /// The algorithm.
        algorithm: Algorithm,
        /// The collective.
        collective: &'static str,
        /// The algorithms of that collective.
        offered: &'static [Algorithm],
    },
    /// A rank or root lies outside the group.
    #[error("rank {rank} is not in a group of {world} ranks")]
    Rank {
        /// The rank or root.
        rank: u32,
        /// Ranks in the group.
        world: u32,
    },
    /// The placement has another number of ranks.
    #[error("a placement of {hosts_of} ranks for a group of {world}")]
    Placement {
        /// Ranks in the placement.
        hosts_of: u32,
        /// Ranks in the group.
        world: u32,
    },
    /// A send to, or a receive from, the rank itself.
    #[error("{collective} on rank {rank} names rank {rank} itself; copy the tensor instead")]
    ToSelf {
        /// Send or recv.
        collective: &'static str,
        /// The rank.
        rank: u32,
    },
    /// Bytes that do not divide into whole elements, or into equal chunks of whole elements.
    #[error("{collective} of {bytes} bytes: must be a multiple of {unit} (ranks that share it times bytes an element)")]
    Uneven {
        /// The collective.
        collective: &'static str,
        /// The number of bytes.
        bytes: u64,
        /// The number that must divide them.
        unit: u64,
    },
    /// An element size that no reduction has.
    #[error("cannot reduce elements of {element_bytes} bytes; must be 1, 2, 4, 8 or 16")]
    Element {
        /// Bytes an element.
        element_bytes: u32,
    },
    /// A segment size that would cut elements.
    #[error("segments of {segment_bytes} bytes; must be a positive multiple of 16")]
    Segment {
        /// Bytes a segment.
        segment_bytes: u64,
    },
    /// Splits that do not match the request.
    #[error("all-to-all splits: {what}")]
    Splits {
        /// What is wrong with them.
        what: &'static str,
    },
    /// More bytes than can be addressed.
    #[error("{bytes} bytes on each of {world} ranks is more than 64 bits address")]
    TooLarge {
        /// [`Request::bytes`].
        bytes: u64,
        /// Ranks in the group.
        world: u32,
    },
    /// More segments than there are message numbers.
    #[error("{messages} messages are more than the 2^32 that a plan can number; use larger segments")]
    TooManyMessages {
        /// How many message numbers it would take.
        messages: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps;

    fn good() -> Request {
        Request {
            collective: Collective::AllReduce,
            world: 4,
            rank: 3,
            placement: Placement::separate_hosts(4),
            bytes: 4096,
            element_bytes: 4,
            splits: None,
            segment_bytes: 1024,
        }
    }

    fn refusal(request: Request, algorithm: Algorithm) -> String {
        steps(&request, algorithm).expect_err("there is no such plan").to_string()
    }

    /// Every contradiction is refused, in words that name it.
    #[test]
    fn contradictions_are_refused() {
        assert!(steps(&good(), Algorithm::Ring).is_ok());
        let not_for = refusal(good(), Algorithm::Tree);
        assert!(not_for.contains("tree") && not_for.contains("ring, halving-doubling"), "{not_for}");
        assert!(refusal(Request { rank: 4, ..good() }, Algorithm::Ring).contains("rank 4"));
        assert!(refusal(Request { placement: Placement::one_host(3), ..good() }, Algorithm::Ring).contains("3 ranks"));
        assert!(refusal(Request { world: 0, rank: 0, ..good() }, Algorithm::Ring).contains("rank 0"));
        let broadcast = Request { collective: Collective::Broadcast { root: 9 }, ..good() };
        assert!(refusal(broadcast, Algorithm::Tree).contains("rank 9"));
        let to_self = Request { collective: Collective::Send { to: 3 }, ..good() };
        assert!(refusal(to_self, Algorithm::Direct).contains("itself"));
        assert!(refusal(Request { bytes: 4097, ..good() }, Algorithm::Ring).contains("4097"));
        let uneven = Request { collective: Collective::ReduceScatter, bytes: 4100, ..good() };
        assert!(refusal(uneven, Algorithm::Ring).contains("multiple of 16"));
        assert!(refusal(Request { element_bytes: 12, ..good() }, Algorithm::Ring).contains("12 bytes"));
        assert!(refusal(Request { segment_bytes: 24, ..good() }, Algorithm::Ring).contains("24 bytes"));
        assert!(refusal(Request { segment_bytes: 0, ..good() }, Algorithm::Ring).contains("0 bytes"));
        let many = Request { bytes: 1 << 40, segment_bytes: 16, ..good() };
        assert!(refusal(many, Algorithm::Ring).contains("messages"));
        assert!(refusal(Request { bytes: u64::MAX - 3, ..good() }, Algorithm::Ring).contains("64 bits"));
    }

    /// Splits must be one a rank, agree on what the rank keeps, and belong to an all-to-all.
    #[test]
    fn splits_are_checked() {
        let with = |input: &[u64], output: &[u64]| Request {
            collective: Collective::AllToAll,
            splits: Some(Splits { input: input.to_vec(), output: output.to_vec() }),
            ..good()
        };
        assert!(steps(&with(&[1, 2, 3, 4], &[9, 0, 0, 4]), Algorithm::Direct).is_ok());
        assert!(refusal(with(&[1, 2, 3], &[9, 0, 0, 4]), Algorithm::Direct).contains("each rank"));
        assert!(refusal(with(&[1, 2, 3, 5], &[9, 0, 0, 4]), Algorithm::Direct).contains("itself"));
        assert!(refusal(with(&[u64::MAX, 2, 3, 4], &[9, 0, 0, 4]), Algorithm::Direct).contains("64 bits"));
        let splits = with(&[1, 2, 3, 4], &[9, 0, 0, 4]).splits;
        assert!(refusal(Request { splits, ..good() }, Algorithm::Ring).contains("only an all-to-all"));
    }
}

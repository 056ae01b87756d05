//! Ways to do a collective: [`Algorithm`].

use std::{fmt, str::FromStr};

use crate::Collective;

/// A way to do a collective. `docs/design/algorithms.md` describes each; the names here are those of environment settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// Every rank sends to the next rank only. Moves the fewest bytes; its latency grows with the number of ranks. For
    /// broadcast and reduce: the same ring cut open, a pipelined chain.
    Ring,
    /// All-reduce in 2 log2(n) rounds that halve, then double, what is exchanged.
    HalvingDoubling,
    /// All-reduce in log2(n) rounds, each of which exchanges the whole tensor.
    RecursiveDoubling,
    /// All-reduce in one round: everybody sends everything to everybody.
    Exchange,
    /// Every byte goes straight to the rank that needs it.
    Direct,
    /// A binomial tree.
    Tree,
    /// All-reduce that reduces within each host, goes around a ring of hosts, and collects within each host.
    Hierarchical,
    /// A barrier in log2(n) rounds of notifications over doubling distances.
    Dissemination,
    /// All-reduce through servers, and aggregators on the way to them, that add what all ranks push
    /// (`docs/design/aggregation.md`). Only where the placement has servers.
    Aggregated,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: &'static [Algorithm] = &[
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::RecursiveDoubling,
        Algorithm::Exchange,
        Algorithm::Direct,
        Algorithm::Tree,
        Algorithm::Hierarchical,
        Algorithm::Dissemination,
        Algorithm::Aggregated,
    ];

    /// The algorithms that [`crate::steps`] has for a collective among ranks alone. Where the placement has servers, an
    /// all-reduce can also be [`Algorithm::Aggregated`].
    #[must_use]
    pub fn of(collective: Collective) -> &'static [Algorithm] {
        use Algorithm::{
            Direct, Dissemination, Exchange, HalvingDoubling, Hierarchical, RecursiveDoubling, Ring, Tree,
        };
        match collective {
            Collective::AllReduce => &[Ring, HalvingDoubling, RecursiveDoubling, Exchange, Direct, Hierarchical],
            Collective::ReduceScatter | Collective::AllGather => &[Ring, Direct],
            Collective::Broadcast { .. } | Collective::Reduce { .. } => &[Ring, Tree, Direct],
            Collective::Barrier => &[Dissemination],
            Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::AllToAll
            | Collective::Send { .. }
            | Collective::Recv { .. } => &[Direct],
        }
    }

    /// The name in settings and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::Exchange => "exchange",
            Algorithm::Direct => "direct",
            Algorithm::Tree => "tree",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Dissemination => "dissemination",
            Algorithm::Aggregated => "aggregated",
        }
    }

    /// Whether a rank reduces messages of any other ranks in one step when it runs `collective` this way: the transport
    /// must then hold each of them until all are there. Memory does that for nothing; on the wire it is bounded by
    /// [`crate::Thresholds::eager_limit_bytes`]. `hierarchical` holds messages of its own host only, so it is none of these.
    #[must_use]
    pub fn holds_messages(self, collective: Collective) -> bool {
        collective.reduces() && matches!(self, Algorithm::Exchange | Algorithm::Direct)
    }

    pub(crate) fn names(algorithms: &[Algorithm]) -> String {
        algorithms.iter().map(|algorithm| algorithm.name()).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Algorithm, UnknownAlgorithm> {
        Algorithm::ALL
            .iter()
            .copied()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| UnknownAlgorithm { name: name.to_owned() })
    }
}

/// A name that is no algorithm's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown algorithm {name:?}; choose one of: {}", Algorithm::names(Algorithm::ALL))]
pub struct UnknownAlgorithm {
    /// The name.
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read from a setting is what is printed in a log; anything else is refused with the list.
    #[test]
    fn names_round_trip() {
        for &algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        let error = "rnig".parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.contains("rnig") && error.contains("halving-doubling"), "{error}");
    }
}

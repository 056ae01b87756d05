//! What ranks do together: [`Collective`].

/// What the ranks of a group do together. A root is a rank of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the reduction of all contributions. In place.
    AllReduce,
    /// Rank `r` gets chunk `r` of the reduction.
    ReduceScatter,
    /// Every rank gets the chunks of all ranks, in rank order.
    AllGather,
    /// Every rank gets the root's bytes. In place.
    Broadcast {
        /// Who has the bytes.
        root: u32,
    },
    /// The root gets the reduction; the other ranks keep their contribution. In place.
    Reduce {
        /// Who gets the result.
        root: u32,
    },
    /// The root gets every rank's part, in rank order.
    Gather {
        /// Who gets the parts.
        root: u32,
    },
    /// Rank `r` gets part `r` of the root's bytes.
    Scatter {
        /// Who has the parts.
        root: u32,
    },
    /// Rank `r` gets part `r` of every rank's bytes, in rank order.
    AllToAll,
    /// Nobody returns before everybody has come. No bytes.
    Barrier,
    /// Give the bytes to one rank, whose operation is the matching `Recv`.
    Send {
        /// Receiving rank in the group.
        to: u32,
    },
    /// Take the bytes of one rank, whose operation is the matching `Send`.
    Recv {
        /// Sending rank in the group.
        from: u32,
    },
}

impl Collective {
    /// The name that logs and errors use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllGather => "all-gather",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Reduce { .. } => "reduce",
            Collective::Gather { .. } => "gather",
            Collective::Scatter { .. } => "scatter",
            Collective::AllToAll => "all-to-all",
            Collective::Barrier => "barrier",
            Collective::Send { .. } => "send",
            Collective::Recv { .. } => "recv",
        }
    }

    /// Whether it does arithmetic, or only moves bytes.
    #[must_use]
    pub fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce { .. })
    }

    /// The other rank that the operation names: a root, or the peer of a send or receive.
    #[must_use]
    pub fn named_rank(self) -> Option<u32> {
        match self {
            Collective::Broadcast { root: rank }
            | Collective::Reduce { root: rank }
            | Collective::Gather { root: rank }
            | Collective::Scatter { root: rank }
            | Collective::Send { to: rank }
            | Collective::Recv { from: rank } => Some(rank),
            _ => None,
        }
    }
}

//! What a reducer is made for, and what it counts.

use crate::Group;
use penstock_plan::Algorithm;
use penstock_types::{DType, Failure, FailureKind, Priority, ReduceOp};

/// A gradient's description, the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gradient {
    /// Its name in errors.
    pub name: String,
    /// Number of elements.
    pub elements: u64,
    /// Element type.
    pub dtype: DType,
    /// Its shape, and where its elements lie in memory: any number that identifies both, the same on all ranks.
    pub order: u64,
}

/// A reducer's parameters, the same on all ranks.
#[derive(Debug)]
pub struct ReducerSpec {
    /// The channel for rounds. Nothing else uses it.
    pub rounds: Group,
    /// The channel for buckets. Nothing else uses it.
    pub buckets: Group,
    /// This rank in the group.
    pub rank: u32,
    /// The number of ranks in the group.
    pub world: u32,
    /// The gradients, by index.
    pub gradients: Vec<Gradient>,
    /// [`ReduceOp::Sum`] or [`ReduceOp::Avg`].
    pub op: ReduceOp,
    /// The size of a bucket: what one all-reduce carries.
    pub bucket_bytes: u64,
    /// Send float32 gradients as [`DType::F16`] or [`DType::BF16`]. Each rank rounds its own gradient once; each sum is
    /// computed in float32 and rounded once. An average is divided before it is rounded, so that a sum does not overflow.
    pub wire: Option<DType>,
    /// Keep what rounding for the wire takes off each of this rank's gradients, and add it to the next one before that is
    /// rounded (Seide et al. 2014, section 3; Karimireddy et al. 2019, algorithm 2). Takes four bytes an element, and has no
    /// effect without `wire`. The rounding of sums on the way is not kept (docs/guide/compression.md).
    pub error_feedback: bool,
    /// Fail all ranks when a submitted gradient holds NaN or infinity, and name it. Costs one more read of the gradient.
    pub check_finite: bool,
    /// How urgent rounds and buckets are.
    pub priority: Priority,
    /// Of the gradients that ranks have agreed on, send those of higher indices first: the next forward pass needs its first layer
    /// first, whose gradient comes last (ByteScheduler, Peng et al. 2019). All buckets are less urgent than `priority` then.
    pub last_first: bool,
    /// Time-out of an all-reduce, in nanoseconds.
    pub timeout: u64,
}

/// How gradients travel. It may change between steps, on all ranks between the same two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// As [`ReducerSpec::bucket_bytes`].
    pub bucket_bytes: u64,
    /// As [`ReducerSpec::wire`].
    pub wire: Option<DType>,
    /// The algorithm of the buckets' all-reduces; `None`: chosen by size and hosts.
    pub algorithm: Option<Algorithm>,
    /// How many of the open streams to each rank are used for sending; see [`Group::retune`].
    pub streams: usize,
}

/// Counters of a reducer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReducerStats {
    /// Rounds about which gradients are ready.
    pub rounds: u64,
    /// Nanoseconds from the start to the end of rounds, summed: mostly waiting for the slowest rank.
    pub round_ns: u64,
    /// Buckets that were reduced.
    pub buckets: u64,
    /// Bytes of gradients that were reduced in place.
    pub in_place_bytes: u64,
    /// Bytes of gradients that were copied into buckets and back.
    pub copied_bytes: u64,
    /// Steps that have ended.
    pub steps: u64,
}

/// Whether gradients can be reduced and sent like this.
///
/// # Errors
/// `Config`.
pub(super) fn check_wire(wire: Option<DType>, op: ReduceOp, gradients: &[Gradient]) -> Result<(), Failure> {
    let config = |message: String| Err(Failure::of_call(FailureKind::Config, message));
    if !matches!(wire, None | Some(DType::F16 | DType::BF16)) {
        return config("gradients go over the wire as they are, or as float16 or bfloat16.".into());
    }
    for Gradient { name, dtype, .. } in gradients {
        if !op.takes(*dtype) || (wire.is_some() && *dtype != DType::F32) {
            let way = wire.map_or(String::new(), |wire| format!(" and sent as {wire}"));
            return config(format!("{name} is {dtype}, which cannot be reduced with {}{way}.", op.name()));
        }
    }
    Ok(())
}

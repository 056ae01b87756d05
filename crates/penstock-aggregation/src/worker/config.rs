//! How a worker is set up, and what it takes and gives.

use super::Timing;
use crate::packet::{Format, Header};
use crate::{Endpoint, Key, Serial};

/// A worker's configuration.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The number of the job.
    pub job: u32,
    /// The life of the job: a job that begins again has the next epoch.
    pub epoch: u16,
    /// The job's key; `None` on a trusted network.
    pub key: Option<Key>,
    /// The name of this worker at its parent: one bit of that hop's bitmap; or, where bitmaps name workers, of the job's.
    pub name: u64,
    /// SeqNums in flight, a power of two; the same on all nodes of the job.
    pub window: u32,
    /// The first SeqNum of the epoch.
    pub start: Serial,
    /// The endpoint that blocks are pushed to: an aggregator, or the server itself.
    pub parent: Endpoint,
    /// The endpoint of the server.
    pub server: Endpoint,
    /// The aggregator keeps results, so lost results are requested there before at the server. A switch keeps none.
    pub ask_parent: bool,
    /// The aggregator adds floats, so it takes blocks that are not finite. Otherwise they go to the server.
    pub full_to_parent: bool,
    /// Results come apart from the blocks: a block is done when the server has accepted it, and its result is pulled later.
    pub apart: bool,
    /// The time-outs of this worker.
    pub timing: Timing,
}

/// The path of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Through the aggregators, if there are any.
    Tree,
    /// In the tensor's own format, for blocks that are not finite: to the first node above that adds floats.
    Full,
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outbound {
    /// The endpoint that receives the packet.
    pub to: Endpoint,
    /// The header of the packet. For a push the caller adds the block `header.seq`, its format and its exponent
    /// ([`Worker::seal`](super::Worker::seal)).
    pub header: Header,
}

/// The effect of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// Nothing that the driver has to handle.
    Control,
    /// The result of a block, for the first and only time.
    Result {
        /// The number of the block.
        seq: Serial,
        /// The number of the result: the block's, unless results come apart.
        number: Serial,
        /// The format of the result's elements. [`Format::Text`]: the work behind the block's buffer failed, and this says why; no
        /// block of the buffer gets a result. Then `seq` is the buffer's first block.
        format: Format,
        /// The exponent of the result.
        exponent: i16,
        /// The elements, as they came.
        payload: &'a [u8],
    },
}

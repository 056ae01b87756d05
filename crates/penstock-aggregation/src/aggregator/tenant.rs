//! Tenants: the jobs that an aggregator adds for, and why it refuses one.

use super::MAX_WINDOW;
use super::pulls::Pulls;
use crate::packet::MAX_PAYLOAD_BYTES;
use crate::{Endpoint, Key};
use std::fmt;

/// Limits of an aggregator, for all jobs together.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most jobs that may be open.
    pub jobs: usize,
    /// The most slots of all jobs together; a job takes as many as its window.
    pub slots: usize,
    /// The most bytes of sums and kept blocks, of all jobs together.
    pub memory_bytes: usize,
}

/// A job, as one aggregator knows it: a tenant of its slots and memory.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// The number of the job.
    pub job: u32,
    /// The life of the job: a job that begins again has the next epoch.
    pub epoch: u16,
    /// The job's key; `None` on a trusted network.
    pub key: Option<Key>,
    /// Slots, a power of two: how many SeqNums may be in flight. The same on all nodes of the job.
    pub window: u32,
    /// The longest block, at most [`MAX_PAYLOAD_BYTES`].
    pub block_bytes: usize,
    /// Also add floats: keeps a block of every child in each slot, so that they are added in order. Costs
    /// `children.len() + 1` times the memory.
    pub floats: bool,
    /// Keep a result in the slot of its sum, and give it to children that lost it. A switch does not: it refuses a worker's
    /// request, and the worker's next one goes to the server.
    pub results: bool,
    /// Results come apart from the blocks. They are kept beside the slots, at the cost of another block a slot, and a slot is free when
    /// the server has accepted its block.
    pub apart: bool,
    /// The node that sums are sent to: another aggregator or the server.
    pub parent: Endpoint,
    /// The job's server: it takes what goes up while the parent is bypassed, and speaks for a child that is bypassed. `None`: this
    /// aggregator is bypassed together with either.
    pub server: Option<Endpoint>,
    /// The name of this node at its parent: one bit of a hop's bitmap; or, where bitmaps name workers, all workers below it.
    pub name: u64,
    /// The nodes whose blocks are added, in the order of addition.
    pub children: Vec<Child>,
}

/// A child of an aggregator: a worker, or another aggregator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Child {
    /// The endpoint of the child.
    pub endpoint: Endpoint,
    /// The child's name: one bit of this hop's bitmap; or, where bitmaps name workers, all workers at or below the child.
    pub workers: u64,
}

impl Tenant {
    pub(super) fn blocks_a_slot(&self) -> usize {
        if self.floats { self.children.len() + 1 } else { 1 }
    }

    pub(super) fn memory_bytes(&self, slots: usize) -> usize {
        let pulls = if self.keeps_pulls() { Pulls::memory_bytes(slots, self.block_bytes) } else { 0 };
        self.slot_bytes(slots).saturating_add(pulls)
    }

    /// Whether results have places of their own.
    pub(super) fn keeps_pulls(&self) -> bool {
        self.apart && self.results
    }

    pub(super) fn slot_bytes(&self, slots: usize) -> usize {
        slots.saturating_mul(self.blocks_a_slot()).saturating_mul(self.block_bytes)
    }

    pub(super) fn check(&self) -> Result<(), Admission> {
        // 2^32 is a multiple of the window, or SeqNum mod W would jump where SeqNums wrap around.
        if !self.window.is_power_of_two() || self.window > MAX_WINDOW {
            return Err(Admission::Window(self.window));
        }
        if self.block_bytes == 0 || self.block_bytes > MAX_PAYLOAD_BYTES {
            return Err(Admission::Block(self.block_bytes));
        }
        let mut seen = 0;
        for child in &self.children {
            if child.workers == 0 || child.workers & seen != 0 {
                return Err(Admission::Children);
            }
            seen |= child.workers;
        }
        if seen == 0 { Err(Admission::Children) } else { Ok(()) }
    }
}

/// Why a job is not admitted. The aggregator is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The window is not a power of two, or is more than 2^16.
    Window(u32),
    /// The block length is not one that a packet can carry.
    Block(usize),
    /// The job has no children here, or a worker below two of them.
    Children,
    /// A newer epoch of the job is open here.
    Epoch(u16),
    /// The limit of jobs is reached.
    Jobs(usize),
    /// The job needs more slots than are free.
    Slots {
        /// Slots that the job needs.
        needed: usize,
        /// Slots that are free.
        free: usize,
    },
    /// The job needs more memory than is free.
    Memory {
        /// Bytes that the job needs.
        needed: usize,
        /// Bytes that are free.
        free: usize,
    },
}

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Admission::Window(window) => {
                write!(f, "a window of {window}: it must be a power of two, at most {MAX_WINDOW}")
            }
            Admission::Block(bytes) => write!(f, "blocks of {bytes} bytes: 1 to {MAX_PAYLOAD_BYTES} are possible"),
            Admission::Children => write!(f, "an aggregator without children, or with a worker below two of them"),
            Admission::Epoch(epoch) => write!(f, "epoch {epoch} of this job is newer and already here"),
            Admission::Jobs(jobs) => write!(f, "all {jobs} places for jobs are taken"),
            Admission::Slots { needed, free } => {
                write!(f, "{needed} slots are needed, {free} are free: use a smaller window")
            }
            Admission::Memory { needed, free } => {
                write!(f, "{needed} bytes are needed, {free} are free: use a smaller window or smaller blocks")
            }
        }
    }
}

impl std::error::Error for Admission {}

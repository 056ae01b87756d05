//! What the blocks carry that a worker has posted and whose results have not come.

use crate::Serial;
use std::collections::VecDeque;

/// What a block carries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Carried {
    /// The number of the operation.
    pub(super) op: u64,
    pub(super) what: What,
    pub(super) sent: bool,
    /// It ends what a server may have to work on as a whole.
    pub(super) is_last: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Header,
    Exponents(usize),
    Block { block: usize, part: usize },
}

/// Blocks by SeqNum, from the first one whose result has not come.
#[derive(Debug)]
pub(super) struct Posted {
    first: Serial,
    blocks: VecDeque<Option<Carried>>,
}

impl Posted {
    pub(super) fn new(start: Serial) -> Posted {
        Posted { first: start, blocks: VecDeque::new() }
    }

    /// The block that follows those before.
    pub(super) fn push(&mut self, carried: Carried) {
        self.blocks.push_back(Some(carried));
    }

    pub(super) fn get_mut(&mut self, seq: Serial) -> Option<&mut Carried> {
        self.blocks.get_mut(usize::try_from(seq.ahead_of(self.first)).ok()?)?.as_mut()
    }

    /// The result of a block has come.
    pub(super) fn take(&mut self, seq: Serial) -> Option<Carried> {
        let carried = self.blocks.get_mut(usize::try_from(seq.ahead_of(self.first)).ok()?)?.take();
        while let Some(None) = self.blocks.front() {
            self.blocks.pop_front();
            self.first = self.first.plus(1);
        }
        carried
    }

    /// Of a buffer that begins with this block no result will come. Returns what its blocks carry.
    pub(super) fn take_buffer(&mut self, first: Serial) -> Vec<Carried> {
        let mut all = Vec::new();
        let mut seq = first;
        while let Some(carried) = self.take(seq) {
            all.push(carried);
            if carried.is_last {
                break;
            }
            seq = seq.plus(1);
        }
        all
    }
}

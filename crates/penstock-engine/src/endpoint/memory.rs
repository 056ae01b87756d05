//! Bytes that come for an endpoint.

use penstock_net::pages::prefer_huge;
use std::alloc::Layout;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Memory of the engine's own, to which one operation writes, and which is only read after that has ended.
#[derive(Debug)]
pub struct Memory {
    /// Until it is dropped.
    block: Option<Block>,
    start: *mut u8,
    len: usize,
    /// Where the block goes then.
    spare: Weak<Mutex<Vec<Block>>>,
}

// SAFETY: it is written by one operation, on the engine's thread, and read after that.
unsafe impl Send for Memory {}
// SAFETY: the same.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many zeros, at least one. `None`: there is not so much memory.
    pub(super) fn zeros(len: u64) -> Option<Arc<Memory>> {
        let len = usize::try_from(len).ok().filter(|len| *len > 0)?;
        let layout = Layout::array::<u8>(len).ok()?;
        // SAFETY: the layout is not empty.
        let block = Block { start: unsafe { std::alloc::alloc_zeroed(layout) }, layout };
        Memory::new(block, len, Weak::new())
    }

    /// A copy of at least one byte.
    ///
    /// # Panics
    /// Without memory for it.
    pub(super) fn copy(bytes: &[u8]) -> Arc<Memory> {
        let memory = Memory::zeros(bytes.len() as u64).expect("memory for a few KiB");
        // SAFETY: it has this length, and nobody else has it yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.start, bytes.len()) };
        memory
    }

    fn new(block: Block, len: usize, spare: Weak<Mutex<Vec<Block>>>) -> Option<Arc<Memory>> {
        let start = block.start;
        (!start.is_null()).then(|| Arc::new(Memory { block: Some(block), start, len, spare }))
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.start
    }

    /// How many bytes it has.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it has one at least")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its bytes. Users have it only after the operation that writes all of them has ended.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: it has this length, all of it was written, and nothing writes to it any more.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let block = self.block.take().expect("dropped once");
        if block.layout.size() >= LARGE
            && let Some(spare) = self.spare.upgrade()
        {
            let mut blocks = spare.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.push(block);
            while blocks.iter().map(|block| block.layout.size()).sum::<usize>() > MOST_SPARE {
                blocks.remove(0);
            }
        }
    }
}

/// Memory for what comes. Large blocks are used again, since the kernel takes longer to make pages than bytes take within a host: a
/// push and a pull of 64 MiB took 130 to 160 ms with fresh pages, where a send and a receive took 25.
#[derive(Debug, Default)]
pub(super) struct Spare(Arc<Mutex<Vec<Block>>>);

impl Spare {
    /// Memory with anything in it, of at least one byte: its user overwrites all of it before anybody reads. `None`: there is not so
    /// much.
    pub(super) fn take(&self, len: u64) -> Option<Arc<Memory>> {
        let len = usize::try_from(len).ok().filter(|len| *len > 0)?;
        if len < LARGE {
            return Memory::zeros(len as u64);
        }
        let layout = Layout::from_size_align(len.checked_next_multiple_of(LARGE)?, LARGE).ok()?;
        let mut blocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = blocks.iter().position(|block| block.layout == layout).map(|at| blocks.remove(at));
        drop(blocks);
        let block = found.unwrap_or_else(|| {
            // SAFETY: the layout is not empty.
            let start = unsafe { std::alloc::alloc(layout) };
            prefer_huge(start, layout.size());
            Block { start, layout }
        });
        Memory::new(block, len, Arc::downgrade(&self.0))
    }
}

/// A piece of the heap.
#[derive(Debug)]
struct Block {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: whoever has it owns the memory.
unsafe impl Send for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.start.is_null() {
            // SAFETY: it was allocated with this layout; operations that use it hold it.
            unsafe { std::alloc::dealloc(self.start, self.layout) };
        }
    }
}

/// Blocks from this size on are used again, and come in multiples of it: a huge page of x86-64.
const LARGE: usize = 2 << 20;
/// Bytes that a server or client keeps for that.
const MOST_SPARE: usize = 256 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// A large block comes back for the next of about its length, up to the limit, and not after the end of whoever keeps it.
    #[test]
    fn large_blocks_are_used_again() {
        let spare = Spare::default();
        let kept = || spare.0.lock().expect("kept").len();
        let first = spare.take(3 << 20).expect("memory");
        let address = first.address();
        drop(first);
        assert_eq!(kept(), 1);
        let again = spare.take((4 << 20) - 5).expect("memory");
        assert_eq!((again.address(), again.len(), kept()), (address, (4 << 20) - 5, 0));
        drop(spare.take(1000));
        assert_eq!(kept(), 0, "a small one");
        let many: Vec<_> = (0..5).map(|_| spare.take(100 << 20).expect("addresses")).collect();
        drop(many);
        assert_eq!(kept(), 2, "up to the limit");
        assert!(spare.take(u64::MAX).is_none() && spare.take(1 << 62).is_none());
        drop(spare);
        drop(again);
    }
}

//! Bytes that come for an endpoint.

use std::alloc::Layout;
use std::sync::Arc;

/// Memory of the engine's own, to which one operation writes, and which is only read after that has ended.
#[derive(Debug)]
pub struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: it is written by one operation, on the engine's thread, and read after that.
unsafe impl Send for Memory {}
// SAFETY: the same.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many zeros, at least one. The kernel gives the pages when they are touched. `None`: there is not so much memory.
    pub(super) fn zeros(len: u64) -> Option<Arc<Memory>> {
        let len = usize::try_from(len).ok().filter(|len| *len > 0)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(Layout::array::<u8>(len).ok()?) };
        (!start.is_null()).then(|| Arc::new(Memory { start, len }))
    }

    /// A copy.
    pub(super) fn copy(bytes: &[u8]) -> Arc<Memory> {
        let bytes: Box<[u8]> = bytes.into();
        let len = bytes.len();
        Arc::new(Memory { start: Box::into_raw(bytes).cast(), len })
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        self.start
    }

    /// Its bytes. Users have it only after the operation that writes to it has ended.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: it has this length, and nothing writes to it any more.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it has the layout of a box of this length; operations that use it hold it.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start, self.len)) });
    }
}

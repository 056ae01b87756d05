//! The memory of an operation's tensor.

use super::AllReduce;

impl AllReduce {
    pub(super) fn tensor(&self) -> Tensor {
        Tensor { address: self.address, bytes: self.bytes }
    }
}

/// The memory of an operation's tensor.
#[derive(Clone, Copy)]
pub(super) struct Tensor {
    address: *mut u8,
    bytes: usize,
}

impl Tensor {
    pub(super) fn get<'a>(self, start: usize, len: usize) -> &'a [u8] {
        assert!(start + len <= self.bytes, "a block outside the tensor");
        // SAFETY: inside the tensor, which is the operation's while it runs; nothing writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(self.address.add(start), len) }
    }

    pub(super) fn get_mut<'a>(self, start: usize, len: usize) -> &'a mut [u8] {
        assert!(start + len <= self.bytes, "a block outside the tensor");
        // SAFETY: as above; the only caller ends its borrow before anything else reads the tensor.
        unsafe { std::slice::from_raw_parts_mut(self.address.add(start), len) }
    }
}

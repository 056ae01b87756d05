//! Finds elements that are NaN or infinite.

/// Whether the test holds for all elements of `N` bytes. A block is tested without branches, so that the compiler vectorises
/// the loop.
pub(crate) fn all<const N: usize>(bytes: &[u8], holds: impl Fn([u8; N]) -> bool) -> bool {
    bytes.chunks(BLOCK_BYTES).all(|block| {
        let elements = block.chunks_exact(N).map(|element| element.try_into().expect("as long as asked for"));
        elements.fold(true, |all, element| all & holds(element))
    })
}

/// A whole number of elements of every size.
const BLOCK_BYTES: usize = 4096;

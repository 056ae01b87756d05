//! Looking for what is not a number.

/// Whether the test holds for all elements of `N` bytes. Blocks are gone through without a branch, which the compiler makes
/// vectors of.
pub(crate) fn all<const N: usize>(bytes: &[u8], holds: impl Fn([u8; N]) -> bool) -> bool {
    bytes.chunks(BLOCK_BYTES).all(|block| {
        let elements = block.chunks_exact(N).map(|element| element.try_into().expect("as long as asked for"));
        elements.fold(true, |all, element| all & holds(element))
    })
}

/// Holds a whole number of every element.
const BLOCK_BYTES: usize = 4096;

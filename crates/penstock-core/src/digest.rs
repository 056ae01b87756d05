//! Digests of lists, for ranks to compare.

/// A digest of a list of words (FNV-1a), which nearly always differs for other lists. The same on all builds and machines.
pub fn digest(words: impl IntoIterator<Item = u64>) -> u64 {
    let bytes = words.into_iter().flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

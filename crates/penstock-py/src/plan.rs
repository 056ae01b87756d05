//! Pure functions of plans, for fronts and for the bench.

use penstock_engine::plan::buckets::{self, Entry};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;

use crate::engine::collective_named;

/// Merges entries into buckets of at most `bucket_bytes`; `entries` has the bytes and the class of each. Returns the indices of
/// each bucket's entries. A larger entry has a bucket of its own, classes never share one, and buckets come in the order of
/// their first entries.
#[pyfunction]
pub(crate) fn merge(entries: Vec<(u64, u32)>, bucket_bytes: u64) -> Vec<Vec<u32>> {
    let entry = |(index, (bytes, class))| Entry { index, bytes, class };
    buckets::merge((0..).zip(entries).map(entry), bucket_bytes)
}

/// The payload bytes from rank to rank in one operation, {(from, to): bytes}, without pairs that exchange nothing. Every rank
/// has a host of its own, and the algorithm is the one for large messages. `collective` and `bytes` are as in `Group.start`, a
/// root is rank 0. Raises ValueError where there is no such operation.
#[pyfunction]
pub(crate) fn traffic(collective: &str, ranks: u32, bytes: u64) -> PyResult<HashMap<(u32, u32), u64>> {
    let (collective, _) = collective_named(collective, 0)?;
    let sent = penstock_engine::plan::traffic(collective, ranks, bytes)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let pairs = (0..).zip(sent).flat_map(|(from, row)| (0..).zip(row).map(move |(to, bytes)| ((from, to), bytes)));
    Ok(pairs.filter(|(_, bytes)| *bytes > 0).collect())
}

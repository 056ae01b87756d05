//! The native module `penstock._core`.
//!
//! A binding translates: it checks the signature, detaches the GIL, calls the engine and maps the error. It decides
//! nothing. Built for Python's stable ABI (3.10 and newer) and against no torch, so that one wheel serves every
//! interpreter and every torch that users have.

use pyo3::prelude::*;

/// The engine of Penstock; use it through `penstock` and `torch.distributed`.
#[pymodule]
mod _core {
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python spells it so")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

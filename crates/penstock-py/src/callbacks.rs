//! Calls Python when an operation has ended.
//!
//! A callback needs the GIL, which a busy script may hold for long. The engine's thread must not wait for it: a thread
//! of its own does.

use pyo3::prelude::*;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};

/// Calls `callback()` soon, on a thread with the GIL.
pub(crate) fn later(callback: Py<PyAny>) {
    static QUEUE: OnceLock<Mutex<Sender<Py<PyAny>>>> = OnceLock::new();
    let queue = QUEUE.get_or_init(|| {
        let (sender, receiver) = channel::<Py<PyAny>>();
        let spawned = std::thread::Builder::new().name("penstock-callback".into()).spawn(move || {
            for callback in receiver {
                // None: the interpreter is gone, and whoever waited with it.
                let called = Python::try_attach(|py| {
                    if let Err(error) = callback.call0(py) {
                        error.write_unraisable(py, None);
                    }
                    drop(callback);
                });
                if called.is_none() {
                    return;
                }
            }
        });
        if let Err(error) = spawned {
            log::error!("penstock: cannot start the callback thread: {error}");
        }
        Mutex::new(sender)
    });
    let _ = queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).send(callback);
}

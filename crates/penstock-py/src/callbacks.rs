//! Calls Python when an operation has ended.
//!
//! A callback needs the GIL, which a busy script may hold for long. The engine's thread must not wait for it: threads of
//! our own do. More than one, because a callback may wait for another operation's future (PowerSGD does), which only a
//! callback completes.

use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Calls `callback()` soon, on a thread with the GIL.
pub(crate) fn later(callback: Py<PyAny>) {
    let mut pool = lock();
    pool.queue.push_back(callback);
    if pool.idle >= pool.queue.len() {
        CHANGED.notify_one();
        return;
    }
    // Every thread is busy, perhaps waiting for this very callback.
    match std::thread::Builder::new().name("penstock-callback".into()).spawn(run) {
        Ok(_) => {}
        Err(error) => log::error!("penstock: cannot start a callback thread: {error}"),
    }
}

struct Pool {
    queue: VecDeque<Py<PyAny>>,
    idle: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { queue: VecDeque::new(), idle: 0 });
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn run() {
    let mut pool = lock();
    loop {
        let Some(callback) = pool.queue.pop_front() else {
            if pool.idle >= SPARE_THREADS {
                return;
            }
            pool.idle += 1;
            pool = CHANGED.wait(pool).unwrap_or_else(|poisoned| poisoned.into_inner());
            pool.idle -= 1;
            continue;
        };
        drop(pool);
        let called = Python::try_attach(|py| {
            if let Err(error) = callback.call0(py) {
                error.write_unraisable(py, None);
            }
            drop(callback);
        });
        if called.is_none() {
            return; // The interpreter is gone, and whoever waited with it.
        }
        pool = lock();
    }
}

/// Threads that stay when there is nothing to call.
const SPARE_THREADS: usize = 2;

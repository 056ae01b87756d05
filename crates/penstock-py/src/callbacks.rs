//! Calls Python when an operation has ended.
//!
//! A callback needs the GIL, which a busy script may hold for long. The engine's thread must not wait for it: threads of
//! our own do. More than one, because a callback may wait for another operation's future (PowerSGD does), which only a
//! callback completes.

use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Calls `callback()` soon, on a thread with the GIL.
pub(crate) fn later(callback: Py<PyAny>) {
    enqueue(Task::Call(callback));
}

/// Gives a reference back soon, on a thread with the GIL. Where a reference is dropped without the GIL, this waits until the process has
/// to do with Python again.
pub(crate) fn release(object: Py<PyAny>) {
    enqueue(Task::Release(object));
}

fn enqueue(task: Task) {
    let mut pool = lock();
    pool.queue.push_back(task);
    pool.see_to_it();
}

enum Task {
    Call(Py<PyAny>),
    Release(Py<PyAny>),
}

/// Waits until everything is called and has returned, for so long at the most; whether it has. For the end of a script: a
/// thread that asks for the GIL when the interpreter is gone is ended in its middle, which C++ takes for a crash. A fork has no
/// such thread.
pub(crate) fn settle(py: Python<'_>, timeout: Duration) -> bool {
    if penstock_engine::check_fork().is_err() {
        return true;
    }
    py.detach(|| {
        let (pool, _) = SETTLED
            .wait_timeout_while(lock(), timeout, |pool| !pool.is_settled())
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        pool.is_settled()
    })
}

/// How many threads there are.
pub(crate) fn threads() -> usize {
    lock().threads
}

struct Pool {
    queue: VecDeque<Task>,
    threads: usize,
    /// Threads that sleep until there is a callback to call.
    idle: usize,
    /// How many of the idle threads were told to wake up.
    wakes: usize,
    /// Threads that were woken or started for the queue and do not have the GIL yet. One is enough, however long another
    /// thread holds the GIL: when it begins a callback, it makes sure that there is another thread for the rest.
    coming: usize,
    /// Threads that have the GIL, or are about to give it back.
    busy: usize,
}

impl Pool {
    fn is_settled(&self) -> bool {
        self.queue.is_empty() && self.coming == 0 && self.busy == 0
    }

    /// Makes sure that a thread comes for the queue: all others may be waiting for these very callbacks.
    fn see_to_it(&mut self) {
        if self.queue.is_empty() || self.coming > 0 {
            return;
        }
        if self.idle > self.wakes {
            self.wakes += 1;
            self.coming += 1;
            CHANGED.notify_one();
            return;
        }
        match std::thread::Builder::new().name("penstock-callback".into()).spawn(run) {
            Ok(_) => {
                self.threads += 1;
                self.coming += 1;
            }
            Err(error) => log::error!("penstock: cannot start a callback thread: {error}"),
        }
    }
}

static POOL: Mutex<Pool> =
    Mutex::new(Pool { queue: VecDeque::new(), threads: 0, idle: 0, wakes: 0, coming: 0, busy: 0 });
static CHANGED: Condvar = Condvar::new();
static SETTLED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The loop of a callback thread.
fn run() {
    loop {
        let called = Python::try_attach(|py| {
            let mut pool = lock();
            pool.coming -= 1;
            pool.busy += 1;
            let task = pool.queue.pop_front();
            pool.see_to_it();
            drop(pool);
            match task {
                Some(Task::Call(callback)) => {
                    if let Err(error) = callback.call0(py) {
                        error.write_unraisable(py, None);
                    }
                }
                Some(Task::Release(object)) => drop(object),
                None => {}
            }
        });
        if called.is_none() {
            lock().threads -= 1;
            return; // The interpreter is gone, and whoever waited with it.
        }
        let mut pool = lock();
        pool.busy -= 1;
        if !pool.queue.is_empty() && pool.coming == 0 {
            pool.coming += 1;
            continue;
        }
        if pool.is_settled() {
            SETTLED.notify_all();
        }
        if pool.idle >= SPARE_THREADS {
            pool.threads -= 1;
            return;
        }
        pool.idle += 1;
        pool = CHANGED.wait_while(pool, |pool| pool.wakes == 0).unwrap_or_else(|poisoned| poisoned.into_inner());
        (pool.idle, pool.wakes) = (pool.idle - 1, pool.wakes - 1);
    }
}

/// Threads that stay when there is nothing to call.
const SPARE_THREADS: usize = 2;

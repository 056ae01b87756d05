//! File descriptors that do not survive a fork.
//!
//! A forked child (a DataLoader worker) inherits every descriptor. If it kept our sockets open, the death of its parent would
//! not close them, and the peers would not notice. So a `pthread_atfork` handler closes all of them in the child and marks the
//! process as forked. The child touches nothing else of the engine.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock};

/// An owned descriptor that the child of a fork closes.
#[derive(Debug)]
pub struct Fd(Option<OwnedFd>);

impl Fd {
    /// Registers a descriptor.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Fd {
        install();
        open().push(fd.as_raw_fd());
        Fd(Some(fd))
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("present until dropped").as_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let fd = self.0.take().expect("dropped once");
        if forked() {
            // The child has closed it already, and the number may belong to another file now.
            std::mem::forget(fd);
            return;
        }
        let raw = fd.as_raw_fd();
        let mut all = open();
        if let Some(at) = all.iter().position(|known| *known == raw) {
            all.swap_remove(at);
        }
        drop(fd);
    }
}

/// Whether this process is a fork of one that had descriptors registered: its engine is gone.
#[must_use]
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

static FORKED: AtomicBool = AtomicBool::new(false);

fn open() -> MutexGuard<'static, Vec<RawFd>> {
    static OPEN: OnceLock<Mutex<Vec<RawFd>>> = OnceLock::new();
    OPEN.get_or_init(|| Mutex::new(Vec::new())).lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

thread_local! {
    /// Holds the lock of the list across a fork, so that the child finds it consistent.
    static HELD: std::cell::RefCell<Option<MutexGuard<'static, Vec<RawFd>>>> = const { std::cell::RefCell::new(None) };
}

extern "C" fn before_fork() {
    HELD.with(|held| *held.borrow_mut() = Some(open()));
}

extern "C" fn in_parent() {
    HELD.with(|held| *held.borrow_mut() = None);
}

extern "C" fn in_child() {
    HELD.with(|held| {
        if let Some(mut all) = held.borrow_mut().take() {
            if !all.is_empty() {
                FORKED.store(true, Ordering::Relaxed);
            }
            for raw in all.drain(..) {
                // SAFETY: the number was open when the fork began (the list was locked), and nobody else in this
                // process, which has one thread, will use it: `Fd::drop` sees `forked()`.
                unsafe { libc::close(raw) };
            }
        }
    });
}

fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handlers are `extern "C"`, take no arguments and live as long as the program.
        let rc = unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        if rc != 0 {
            log::warn!("penstock: pthread_atfork failed with {rc}: forked children will keep sockets open");
        }
    });
}

//! A thread that sleeps until a socket, a time or another thread wakes it.

use crate::fds::Fd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::BorrowedFd;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Wakes one thread that sleeps in [`Waker::wait`].
#[derive(Debug)]
pub struct Waker {
    event: Fd,
    woken: AtomicBool,
}

impl Waker {
    /// A waker that was not woken.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn new() -> io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker { event: Fd::new(event), woken: AtomicBool::new(false) })
    }

    /// Ends the current wait, or the next one.
    pub fn wake(&self) {
        if !self.woken.swap(true, Ordering::SeqCst) {
            // A full counter means that it has been woken.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Blocks until another thread calls [`Waker::wake`], a socket can be read, one of those marked `true` can be written, or
    /// the time is over (`None`: never).
    ///
    /// # Errors
    /// The kernel's, other than an interruption.
    pub fn wait(&self, sockets: &[(BorrowedFd<'_>, bool)], timeout: Option<Duration>) -> io::Result<()> {
        let mut polled = Vec::with_capacity(sockets.len() + 1);
        polled.push(PollFd::new(&self.event, PollFlags::IN));
        for (socket, wants_to_write) in sockets {
            let writable = if *wants_to_write { PollFlags::OUT } else { PollFlags::empty() };
            polled.push(PollFd::from_borrowed_fd(*socket, PollFlags::IN | writable));
        }
        let timeout = timeout.map(|timeout| rustix::time::Timespec {
            tv_sec: timeout.as_secs().min(i64::MAX as u64) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if self.woken.swap(false, Ordering::SeqCst) {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.event, &mut count);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// A wake-up before the wait is not missed, and ends one wait only.
    #[test]
    fn wakes_once() {
        let waker = Waker::new().unwrap();
        waker.wake();
        waker.wake();
        let began = Instant::now();
        waker.wait(&[], Some(Duration::from_secs(60))).unwrap();
        assert!(began.elapsed() < Duration::from_secs(30));
        waker.wait(&[], Some(Duration::from_millis(1))).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            waker.wait(&[], None).unwrap();
        });
    }
}

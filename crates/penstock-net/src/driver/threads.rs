//! The threads of an event loop: one lock, under which everything is decided, and how they sleep, wake and end.
//!
//! Thread 0 has the listeners, hand-shakes, timers, commands and the end. Each further thread reads the streams that are dealt to it.
//! Any thread writes to any stream. What takes long is done without the lock, under a claim (`crate::claims`).

use super::{Driver, Wake};
use crate::claims::{Claim, Half};
use crate::handler::Handler;
use crate::socket::{Reader, Writer};
use crate::system::System;
use penstock_types::{PeerId, Time};
use rustix::event::epoll;
use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

/// An event loop with the handler that it serves. Give [`Loop::help`] a thread for each number but 0, and [`Loop::run`] one.
pub struct Loop<H> {
    state: Mutex<State<H>>,
    /// A thread has ended a claim while another waits for that.
    released: Condvar,
    system: Arc<System>,
    wakes: Vec<Arc<Wake>>,
}

/// What the lock guards.
pub(super) struct State<H> {
    pub(super) driver: Driver,
    pub(super) handler: H,
}

/// What a driver knows of the threads.
pub(super) struct Threads {
    pub(super) wakes: Vec<Arc<Wake>>,
    /// By thread: sockets that may have more to read, although the kernel reports them only once.
    pub(super) again: Vec<Vec<u64>>,
    /// By thread: when the kernel was last asked what has arrived. All of that has been read since, or as much of it as one turn reads, but
    /// for what a thread that is in the middle of its turn has yet to read.
    pub(super) looked: Vec<Time>,
    /// Until when thread 0 sleeps, unless it is woken.
    pub(super) sleeps_until: Time,
    /// How many wait for [`Loop::released`].
    waiting: usize,
    /// The threads end.
    pub(super) has_ended: bool,
    /// What a thread said when it panicked.
    panic: Option<String>,
}

/// A thread's own state from turn to turn.
pub struct Run {
    pub(super) thread: usize,
    pub(super) events: Vec<epoll::Event>,
    pub(super) junk: Box<[u8]>,
    /// When the loop began to stop.
    pub(super) stopping_since: Option<Time>,
    /// When a good-bye was sent to each peer.
    pub(super) farewells: HashMap<PeerId, Time>,
}

impl Run {
    /// The state of a thread that has had no turn.
    #[must_use]
    pub fn of(thread: usize) -> Run {
        Run {
            thread,
            events: Vec::new(),
            junk: vec![0; JUNK_BYTES].into_boxed_slice(),
            stopping_since: None,
            farewells: HashMap::new(),
        }
    }
}

impl Threads {
    pub(super) fn new(count: usize) -> Result<Threads, String> {
        let wakes: Result<Vec<Arc<Wake>>, String> = (0..count).map(|_| Wake::new().map(Arc::new)).collect();
        Ok(Threads {
            wakes: wakes?,
            again: vec![Vec::new(); count],
            looked: vec![Time(0); count],
            sleeps_until: Time(0),
            waiting: 0,
            has_ended: false,
            panic: None,
        })
    }

    pub(super) fn count(&self) -> usize {
        self.wakes.len()
    }

    fn end(&mut self) {
        self.has_ended = true;
        self.wakes.iter().for_each(|wake| wake.wake());
    }
}

impl Driver {
    /// Whether everything has been read that had arrived at a time, as far as one turn reads. A thread that sleeps has nothing to read.
    pub(super) fn has_read(&self, until: Time) -> bool {
        let threads = &self.threads;
        threads.looked[0] >= until
            && (1..threads.count()).all(|thread| {
                threads.looked[thread] >= until || !(self.peers.claims.has(thread) || self.system.is_ready(thread))
            })
    }

    /// Whether a thread has a claim on a stream of a peer that is gone.
    fn has_parted(&self, thread: usize) -> bool {
        let peer = self.peers.claims.peer_of(thread);
        let is_gone =
            |peer| self.connections[peer as usize].finished && !self.gone.iter().any(|gone| gone.peer == peer);
        peer.is_some_and(is_gone)
    }

    /// After all threads but this one have ended: takes over what they had.
    fn recall(&mut self) {
        for thread in 0..self.threads.count() {
            self.release(thread, None);
        }
        // A panic has lost half of them, and their streams are out of step.
        let broken = self.sockets.extract_if(|_, socket| socket.reader.is_none() || socket.writer.is_none());
        let broken: Vec<u64> = broken.map(|(token, _)| token).collect();
        for connections in &mut self.connections {
            connections.sockets.retain(|token| !broken.contains(token));
        }
        for (token, socket) in self.sockets.iter_mut().filter(|(_, socket)| socket.thread != 0) {
            let flags = epoll::EventFlags::IN;
            if let Err(error) = self.system.watch(0, &socket.wire, *token, flags, true) {
                log::error!("penstock: epoll_ctl failed: {error}");
            }
            (socket.thread, socket.watches_write) = (0, false);
        }
        // Thread 0 may run once more, and waits for none of them.
        self.threads.wakes.truncate(1);
        self.threads.has_ended = false;
    }

    /// A thread has ended its claim; `half` is what it had of a socket.
    fn release(&mut self, thread: usize, half: Option<&mut dyn Half>) {
        for act in self.peers.claims.close(thread, half) {
            act();
        }
    }
}

impl<H> Loop<H> {
    /// Tries for as long as a thread has the lock at most, as a rule: to sleep and to be woken takes longer.
    fn spin(&self) -> Option<MutexGuard<'_, State<H>>> {
        (0..TRIES).find_map(|_| {
            let guard = self.state.try_lock().ok();
            if guard.is_none() {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
            }
            guard
        })
    }

    fn lock(&self) -> MutexGuard<'_, State<H>> {
        // A thread that panics has said so before the others go on.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<H: Handler> Loop<H> {
    /// A loop that does not run yet.
    pub fn new(driver: Driver, handler: H) -> Loop<H> {
        let (system, wakes) = (driver.system.clone(), driver.threads.wakes.clone());
        Loop { state: Mutex::new(State { driver, handler }), released: Condvar::new(), system, wakes }
    }

    /// Runs thread 0 until the handler says to stop and all peers have been told. `helpers` are the other threads, which end before
    /// this returns. May be called once more, without helpers, after an error.
    ///
    /// # Errors
    /// What a thread said when it panicked. [`Loop::with`] may tell the peers.
    pub fn run(&self, helpers: Vec<JoinHandle<()>>) -> Result<(), String> {
        self.guard(0, |thread| {
            let mut run = Run::of(thread);
            while self.turn(&mut run) {}
        });
        self.lock().driver.threads.end();
        for helper in helpers {
            // It catches its panics.
            let _ = helper.join();
        }
        let mut state = self.lock();
        state.driver.recall();
        let panic = state.driver.threads.panic.take();
        drop(state);
        if panic.is_none() {
            self.guard(0, |_| self.finish());
        }
        let panic = panic.or_else(|| self.lock().driver.threads.panic.take());
        panic.map_or(Ok(()), Err)
    }

    /// Runs another thread until thread 0 ends.
    pub fn help(&self, thread: usize) {
        self.guard(thread, |thread| {
            let mut run = Run::of(thread);
            while self.turn(&mut run) {}
        });
    }

    /// Acts while the loop does not run.
    pub fn with<R>(&self, act: impl FnOnce(&mut Driver, &mut H) -> R) -> R {
        let State { driver, handler } = &mut *self.lock();
        act(driver, handler)
    }

    /// Ends the threads, of which 0 does not run.
    pub fn end(&self) {
        self.lock().driver.threads.end();
    }

    /// The driver and the handler, when no thread runs.
    pub fn into_parts(self) -> (Driver, H) {
        let State { driver, handler } = self.state.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        (driver, handler)
    }

    /// If a thread panics, all end.
    fn guard(&self, thread: usize, act: impl FnOnce(usize)) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| act(thread))) {
            let mut state = self.lock();
            let threads = &mut state.driver.threads;
            threads.panic.get_or_insert_with(|| panic_text(&*panic).to_owned());
            threads.end();
            // Its streams are as it has left them, and it touches no memory any more.
            state.driver.release(thread, None);
            drop(state);
            self.released.notify_all();
        }
    }

    /// A turn of a thread begins.
    pub(super) fn begin(&self, thread: usize) -> Turn<'_, H> {
        let mut turn = Turn { of: self, thread, guard: None, locked: None };
        turn.lock();
        turn
    }
}

/// A thread that has the lock of its loop.
pub(super) struct Turn<'a, H> {
    of: &'a Loop<H>,
    pub(super) thread: usize,
    /// `None` only while the lock is not held, inside of [`Turn::unlocked`] and [`Turn::await_release`].
    guard: Option<MutexGuard<'a, State<H>>>,
    /// When it got the lock, where others may wait for that.
    locked: Option<Instant>,
}

impl<'a, H> Turn<'a, H> {
    fn unlock(&mut self) {
        self.count();
        self.guard = None;
    }

    /// Counts how long it has had the lock.
    fn count(&mut self) {
        let thread = self.thread;
        if let (Some(since), Some(guard)) = (self.locked.take(), &mut self.guard) {
            guard.driver.peers.counts[thread].locked_ns += since.elapsed().as_nanos() as u64;
        }
    }
}

impl<H> Drop for Turn<'_, H> {
    fn drop(&mut self) {
        self.unlock();
    }
}

impl<H: Handler> Turn<'_, H> {
    /// What the lock guards.
    pub(super) fn state(&mut self) -> &mut State<H> {
        self.guard.as_mut().expect("the lock is held")
    }

    pub(super) fn driver(&mut self) -> &mut Driver {
        &mut self.state().driver
    }

    /// Acts without the lock.
    pub(super) fn unlocked<R>(&mut self, act: impl FnOnce() -> R) -> R {
        self.unlock();
        let result = act();
        self.lock();
        result
    }

    fn lock(&mut self) {
        if self.of.wakes.len() == 1 {
            self.guard = Some(self.of.lock());
            return;
        }
        let since = Instant::now();
        let mut guard = self.of.spin().unwrap_or_else(|| self.of.lock());
        let now = Instant::now();
        guard.driver.peers.counts[self.thread].waited_ns += (now - since).as_nanos() as u64;
        (self.guard, self.locked) = (Some(guard), Some(now));
    }

    /// Acts without the lock under a claim. [`Turn::give_back_reader`] or [`Turn::give_back_writer`] follows.
    pub(super) fn claimed<R>(&mut self, claim: Claim, act: impl FnOnce() -> R) -> R {
        let thread = self.thread;
        self.driver().peers.claims.open(thread, claim);
        let of = self.of;
        self.unlocked(|| {
            of.system.interleave(false);
            let result = act();
            of.system.interleave(false);
            result
        })
    }

    /// Ends the claim of [`Turn::claimed`]. Returns whether the socket is still there.
    pub(super) fn give_back_reader(&mut self, token: u64, mut reader: Box<Reader>) -> bool {
        self.release(Some(&mut *reader));
        let Some(socket) = self.driver().sockets.get_mut(&token) else { return false };
        socket.reader = Some(reader);
        true
    }

    /// The same for a claim without a socket.
    pub(super) fn give_back_nothing(&mut self) {
        self.release(None);
    }

    /// The same for a writer.
    pub(super) fn give_back_writer(&mut self, token: u64, mut writer: Box<Writer>) -> bool {
        self.release(Some(&mut *writer));
        let Some(socket) = self.driver().sockets.get_mut(&token) else { return false };
        socket.writer = Some(writer);
        true
    }

    fn release(&mut self, half: Option<&mut dyn Half>) {
        let thread = self.thread;
        let driver = self.driver();
        debug_assert!(!driver.has_parted(thread), "a peer is gone when no thread has a stream of it");
        driver.release(thread, half);
        if driver.threads.waiting > 0 {
            self.of.released.notify_all();
        }
    }

    /// Waits until another thread has ended a claim. This thread has none: so none waits for one that waits.
    pub(super) fn await_release(&mut self) {
        debug_assert!({
            let thread = self.thread;
            !self.driver().peers.claims.has(thread)
        });
        let of = self.of;
        if of.system.is_played() {
            self.unlocked(|| of.system.interleave(true));
            return;
        }
        self.driver().threads.waiting += 1;
        self.count();
        let guard = self.guard.take().expect("the lock is held");
        self.guard = Some(self.of.released.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner()));
        self.locked = Some(Instant::now());
        self.driver().threads.waiting -= 1;
    }

    /// Sleeps until something happens, and stores it in `events`.
    pub(super) fn sleep(&mut self, events: &mut Vec<epoll::Event>, room: usize, nanos: u64, listener: u64) {
        let (of, thread) = (self.of, self.thread);
        let waited = self.unlocked(|| of.system.wait(thread, events, room, nanos, listener));
        if let Err(error) = waited
            && error != rustix::io::Errno::INTR
        {
            log::error!("penstock: epoll_wait failed: {error}");
        }
        of.wakes[thread].sleeping.store(false, Ordering::SeqCst);
    }

    /// From now on others may have to wake this thread.
    pub(super) fn may_sleep(&self, may: bool) {
        self.of.wakes[self.thread].sleeping.store(may, Ordering::SeqCst);
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason was given")
}

/// How often a thread tries to get the lock before it sleeps, and how often it pauses between. The lock is held for 1 to 7 us. On 16 cores
/// 4 threads waited half as long for it as without, and 8 threads a third.
const TRIES: u32 = 50;
const PAUSES: u32 = 8;
/// Bytes of a thread's buffer for what is read and discarded.
pub(super) const JUNK_BYTES: usize = 64 * 1024;

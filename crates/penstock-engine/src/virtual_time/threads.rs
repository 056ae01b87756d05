//! The threads of a rank's event loop, of which one runs at a time: where the loop has no lock, a random one goes on.

use crate::runtime::Runtime;
use fastrand::Rng;
use penstock_net::{Loop, Run};
use penstock_types::{MILLISECOND, Time};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Runs a loop's threads by turns.
pub(super) struct Threads {
    baton: Arc<Baton>,
    /// Where there is more than one.
    threads: Vec<JoinHandle<()>>,
    /// The only one runs on the test's thread.
    only: Option<(Run, Arc<Loop<Runtime>>)>,
}

/// Who may run, and how far the others are.
pub(super) struct Baton {
    state: Mutex<State>,
    /// Of each thread, and of the test.
    woken: Vec<Condvar>,
}

struct State {
    rng: Rng,
    /// `None`: the test.
    holder: Option<usize>,
    /// By thread: what its last turn returned; `None` while it has one, or is to have one.
    turns: Vec<Option<bool>>,
    /// By thread: it stands still until then, in the middle of its turn, as one does that has lost its processor.
    rests_until: Vec<Time>,
    /// How long they may do so yet.
    rest: u64,
    /// All threads have turns now, and thread 0 the last.
    have_all: bool,
    now: Time,
    /// Whether the loop goes on, when the test has the baton.
    goes_on: bool,
    has_panicked: bool,
    is_over: bool,
}

impl State {
    fn are_amid(&self) -> bool {
        self.turns.contains(&None)
    }

    /// The threads that go on now.
    fn open(&self) -> Vec<usize> {
        (0..self.turns.len()).filter(|at| self.turns[*at].is_none() && self.rests_until[*at] <= self.now).collect()
    }

    /// Who goes on now: a thread, or the test.
    fn next(&mut self) -> Option<usize> {
        loop {
            let open = self.open();
            if !open.is_empty() {
                return Some(open[self.rng.usize(..open.len())]);
            }
            if !std::mem::take(&mut self.have_all) || self.turns[0] != Some(true) {
                self.goes_on = self.turns[0] != Some(false);
                return None;
            }
            self.turns[0] = None;
        }
    }

    /// The same where a thread has stopped, for which the test may have to act.
    fn next_or_test(&mut self) -> Option<usize> {
        if self.has_panicked || self.is_over || self.are_amid() && self.rng.u8(..8) == 0 {
            self.goes_on = true;
            return None;
        }
        self.next()
    }

    /// A thread is at a place where it may lose its processor.
    fn rest(&mut self, thread: usize, must: bool) {
        let until = if must {
            // Until one goes on for which it may wait.
            let others = (0..self.turns.len()).filter(|other| *other != thread && self.turns[*other].is_none());
            others.map(|other| self.rests_until[other]).min().unwrap_or(self.now)
        } else if self.rng.u8(..RESTS_ONE_IN) == 0 {
            let time = (1 << self.rng.u32(15..30)).min(self.rest);
            self.rest -= time;
            self.now.plus(time)
        } else {
            return;
        };
        self.rests_until[thread] = until;
    }
}

impl Baton {
    pub(super) fn new(seed: u64, threads: usize) -> Arc<Baton> {
        let mut rng = Rng::with_seed(seed);
        let state = State {
            holder: None,
            turns: Vec::new(),
            rests_until: vec![Time(0); threads],
            rest: MOST_REST >> rng.u32(0..8),
            rng,
            have_all: false,
            now: Time(0),
            goes_on: true,
            has_panicked: false,
            is_over: false,
        };
        Arc::new(Baton { state: Mutex::new(state), woken: (0..=threads).map(|_| Condvar::new()).collect() })
    }

    /// For the host of a loop: where another thread may go on, one does every other time; where one must, one does.
    pub(super) fn interleave(&self, must: bool) {
        let mut state = self.lock();
        if let Some(own) = state.holder
            && (must || state.rng.bool())
        {
            state.rest(own, must);
            drop(self.pass_on(Some(own), state));
        }
    }

    /// Until when a thread stands still.
    pub(super) fn rests_until(&self, thread: usize) -> Time {
        self.lock().rests_until[thread]
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn give(&self, state: &mut State, to: Option<usize>) {
        state.holder = to;
        self.woken_of(to).notify_one();
    }

    /// A thread gives the baton to who goes on, and waits for it. It goes through the test only where the test has to act: a change of
    /// threads takes microseconds, and there are millions of them.
    fn pass_on<'a>(&'a self, own: Option<usize>, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let next = state.next_or_test();
        if next != own {
            self.give(&mut state, next);
        }
        self.wait(own, state)
    }

    fn wait<'a>(&'a self, own: Option<usize>, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waits = |state: &mut State| state.holder != own && !state.is_over;
        self.woken_of(own).wait_while(state, waits).unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn woken_of(&self, holder: Option<usize>) -> &Condvar {
        &self.woken[holder.unwrap_or(self.woken.len() - 1)]
    }

    /// A thread, from its start to its end.
    fn run(&self, thread: usize, the_loop: &Loop<Runtime>) {
        let mut run = Run::of(thread);
        let mut state = self.wait(Some(thread), self.lock());
        while !state.is_over {
            drop(state);
            let goes_on = catch_unwind(AssertUnwindSafe(|| the_loop.turn(&mut run)));
            state = self.lock();
            state.has_panicked |= goes_on.is_err();
            state.turns[thread] = Some(goes_on.unwrap_or(false));
            state = self.pass_on(Some(thread), state);
        }
    }
}

impl Threads {
    pub(super) fn new(count: usize, baton: Arc<Baton>, the_loop: &Arc<Loop<Runtime>>) -> Threads {
        baton.lock().turns = vec![Some(true); count];
        let start = |thread| {
            let (baton, the_loop) = (baton.clone(), the_loop.clone());
            std::thread::spawn(move || baton.run(thread, &the_loop))
        };
        match count {
            1 => Threads { threads: Vec::new(), only: Some((Run::of(0), the_loop.clone())), baton },
            _ => Threads { threads: (0..count).map(start).collect(), only: None, baton },
        }
    }

    /// Gives the threads their turns, in a random order and between each other, and thread 0 a last one, which says how long all sleep.
    /// It may stop in the middle: see [`Threads::are_amid`]. Returns whether the loop goes on.
    pub(super) fn turn(&mut self, now: Time) -> bool {
        if let Some((run, the_loop)) = &mut self.only {
            return the_loop.turn(run);
        }
        let mut state = self.baton.lock();
        state.now = now;
        if state.open().is_empty() {
            state.have_all = state.rng.bool();
            let first = if state.have_all { self.threads.len() } else { 1 };
            state.turns[..first].fill(None);
        }
        if let Some(first) = state.next() {
            self.baton.give(&mut state, Some(first));
            state = self.baton.wait(None, state);
        }
        assert!(!state.has_panicked, "a thread has panicked");
        state.goes_on
    }

    /// When a thread goes on that is in the middle of its turn, perhaps with a claim.
    pub(super) fn next(&self) -> Time {
        let state = self.baton.lock();
        let amid = (0..state.turns.len()).filter(|thread| state.turns[*thread].is_none());
        amid.map(|thread| state.rests_until[thread]).min().unwrap_or(Time(u64::MAX))
    }

    /// Until when a thread stands still.
    pub(super) fn rests_until(&self, thread: usize) -> Time {
        self.baton.rests_until(thread)
    }

    /// How long a thread stands still from now on.
    pub(super) fn rest(&self, now: Time) -> u64 {
        self.baton.lock().rests_until.iter().map(|until| until.since(now)).max().unwrap_or(0)
    }

    /// Nobody stands still any more.
    pub(super) fn go_on(&self) {
        let mut state = self.baton.lock();
        state.rests_until.fill(Time(0));
        state.rest = 0;
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut state = self.baton.lock();
        state.is_over = true;
        let has_panicked = state.has_panicked;
        drop(state);
        self.baton.woken.iter().for_each(Condvar::notify_all);
        // After a panic others may have stopped in the middle of a turn.
        if !has_panicked {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

/// How often a thread stands still where others may go on, one time in so many.
const RESTS_ONE_IN: u8 = 16;
/// How long the threads of a rank stand still, all together, at most.
const MOST_REST: u64 = 1000 * MILLISECOND;

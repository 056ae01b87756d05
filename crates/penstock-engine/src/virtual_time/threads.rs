//! The threads of a rank's event loop, of which one runs at a time: where the loop has no lock, a random one goes on.

use super::network::Interleave;
use crate::runtime::Runtime;
use fastrand::Rng;
use penstock_net::{Loop, Run};
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
    /// All threads have turns now, and thread 0 the last.
    have_all: bool,
    has_panicked: bool,
    is_over: bool,
}

impl State {
    fn are_amid(&self) -> bool {
        self.turns.contains(&None)
    }
}

impl Baton {
    pub(super) fn new(seed: u64, threads: usize) -> Arc<Baton> {
        let state = State {
            rng: Rng::with_seed(seed),
            holder: None,
            turns: Vec::new(),
            have_all: false,
            has_panicked: false,
            is_over: false,
        };
        Arc::new(Baton { state: Mutex::new(state), woken: (0..=threads).map(|_| Condvar::new()).collect() })
    }

    /// For the host of a loop: where another thread may go on, one does every other time; where one must, one does.
    pub(super) fn interleave(self: &Arc<Baton>) -> Interleave {
        let baton = self.clone();
        Box::new(move |must| {
            let mut state = baton.lock();
            if let Some(own) = state.holder
                && (must || state.rng.bool())
            {
                baton.give(&mut state, None);
                drop(baton.wait(Some(own), state));
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn give(&self, state: &mut State, to: Option<usize>) {
        state.holder = to;
        self.woken_of(to).notify_one();
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
        loop {
            if self.wait(Some(thread), self.lock()).is_over {
                return;
            }
            let goes_on = catch_unwind(AssertUnwindSafe(|| the_loop.turn(&mut run)));
            let mut state = self.lock();
            state.has_panicked |= goes_on.is_err();
            state.turns[thread] = Some(goes_on.unwrap_or(false));
            self.give(&mut state, None);
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
    pub(super) fn turn(&mut self) -> bool {
        if let Some((run, the_loop)) = &mut self.only {
            return the_loop.turn(run);
        }
        let mut state = self.baton.lock();
        if !state.are_amid() {
            state.have_all = state.rng.bool();
            let first = if state.have_all { self.threads.len() } else { 1 };
            state.turns[..first].fill(None);
        }
        loop {
            let open: Vec<usize> = (0..self.threads.len()).filter(|thread| state.turns[*thread].is_none()).collect();
            assert!(!state.has_panicked, "a thread has panicked");
            if open.is_empty() {
                if !std::mem::take(&mut state.have_all) || state.turns[0] == Some(false) {
                    return state.turns[0] == Some(true);
                }
                state.turns[0] = None;
                continue;
            }
            let next = open[state.rng.usize(..open.len())];
            self.baton.give(&mut state, Some(next));
            state = self.baton.wait(None, state);
            if state.are_amid() && state.rng.u8(..8) == 0 {
                return true;
            }
        }
    }

    /// Whether a thread is in the middle of its turn, perhaps with a claim.
    pub(super) fn are_amid(&self) -> bool {
        self.baton.lock().are_amid()
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

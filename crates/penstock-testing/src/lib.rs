//! What tests of several crates share. No crate that ships uses it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Runs a test's cases, such as its seeds, on all cores; returns what each gave, in the order of the cases.
///
/// Cargo runs one test binary after the other, and a test on one thread. The longest test of a binary would run alone at last, on one
/// core.
///
/// # Panics
/// If a case does, with its message. What a case says of itself, such as its seed, belongs into the message. No other case begins then.
pub fn on_all_cores<C, R, I>(cases: I, run: impl Fn(C) -> R + Sync) -> Vec<R>
where
    I: IntoIterator<Item = C, IntoIter: Send>,
    R: Send,
{
    let cases = Mutex::new(cases.into_iter().enumerate());
    let has_panicked = AtomicBool::new(false);
    let next = || cases.lock().expect("a case runs without the lock").next();
    let work = || {
        let mut results = Vec::new();
        while !has_panicked.load(Ordering::Relaxed)
            && let Some((number, case)) = next()
        {
            let result = catch_unwind(AssertUnwindSafe(|| run(case)));
            results.push((
                number,
                result.unwrap_or_else(|panic| {
                    has_panicked.store(true, Ordering::Relaxed);
                    resume_unwind(panic)
                }),
            ));
        }
        results
    };
    let mut results: Vec<(usize, R)> = thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        ended.into_iter().flat_map(|results| results.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    results.sort_unstable_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Results come in the order of the cases, whatever each takes, and each case runs once.
    #[test]
    fn results_are_in_order() {
        let squares = on_all_cores(0..1000_u64, |case| {
            (0..(1000 - case) * 100).fold(case * case, |sum, _| std::hint::black_box(sum))
        });
        assert_eq!(squares, (0..1000).map(|case| case * case).collect::<Vec<u64>>());
        assert_eq!(on_all_cores([0; 0], |case| case), [0; 0]);
    }

    /// A case that panics ends an endless run, with its message.
    #[test]
    fn a_panic_ends_it() {
        let run = |case: u64| assert!(case != 3, "seed {case}");
        let panic = catch_unwind(|| on_all_cores(0.., run)).expect_err("a case has panicked");
        assert_eq!(panic.downcast_ref::<String>().expect("a message"), "seed 3");
    }
}

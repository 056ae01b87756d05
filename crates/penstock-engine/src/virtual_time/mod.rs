//! Random programs on the shipped event loop and engine, under virtual time: see `docs/random-programs.md`.

mod judge;
mod model;
mod network;
mod program;
mod shrink;
mod world;

use program::{Program, generate};
use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Programs of a fixed range of seeds do what the model says, as do those that ever failed; or those of
/// `PENSTOCK_VIRTUAL_SEEDS=first..end`, as many as `PENSTOCK_VIRTUAL_MINUTES` leaves time for.
#[test]
fn programs() {
    let chosen = std::env::var("PENSTOCK_VIRTUAL_SEEDS").ok().map(|text| seeds(&text));
    let ever_failed = FAILED.iter().map(|(seed, _)| *seed).filter(|_| chosen.is_none());
    let mut failed = Vec::new();
    let minutes = std::env::var("PENSTOCK_VIRTUAL_MINUTES").map_or(f64::MAX, |text| text.parse().expect("minutes"));
    let (began, mut count, mut calls) = (Instant::now(), 0, 0);
    for seed in ever_failed.chain(chosen.clone().unwrap_or(USUAL)) {
        if began.elapsed().as_secs_f64() > 60.0 * minutes {
            break;
        }
        let program = generate(seed);
        let complaints = complaints(&program);
        (count, calls) = (count + 1, calls + program.calls.len());
        if count % 10_000 == 0 {
            println!("{count} programs, {calls} calls, failed: {failed:?}");
        }
        if !complaints.is_empty() {
            report(&program, &complaints);
            failed.push(seed);
            if failed.len() >= MOST_FAILURES {
                break;
            }
        }
    }
    println!("{count} programs with {calls} calls, {} failed", failed.len());
    assert!(failed.is_empty(), "seeds {failed:?}");
}

/// The same seed is the same program, and the programs hold everything that there is to be tested.
#[test]
fn programs_of_a_seed() {
    let programs: Vec<Program> = (0..300).map(generate).collect();
    assert!(programs.iter().zip(0..).all(|(program, seed)| *program == generate(seed)));
    let some = |holds: fn(&Program) -> bool| programs.iter().filter(|program| holds(program)).count();
    assert!(some(|program| program.fault.is_some()) > 60 && some(|program| program.wrong.is_some()) > 10);
    assert!(some(Program::is_right) > 180 && some(|program| program.groups.len() > 2) > 60);
    let large = |program: &Program| program.calls.iter().any(|call| call.elements * call.dtype.size() as u64 > 200_000);
    assert!(some(large) > 30);
}

/// What a program complains of.
fn complaints(program: &Program) -> Vec<String> {
    catch_unwind(AssertUnwindSafe(|| world::run(program))).unwrap_or_else(|_| vec!["panic: see above".to_owned()])
}

/// Prints a program that fails, and a smaller one that fails in the same way.
fn report(program: &Program, found: &[String]) {
    println!("\n{program}");
    found.iter().for_each(|complaint| println!("    {complaint}"));
    let kinds = kinds(found);
    let fails = |candidate: &Program| !self::kinds(&complaints(candidate)).is_disjoint(&kinds);
    let small = shrink::shrink(program, fails, SHRINK_TRIALS);
    println!("shrunk: {small}");
    complaints(&small).iter().for_each(|complaint| println!("    {complaint}"));
}

/// The first words of complaints.
fn kinds(complaints: &[String]) -> BTreeSet<String> {
    complaints.iter().map(|text| text.split(':').next().unwrap_or_default().to_owned()).collect()
}

fn seeds(text: &str) -> Range<u64> {
    let parsed = text.split_once("..").and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
    parsed.expect("PENSTOCK_VIRTUAL_SEEDS is `first..end`")
}

/// What a usual run of the tests takes: some seconds.
const USUAL: Range<u64> = 0..800;
/// A long run ends after so many.
const MOST_FAILURES: usize = 10;
const SHRINK_TRIALS: u32 = 400;
/// Seeds whose programs have found something, and what. A seed means another program when the generator changes: then the
/// programs that still matter get new seeds.
const FAILED: [(u64, &str); 4] = [
    (166, "the loop did not sleep while a hand-shake waited for a process that was stopped"),
    (627, "the same, for a host that had gone dark"),
    (538_572, "a rank left whose acknowledgements were lost with a stream: the other's operation failed"),
    (200_742, "a rank left while acknowledgements waited behind copies on a full stream: the other's operation failed"),
];

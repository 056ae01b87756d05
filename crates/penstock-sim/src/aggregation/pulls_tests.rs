//! Jobs whose results come apart from the blocks: servers that are done late, in any order, or not at all.

use super::*;

/// What a seed draws, with a server that works on whole operations: for up to 50 ms each, and a quarter of them fail.
fn held(seed: u64) -> Scenario {
    let drawn = Scenario::draw(seed);
    let mut random = Random::new(seed ^ 0x0bad_da7a);
    let longest_operation = if drawn.operation == 0 { drawn.blocks } else { drawn.operation };
    let held = Held {
        limit: longest_operation + random.pick(&[0, 1, 8, 100]),
        longest: random.pick(&[0, MILLISECOND / 2, 50 * MILLISECOND]),
        fails: random.below(2) == 0,
    };
    Scenario { held: Some(held), ..drawn }
}

fn run_seeds(seeds: Range<u64>) -> [u64; 4] {
    let outcomes = on_all_cores(seeds, |seed| check(&held(seed)));
    let total = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum();
    [total(|o| o.results), total(|o| o.failed), total(|o| o.fallen), total(|o| o.lost)]
}

/// Hundreds of jobs with all kinds of faults, whose servers are done late and in any order: every result is the undisturbed sum, bit by
/// bit, once; what failed is said on every worker, and nothing else is.
#[test]
fn seeds_of_pulls() {
    let [results, failed, fallen, lost] = run_seeds(0..300);
    println!("{results} results, {failed} failed, {fallen} without a server, {lost} packets lost");
    assert!(results > 300 * 8 && failed > 300 && fallen > 0 && lost > 0, "{results}, {failed}, {fallen}, {lost}");
}

/// The same with other seeds.
#[test]
#[ignore = "takes minutes; for changes of a rule"]
fn thousands_of_seeds_of_pulls() {
    println!("{:?}", run_seeds(300..5000));
}

/// A worker dies, an aggregator restarts, dies for good, or loses a link, or the server is lost, at every single packet of a run in which
/// results come apart: between acceptance and the end of the work, between that and a worker's pull, and in every other moment.
#[test]
fn faults_at_every_packet_of_pulls() {
    let mut runs = 0;
    for (shape, aggregators) in [(Shape::Star, 1), (Shape::Core, 3)] {
        let held = Some(Held { limit: 6, longest: 3 * MILLISECOND, fails: false });
        let scenario = Scenario { held, operation: 3, queued: 2, ..quiet(shape, 3) };
        runs += with_each_fault(&scenario, aggregators);
    }
    println!("{runs} runs");
    assert!(runs > 1000);
}

/// A result comes down once on every link, beside a small packet that says that the block was accepted.
#[test]
fn each_result_travels_once() {
    for workers in [2, 8] {
        let held = Some(Held { limit: 300, longest: MILLISECOND, fails: false });
        let scenario = Scenario { held, blocks: 200, window: 64, jitter: 0, ..quiet(Shape::Star, workers) };
        let outcome = check(&scenario);
        // A push of every worker and a sum; one result, and one to every worker; the same of what says that it was accepted.
        let data = in_all(200) * (3 * workers as u64 + 3);
        assert!((data..data + data / 4).contains(&outcome.packets), "{} packets for {data}", outcome.packets);
    }
}

/// An aggregator that has restarted, and has not heard all children, requests nothing that would say an Ack for them. Where results come
/// apart a block's SeqNum tells nothing of what workers have pulled: if it asked all the same, with a number that it guessed from the
/// SeqNum, the server would forget results that a worker still lacks, and this worker would ask for them for ever: so does seed 320.
/// (`an_aggregator_that_does_not_know_asks_nothing` in `penstock-aggregation` has the shortest such run.)
#[test]
fn restarts_while_results_are_late() {
    let results = on_all_cores(300..400, |seed| {
        let window = [1, 2, 4, 8][seed as usize % 4];
        let longest = [0, MILLISECOND, 4 * MILLISECOND][seed as usize / 4 % 3];
        let held = Some(Held { limit: 4 * window + 8, longest, fails: false });
        let faults = (1..60)
            .map(|turn| (40 * turn + seed % 40, Fault::Restart { aggregator: 0, down: MILLISECOND / 5 }))
            .collect();
        let scenario = Scenario {
            seed,
            held,
            window,
            blocks: 40,
            operation: 1,
            queued: 16,
            loss: 0.2,
            faults,
            ..quiet(Shape::Star, 3)
        };
        check(&scenario).results
    });
    assert_eq!(results, [40 * 3; 100]);
}

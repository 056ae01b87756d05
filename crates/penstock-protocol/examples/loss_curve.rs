//! What loss costs: the rate of simulated jobs with loss, as a share of the same job's without. `docs/aggregation.md` has
//! the table.
//!
//! `cargo run --release -p penstock-protocol --example loss_curve`

use penstock_protocol::aggregation::Timing;
use penstock_protocol::aggregation::simulate::{GIGABIT, Scenario, Shape};

fn main() {
    let blocks: u32 = std::env::args().nth(1).map_or(4000, |word| word.parse().expect("a number of blocks"));
    println!("star, {blocks} blocks, 3 seeds; share of the lossless rate (packets for each block)");
    for (rate, name) in [(GIGABIT, " 1 Gbit/s"), (10 * GIGABIT, "10 Gbit/s")] {
        for workers in [2, 4, 8] {
            for window in [16, 64, 256] {
                let run = |loss: f64| {
                    let runs: Vec<_> =
                        (1..=3).map(|seed| scenario(seed, workers, window, rate, loss, blocks).run()).collect();
                    for (seed, run) in (1..).zip(&runs) {
                        assert_eq!(run.failure, None, "seed {seed}, loss {loss}");
                    }
                    let time = runs.iter().map(|run| run.time).sum::<u64>() as f64 / 3e9;
                    let packets = runs.iter().map(|run| run.packets).sum::<u64>() as f64 / 3.0 / f64::from(blocks);
                    (f64::from(blocks) / time, packets)
                };
                let (lossless, packets) = run(0.0);
                let link = lossless * 8896.0 / rate as f64;
                let shares: Vec<String> = [0.001, 0.01, 0.05]
                    .iter()
                    .map(|loss| {
                        let (rate, packets) = run(*loss);
                        format!("{:3.0} % ({packets:4.1})", 100.0 * rate / lossless)
                    })
                    .collect();
                println!(
                    "{name}  {workers} workers  W {window:3}  lossless {:3.0} % of the link ({packets:4.1})  {}",
                    100.0 * link,
                    shares.join("  ")
                );
            }
        }
    }
}

fn scenario(seed: u64, workers: usize, window: u32, rate: u64, loss: f64, blocks: u32) -> Scenario {
    Scenario {
        jobs: 1,
        workers,
        shape: Shape::Star,
        blocks,
        window,
        // Integers would send some blocks as floats, around the aggregator.
        floats: true,
        keyed: false,
        loss,
        duplicate: 0.0,
        delay: 30_000,
        jitter: 5_000,
        rate,
        queue: 0,
        timing: Timing::default(),
        faults: Vec::new(),
        ..Scenario::draw(seed)
    }
}

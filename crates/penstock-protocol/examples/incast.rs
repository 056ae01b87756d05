//! What happens at a server's link when workers push straight to it, with a short queue: the rate, as a share of what
//! the link can carry to each worker (its N-th part), and packets that the queue lost. `docs/aggregation.md` has the table.
//!
//! `cargo run --release -p penstock-protocol --example incast`

use penstock_protocol::aggregation::Timing;
use penstock_protocol::aggregation::simulate::{GIGABIT, Scenario, Shape};

fn main() {
    let blocks: u32 = std::env::args().nth(1).map_or(2000, |word| word.parse().expect("a number of blocks"));
    println!("direct, {blocks} blocks, 3 seeds; share of the link's N-th part (blocks lost in the queue)");
    for (rate, name) in [(GIGABIT, " 1 Gbit/s"), (10 * GIGABIT, "10 Gbit/s")] {
        for workers in [4, 8] {
            for window in [64, 256] {
                let cells: Vec<String> = [0, 128 << 10, 256 << 10, 512 << 10]
                    .map(|queue| {
                        let runs: Vec<_> =
                            (1..=3).map(|seed| scenario(seed, workers, window, rate, queue, blocks).run()).collect();
                        for (seed, run) in (1..).zip(&runs) {
                            assert_eq!(run.failure, None, "seed {seed}, queue {queue}");
                        }
                        let time = runs.iter().map(|run| run.time).sum::<u64>() as f64 / 3e9;
                        let share = f64::from(blocks) * 8896.0 * workers as f64 / (time * rate as f64);
                        let dropped = runs.iter().map(|run| run.dropped).sum::<u64>() as f64 / 3.0;
                        format!(
                            "{:3.0} % ({:4.1} %)",
                            100.0 * share,
                            100.0 * dropped / f64::from(blocks) / workers as f64
                        )
                    })
                    .to_vec();
                println!("{name}  {workers} workers  W {window:3}  {}", cells.join("  "));
            }
        }
    }
}

fn scenario(seed: u64, workers: usize, window: u32, rate: u64, queue: u64, blocks: u32) -> Scenario {
    Scenario {
        jobs: 1,
        workers,
        shape: Shape::Direct,
        blocks,
        window,
        floats: true,
        keyed: false,
        loss: 0.0,
        duplicate: 0.0,
        delay: 30_000,
        jitter: 5_000,
        rate,
        queue,
        timing: Timing::default(),
        faults: Vec::new(),
        ..Scenario::draw(seed)
    }
}

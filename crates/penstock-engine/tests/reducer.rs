//! Gradients, reduced by real engines as they become ready.

use fastrand::Rng;
use penstock_engine::fingerprint::{Fingerprint, Name};
use penstock_engine::plan::buckets::{Entry, pack};
use penstock_engine::plan::{Algorithm, Collective};
use penstock_engine::{Call, Config, Engine, Gradient, Group, GroupSpec, Reducer, ReducerSpec, Setting, Ticket};
use penstock_types::{DType, Failure, FailureKind, Generation, GroupId, Priority, ReduceOp};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Gradients of all sizes, ready in another order on each rank and in each step, some missing on some ranks: every one ends as
/// the sum over the ranks, and one that no rank has stays as it was.
#[test]
fn any_order() {
    for (world, memory, seed) in [(1, false, 1), (2, false, 2), (2, true, 3), (3, true, 4), (4, false, 5)] {
        let mut rng = Rng::with_seed(seed);
        let lengths: Vec<usize> =
            (0..60).map(|_| [rng.usize(..4), rng.usize(1..300), rng.usize(1000..20_000)][rng.usize(..3)]).collect();
        let ranks = Ranks::new(world, memory, &lengths, |spec| spec.bucket_bytes = 16 << 10);
        for step in 0..5 {
            let missing: Vec<Vec<bool>> =
                (0..world).map(|_| lengths.iter().map(|_| rng.u8(..4) == 0).collect()).collect();
            let mut gradients: Vec<Vec<Vec<f32>>> = (0..world)
                .map(|rank| {
                    let value = |at, index| if missing[rank][at] { 0.0 } else { value(rank, at, index, step) };
                    let gradient = |(at, &length)| (0..length).map(|index| value(at, index)).collect();
                    lengths.iter().enumerate().map(gradient).collect()
                })
                .collect();
            let mut tickets = Vec::new();
            for (rank, reducer) in ranks.reducers.iter().enumerate() {
                let mut order: Vec<usize> = (0..lengths.len()).collect();
                rng.shuffle(&mut order);
                for at in order {
                    let address = gradients[rank][at].as_mut_ptr().cast();
                    // SAFETY: kept until the tickets have completed.
                    unsafe {
                        reducer.submit(
                            at as u32,
                            address,
                            4 * gradients[rank][at].len() as u64,
                            missing[rank][at],
                            None,
                        )
                    }
                    .expect("submitted");
                }
                tickets.push(reducer.flush());
            }
            tickets.iter().for_each(|ticket| wait(ticket).expect("reduced"));
            for (rank, reducer) in ranks.reducers.iter().enumerate() {
                for (at, gradient) in gradients[rank].iter().enumerate() {
                    let nobody = missing.iter().all(|missing| missing[at]);
                    assert_eq!(reducer.was_absent(at as u32), nobody, "seed {seed}");
                    for (index, got) in gradient.iter().enumerate() {
                        let terms = (0..world).filter(|other| !missing[*other][at]);
                        let sum: f32 = terms.map(|other| value(other, at, index, step)).sum();
                        assert_eq!(*got, sum, "seed {seed}, rank {rank}, gradient {at}, element {index}");
                    }
                }
            }
        }
        let stats = ranks.reducers[0].stats();
        assert!(stats.steps == 5 && stats.in_place_bytes > 0 && stats.copied_bytes > 0, "{stats:?}");
    }
}

/// Averages through float16 and bfloat16 are as near as those dtypes are, the same bits on all ranks, and do not overflow where
/// the sum would.
#[test]
fn half_the_bytes() {
    for (wire, largest, error) in [(DType::F16, 60_000.0, 2f32.powi(-10)), (DType::BF16, 3e38, 2f32.powi(-7))] {
        let ranks = Ranks::new(3, false, &[1, 70, 5000], |spec| {
            (spec.op, spec.wire) = (ReduceOp::Avg, Some(wire));
        });
        let mut gradients: Vec<[Vec<f32>; 3]> =
            (0..3).map(|rank| [vec![largest], vec![rank as f32; 70], vec![0.1 * (rank + 1) as f32; 5000]]).collect();
        let tickets = reduce(&ranks, &mut gradients);
        tickets.iter().for_each(|ticket| wait(ticket).expect("reduced"));
        assert!(gradients.windows(2).all(|pair| pair[0] == pair[1]));
        for (got, expected) in gradients[0].iter().flatten().zip([&[largest; 1][..], &[1.0; 70], &[0.2; 5000]].concat())
        {
            assert!((got - expected).abs() <= 2.0 * error * expected, "{wire}: {got} is not {expected}");
        }
    }
}

/// What 16 bits round away every time arrives all the same with error feedback: the sum over the steps is that of the gradients,
/// to within what one step may keep. Without it, the same part is lost in each step. What overflows leaves nothing behind, and
/// all ranks have the same bits throughout.
#[test]
fn error_feedback() {
    // A tenth of float16's smallest number, which rounds to nothing; 1.001 and 1.003, which bfloat16 takes for 1; and lengths
    // that are split into buckets, share one, and end in half a block.
    for (wire, value, kept) in
        [(DType::F16, 6e-9_f32, 6e-8_f32), (DType::BF16, 1.001, 4e-3), (DType::BF16, 1.003, 4e-3)]
    {
        for feedback in [false, true] {
            let lengths = [3, 1500, 70, 30_000];
            let ranks = Ranks::new(2, false, &lengths, |spec| {
                (spec.op, spec.wire, spec.error_feedback) = (ReduceOp::Avg, Some(wire), feedback);
                spec.bucket_bytes = 16 << 10;
            });
            let mut sums = lengths.map(|length| vec![0f64; length]);
            let steps = 200;
            for step in 0..steps {
                let mut gradients =
                    [lengths.map(|length| vec![value; length]), lengths.map(|length| vec![value; length])];
                if step == 3 {
                    gradients[1][1][77] = f32::INFINITY;
                    gradients[0][1][78] = f32::NAN;
                }
                let tickets: Vec<Ticket> = reduce(&ranks, &mut gradients);
                tickets.iter().for_each(|ticket| wait(ticket).expect("reduced"));
                let bits = |rank: usize| gradients[rank].iter().flatten().map(|value| value.to_bits());
                assert!(bits(0).eq(bits(1)), "{wire}, step {step}");
                if step > 3 {
                    for (sum, got) in sums.iter_mut().flatten().zip(gradients[0].iter().flatten()) {
                        *sum += f64::from(*got);
                    }
                }
            }
            let (truth, counted) = (f64::from(value), f64::from(steps - 4));
            for (at, sum) in sums.iter().flatten().enumerate() {
                let off = (sum - counted * truth).abs();
                // Where one rank has lost what it kept, the ranks send different numbers, and hops round their sum.
                if [3 + 77, 3 + 78].contains(&at) {
                    assert!(
                        off < 2.0 * f64::from(kept) + 0.01 * counted * truth || !feedback,
                        "{wire}, element {at}: {sum} is off by {off}"
                    );
                    continue;
                }
                // Each rank keeps at most half a unit of the last place; two of them, before and after.
                assert_eq!(off <= 2.0 * f64::from(kept), feedback, "{wire}, element {at}: {sum} is off by {off}");
            }
        }
    }
}

/// NaN and infinity are found where they come from, before they are everybody's: all ranks fail, and name gradient, rank and step.
#[test]
fn not_a_number() {
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let ranks = Ranks::new(2, false, &[100, 5000, 3], |spec| spec.check_finite = true);
        for step in 1..3 {
            let mut gradients: Vec<[Vec<f32>; 3]> = vec![[vec![1.0; 100], vec![1.0; 5000], vec![1.0; 3]]; 2];
            if step == 2 {
                gradients[1][1][4321] = bad;
            }
            let tickets: Vec<Ticket> = ranks
                .reducers
                .iter()
                .zip(&mut gradients)
                .map(|(reducer, gradients)| {
                    for (at, gradient) in gradients.iter_mut().enumerate() {
                        // SAFETY: kept until the tickets have completed.
                        let result = unsafe {
                            reducer.submit(
                                at as u32,
                                gradient.as_mut_ptr().cast(),
                                size_of_val(&gradient[..]) as u64,
                                false,
                                None,
                            )
                        };
                        assert!(result.is_ok() || step == 2, "{result:?}");
                    }
                    reducer.flush()
                })
                .collect();
            for ticket in &tickets {
                match wait(ticket) {
                    Ok(()) => assert_eq!(step, 1),
                    Err(failure) => {
                        assert_eq!((failure.kind, step), (FailureKind::NotFinite, 2), "{failure}");
                        let told = "the gradient of layer 1 on rank 1 holds NaN or infinity in step 2";
                        assert!(failure.message.contains(told), "{failure}");
                    }
                }
            }
        }
    }
}

/// Once a reducer knows what rounds and buckets take, a pass whose gradients fit into one bucket does not wait for its end with
/// all of them: they go in several rounds and buckets, smaller ones first and last. The sums are right, as in even buckets.
#[test]
fn smaller_first_and_last() {
    let lengths = [1 << 18; 64];
    for tapers in [false, true] {
        let ranks = Ranks::new(2, false, &lengths, |spec| (spec.bucket_bytes, spec.tapers) = (1 << 30, tapers));
        // Nothing is known in the first step. 64 MiB take longer than four rounds do, once one has not met other work.
        for step in 0..if tapers { 30 } else { 3 } {
            let mut gradients: Vec<[Vec<f32>; 64]> =
                (0..2).map(|rank| lengths.map(|length| vec![(rank + step) as f32; length])).collect();
            let before = ranks.reducers[0].stats().rounds;
            reduce(&ranks, &mut gradients).iter().for_each(|ticket| wait(ticket).expect("reduced"));
            assert!(gradients.iter().flatten().flatten().all(|sum| *sum == (2 * step + 1) as f32));
            let rounds = ranks.reducers[0].stats().rounds - before;
            if tapers && step > 0 && rounds > 1 {
                break;
            }
            assert!(rounds == 1 && step < 29, "step {step}: {rounds} rounds");
        }
    }
}

/// From step to step gradients travel another way, on all ranks at once: in other buckets, by another algorithm, over other
/// streams, in another dtype. Every step's result is the sum, and what was asked for is what happened.
#[test]
fn another_way_in_every_step() {
    let lengths = [70_000, 3, 20_000];
    let ranks = Ranks::new(4, false, &lengths, |_| {});
    let (f16, ring, halving) = (Some(DType::F16), Some(Algorithm::Ring), Some(Algorithm::HalvingDoubling));
    let settings = [
        (1 << 20, None, None, 3),
        (1 << 16, None, halving, 1),
        (1 << 16, f16, ring, 2),
        (1 << 18, f16, halving, 64),
        (1 << 20, None, ring, 1),
    ];
    let sent = |rank: usize| -> Vec<u64> {
        let peers = ranks.engines[rank].stats().expect("it runs").peers;
        (0..3).map(|at| peers.iter().map(|peer| peer.streams[at].1.sent_bytes).sum()).collect()
    };
    for (step, (bucket_bytes, wire, algorithm, streams)) in settings.into_iter().enumerate() {
        let before: Vec<_> = (0..4).map(|rank| (ranks.reducers[rank].stats().buckets, sent(rank))).collect();
        for reducer in &ranks.reducers {
            reducer.apply(&Setting { bucket_bytes, wire, algorithm, streams }).expect("between two steps");
        }
        // Up to 2000 in all, which float16 holds exactly.
        let value = |rank: usize, index: usize| ((rank * 100 + index + step) % 500) as f32;
        let gradient = |rank: usize, length: usize| (0..length).map(|index| value(rank, index)).collect();
        let mut gradients: Vec<Vec<Vec<f32>>> =
            (0..4).map(|rank| lengths.iter().map(|&length| gradient(rank, length)).collect()).collect();
        let mut tickets = Vec::new();
        for (reducer, gradients) in ranks.reducers.iter().zip(&mut gradients) {
            for (at, gradient) in gradients.iter_mut().enumerate() {
                // SAFETY: kept until the tickets have completed.
                unsafe {
                    reducer.submit(
                        at as u32,
                        gradient.as_mut_ptr().cast(),
                        size_of_val(&gradient[..]) as u64,
                        false,
                        None,
                    )
                }
                .expect("submitted");
            }
            tickets.push(reducer.flush());
        }
        tickets.iter().for_each(|ticket| wait(ticket).expect("reduced"));
        for (rank, gradients) in gradients.iter().enumerate() {
            for (index, got) in gradients.iter().flat_map(|gradient| gradient.iter().enumerate()) {
                let sum: f32 = (0..4).map(|other| value(other, index)).sum();
                assert_eq!(*got, sum, "step {step}, rank {rank}, element {index}");
            }
            let total = lengths.iter().sum::<usize>() as u64 * 4;
            let buckets = ranks.reducers[rank].stats().buckets - before[rank].0;
            assert!(
                (total / bucket_bytes..=total / bucket_bytes + 4).contains(&buckets),
                "step {step}: {buckets} buckets"
            );
            let stats = ranks.engines[rank].stats().expect("it runs");
            let group = stats.groups.iter().find(|group| group.name == "buckets").expect("it is there");
            if let Some(algorithm) = algorithm {
                assert!(group.algorithm.contains(algorithm.name()), "step {step}: {}", group.algorithm);
            }
            for (at, (sent, before)) in sent(rank).iter().zip(&before[rank].1).enumerate() {
                assert!(at < streams || sent - before < 1000, "step {step}: {sent} on stream {at}");
            }
        }
    }
    assert_eq!(ranks.groups[2][1].hosts().expect("it runs"), [0, 1, 2, 3]);
}

/// While another rank holds all buckets back, those that are agreed on pile up in flight, none before another, and each keeps its
/// own memory: what comes later goes elsewhere, and every bucket ends as the sum of its own gradients. The next step uses the
/// buffers again, the last ones first, for buckets of another size. (That none moves meanwhile the reducer asserts.)
#[test]
fn many_buckets_in_flight() {
    for memory in [false, true] {
        // Four of 4.3 to 5.3 KiB reach a bucket of 16 KiB, and three fit into one; the fourth has one of its own, where it lies.
        let lengths: Vec<usize> = (0..48).map(|at| 1100 + 5 * at).collect();
        let bucket_bytes = 16 << 10;
        let ranks = Ranks::new(2, memory, &lengths, |spec| spec.bucket_bytes = bucket_bytes);
        // The other rank does by hand what its reducer would.
        let (reducer, [rounds, buckets]) = (&ranks.reducers[0], &ranks.groups[1]);
        for step in 0..2 {
            let gradient =
                |rank, at: usize| -> Vec<f32> { (0..lengths[at]).map(|index| value(rank, at, index, step)).collect() };
            let mut gradients: Vec<Vec<f32>> = (0..lengths.len()).map(|at| gradient(0, at)).collect();
            let (before, mut cut, mut ticket) = (reducer.stats(), Vec::new(), None);
            for batch in (0..lengths.len()).collect::<Vec<usize>>().chunks(4) {
                for &at in batch {
                    let address = gradients[at].as_mut_ptr().cast();
                    // SAFETY: kept until the flush has completed.
                    unsafe { reducer.submit(at as u32, address, 4 * gradients[at].len() as u64, false, None) }
                        .expect("submitted");
                }
                if batch.contains(&(lengths.len() - 1)) {
                    ticket = Some(reducer.flush()); // the last round waits for it
                }
                // It has everything: the AND is what the first rank has.
                let mut bits = vec![0xffu8; 17 + 2 * lengths.len() / 8];
                let round = all_reduce(rounds, ReduceOp::BitAnd, DType::U8, &mut bits);
                wait(&round).expect("agreed");
                let entry = |&at: &usize| Entry { index: at as u32, bytes: 4 * lengths[at] as u64, class: 0 };
                cut.extend(pack(batch.iter().map(entry), bucket_bytes));
            }
            let flushed = ticket.expect("flushed with the last batch");
            until(|| reducer.stats().buckets - before.buckets == cut.len() as u64);
            assert!(cut.len() == 24 && flushed.result().is_none(), "none can have ended");
            let stats = reducer.stats();
            assert_eq!((stats.rounds - before.rounds, stats.steps), (12, step as u64));
            let copied: u64 = cut.iter().filter(|bucket| bucket.pieces.len() == 3).map(|bucket| bucket.bytes()).sum();
            assert_eq!(stats.copied_bytes - before.copied_bytes, copied);

            let pieces = |bucket: &penstock_engine::plan::buckets::Bucket| -> Vec<usize> {
                bucket.pieces.iter().map(|piece| piece.index as usize).collect()
            };
            let mut theirs: Vec<Vec<f32>> =
                cut.iter().map(|bucket| pieces(bucket).into_iter().flat_map(|at| gradient(1, at)).collect()).collect();
            let tickets: Vec<Ticket> =
                theirs.iter_mut().map(|bucket| all_reduce(buckets, ReduceOp::Sum, DType::F32, bucket)).collect();
            tickets.iter().chain([&flushed]).for_each(|ticket| wait(ticket).expect("reduced"));
            for (at, got) in gradients.iter().enumerate() {
                let sum: Vec<f32> = gradient(0, at).iter().zip(gradient(1, at)).map(|(a, b)| a + b).collect();
                assert!(*got == sum, "memory {memory}, step {step}, gradient {at}");
            }
            for (bucket, got) in cut.iter().zip(&theirs) {
                let ours: Vec<f32> = pieces(bucket).into_iter().flat_map(|at| gradients[at].clone()).collect();
                assert!(*got == ours, "memory {memory}, step {step}, gradients {:?}", pieces(bucket));
            }
        }
    }
}

/// What is used wrongly is refused at once, and a failure reaches the flush of every rank.
#[test]
fn errors() {
    let ranks = Ranks::new(2, false, &[10, 10], |_| {});
    let mut gradient = [0f32; 10];
    // SAFETY: kept until the end.
    let mut submit = |rank: usize, index| unsafe {
        ranks.reducers[rank].submit(index, gradient.as_mut_ptr().cast(), 40, false, None)
    };
    submit(0, 0).expect("submitted");
    let twice = submit(0, 0).expect_err("pending");
    assert!(twice.message.contains("the gradient of layer 0 is submitted while") && twice.group_lives, "{twice}");
    submit(0, 2).expect_err("there are two");
    let early = ranks.reducers[0].apply(&Setting { bucket_bytes: 1, wire: None, algorithm: None, streams: 1 });
    let early = early.expect_err("one is pending");
    assert!(early.message.contains("between two steps only") && early.group_lives, "{early}");
    let waiting = ranks.reducers[0].flush();
    // The other rank has another model.
    let other = Reducer::new(ranks.spec(1, &[20, 10])).expect("made");
    let mut longer = [0f32; 20];
    // SAFETY: kept until the end.
    unsafe { other.submit(0, longer.as_mut_ptr().cast(), 80, false, None) }.expect("submitted");
    let failures = [waiting, other.flush()].map(|ticket| wait(&ticket).expect_err("they differ"));
    for failure in failures {
        assert_eq!(failure.kind, FailureKind::Mismatch, "{failure}");
        assert!(failure.message.contains("different gradients"), "{failure}");
    }
    submit(0, 1).expect_err("it has failed");
    for (op, dtype, wire) in [
        (ReduceOp::Max, DType::F32, None),
        (ReduceOp::Sum, DType::I32, Some(DType::F16)),
        (ReduceOp::Sum, DType::F32, Some(DType::I8)),
        (ReduceOp::Avg, DType::Bool, None),
    ] {
        let mut spec = ranks.spec(0, &[1]);
        (spec.op, spec.wire, spec.gradients[0].dtype) = (op, wire, dtype);
        assert_eq!(Reducer::new(spec).expect_err("refused").kind, FailureKind::Config);
    }
    let mut spec = ranks.spec(0, &[1]);
    spec.error_feedback = true;
    assert!(Reducer::new(spec).expect_err("refused").message.contains("name a wire dtype too"));
}

/// A pass that is withdrawn before anything was agreed on is no other rank's affair: they wait for the next one.
#[test]
fn withdrawn_before_anything_is_agreed_on() {
    for memory in [false, true] {
        let ranks = Ranks::new(2, memory, &[10, 10], |_| {});
        let mut gradients = [[vec![1f32; 10], vec![2f32; 10]], [vec![3f32; 10], vec![4f32; 10]]];
        let mut lost = vec![100f32; 10];
        // SAFETY: kept until the end.
        unsafe { ranks.reducers[0].submit(1, lost.as_mut_ptr().cast(), 40, false, None) }.expect("submitted");
        wait(&ranks.reducers[0].withdraw()).expect("withdrawn at once");
        reduce(&ranks, &mut gradients).iter().for_each(|ticket| wait(ticket).expect("reduced"));
        assert!(gradients.iter().all(|[first, second]| first == &[4f32; 10] && second == &[6f32; 10]), "{gradients:?}");
        assert_eq!(lost, [100f32; 10]);
        assert_eq!(ranks.reducers[0].stats().steps, 1);
    }
}

/// A pass that is withdrawn after some gradients were agreed on ends the step on all ranks: an error where the pass is whole, none
/// where it raised; the next step is right everywhere.
#[test]
fn withdrawn_in_the_middle() {
    for (memory, raise) in [(false, [true, false]), (true, [true, false]), (false, [true, true])] {
        let ranks = Ranks::new(2, memory, &[10, 10, 10], |spec| spec.bucket_bytes = 1);
        let mut gradients = [[vec![1f32; 10], vec![2f32; 10]], [vec![3f32; 10], vec![4f32; 10]]];
        for (reducer, own) in ranks.reducers.iter().zip(&mut gradients) {
            // SAFETY: kept until the end.
            unsafe { reducer.submit(2, own[0].as_mut_ptr().cast(), 40, false, None) }.expect("submitted");
        }
        until(|| ranks.reducers.iter().all(|reducer| reducer.stats().buckets == 1));
        for (rank, own) in gradients.iter_mut().enumerate() {
            // SAFETY: kept until the end.
            unsafe { ranks.reducers[rank].submit(rank as u32, own[1].as_mut_ptr().cast(), 40, false, None) }
                .expect("submitted");
        }
        let ends =
            |rank: usize| if raise[rank] { ranks.reducers[rank].withdraw() } else { ranks.reducers[rank].flush() };
        let tickets = [0, 1].map(ends);
        for (rank, ticket) in tickets.iter().enumerate() {
            let result = wait(ticket);
            // Also for one that asks when the step is over.
            assert_eq!(wait(&ranks.reducers[rank].agreed()).is_ok(), raise[rank]);
            match result {
                Ok(()) => assert!(raise[rank]),
                Err(failure) => {
                    assert!(!raise[rank] && failure.group_lives && failure.kind == FailureKind::Mismatch, "{failure}");
                    assert!(failure.message.contains("the backward pass of rank 0 raised in step 1"), "{failure}");
                }
            }
        }
        let mut next =
            [[vec![1f32; 10], vec![2f32; 10], vec![3f32; 10]], [vec![5f32; 10], vec![6f32; 10], vec![7f32; 10]]];
        reduce(&ranks, &mut next).iter().for_each(|ticket| wait(ticket).expect("reduced"));
        let want = [vec![6f32; 10], vec![8f32; 10], vec![10f32; 10]];
        assert!(next.iter().all(|own| *own == want), "{next:?}");
        assert_eq!(ranks.reducers[0].stats().steps, 1);
    }
}

/// A step is dropped while a long bucket is on its way: whoever waits for the ranks' agreement is told when that has ended, so that it
/// finds the step over.
#[test]
fn dropped_while_gradients_are_on_their_way() {
    let ranks = Ranks::new(2, false, &[10, 8_000_000], |_| {});
    let mut gradients = [0, 1].map(|_| vec![1f32; 8_000_000]);
    let mut rest = vec![1f32; 10];
    for (reducer, own) in ranks.reducers.iter().zip(&mut gradients) {
        // SAFETY: kept until the end.
        unsafe { reducer.submit(1, own.as_mut_ptr().cast(), 32_000_000, false, None) }.expect("submitted");
    }
    until(|| ranks.reducers.iter().all(|reducer| reducer.stats().buckets > 0));
    // SAFETY: kept until the end.
    unsafe { ranks.reducers[0].submit(0, rest.as_mut_ptr().cast(), 40, false, None) }.expect("submitted");
    let flushed = ranks.reducers[0].flush();
    let agreed = ranks.reducers[0].agreed();
    let withdrawn = ranks.reducers[1].withdraw();
    assert_eq!(wait(&agreed).expect_err("dropped").kind, FailureKind::Mismatch);
    assert!(ranks.reducers[0].arrival(1).is_none(), "it is still on its way");
    assert_eq!(wait(&flushed).expect_err("dropped").kind, FailureKind::Mismatch);
    wait(&withdrawn).expect("withdrawn");
}

/// What is not the gradient that was described, and two gradients in one memory, are refused before they are looked at.
#[test]
fn other_memory() {
    let ranks = Ranks::new(1, false, &[10, 10], |_| {});
    let mut memory = [0f32; 20];
    let address: *mut u8 = memory.as_mut_ptr().cast();
    let submit = |index, offset, bytes| {
        // SAFETY: kept until the end.
        unsafe { ranks.reducers[0].submit(index, address.wrapping_add(offset), bytes, false, None) }
    };
    for (offset, bytes) in [(0, 20), (0, 80), (2, 40)] {
        let failure = submit(0, offset, bytes).expect_err("another");
        assert!(failure.message.contains("layer 0 must be 10 aligned elements of float32"), "{failure}");
    }
    submit(0, 20, 40).expect("submitted");
    for offset in [0, 20, 56] {
        let failure = submit(1, offset, 40).expect_err("it overlaps");
        assert!(failure.message.contains("layer 1 and layer 0 share memory") && failure.group_lives, "{failure}");
    }
    // Back to back is no overlap.
    let mut other = [0f32; 30];
    for (index, offset) in [(0, 40), (1, 80)] {
        wait(&ranks.reducers[0].withdraw()).expect("withdrawn");
        let address = other.as_mut_ptr().cast::<u8>().wrapping_add(offset);
        // SAFETY: kept until the end.
        unsafe { ranks.reducers[0].submit(index, address, 40, false, None) }.expect("submitted");
    }
}

/// A rank is told when all ranks have agreed on all gradients, and of each when it has arrived; a gradient that was not submitted,
/// or has arrived, is not waited for. Larger indices first or not: the same sums. After a failure nobody waits, and nothing
/// counts as arrived.
#[test]
fn told_of_each_gradient() {
    for last_first in [false, true] {
        let ranks = Ranks::new(2, false, &[300_000, 7, 0, 200_000], |spec| {
            (spec.bucket_bytes, spec.last_first) = (64 << 10, last_first);
        });
        let mut gradients: Vec<[Vec<f32>; 4]> = (0..2)
            .map(|rank| [300_000, 7, 0, 200_000].map(|length| (0..length).map(|at| value(rank, 1, at, 0)).collect()))
            .collect();
        assert!(ranks.reducers[0].arrival(0).is_none() && ranks.reducers[0].arrival(9).is_none());
        let tickets = reduce(&ranks, &mut gradients);
        for reducer in &ranks.reducers {
            wait(&reducer.agreed()).expect("agreed");
            let late = reducer.late().expect("all is well");
            assert!(late.is_sorted() && late.iter().all(|index| [0, 1, 3].contains(index)), "{late:?}");
        }
        for (reducer, gradients) in ranks.reducers.iter().zip(&gradients) {
            for at in [3, 1, 0, 2] {
                if let Some(arrival) = reducer.arrival(at as u32) {
                    wait(&arrival).expect("arrived");
                }
                assert!(reducer.arrival(at as u32).is_none());
                assert!(!reducer.late().expect("all is well").contains(&(at as u32)));
                let sum = |index| value(0, 1, index, 0) + value(1, 1, index, 0);
                assert!(gradients[at].iter().enumerate().all(|(index, got)| *got == sum(index)));
            }
        }
        tickets.iter().for_each(|ticket| wait(ticket).expect("reduced"));
        // Nothing is pending, so there is nothing to agree on.
        wait(&ranks.reducers[0].agreed()).expect("idle");
        let address = gradients[0][0].as_mut_ptr().cast();
        // SAFETY: kept until the end.
        unsafe { ranks.reducers[0].submit(0, address, 1_200_000, false, None) }.expect("submitted");
        let waiting = [ranks.reducers[0].arrival(0).expect("pending"), ranks.reducers[0].flush()];
        let agreed = ranks.reducers[0].agreed();
        ranks.groups[0][0].abort("over");
        for ticket in [&agreed, &waiting[0], &waiting[1]] {
            wait(ticket).expect_err("the group has failed");
        }
        ranks.reducers[0].late().expect_err("nobody knows");
        for index in 0..4 {
            let arrival = ranks.reducers[0].arrival(index).expect("not for all that is known");
            wait(&arrival).expect_err("the group has failed");
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- helpers

/// Every rank submits its gradients, in order. The caller keeps them until the tickets have completed.
fn reduce<const N: usize>(ranks: &Ranks, gradients: &mut [[Vec<f32>; N]]) -> Vec<Ticket> {
    let each = |(reducer, gradients): (&Reducer, &mut [Vec<f32>; N])| {
        for (at, gradient) in gradients.iter_mut().enumerate() {
            // SAFETY: the caller keeps it.
            unsafe {
                reducer.submit(at as u32, gradient.as_mut_ptr().cast(), size_of_val(&gradient[..]) as u64, false, None)
            }
            .expect("submitted");
        }
        reducer.flush()
    };
    ranks.reducers.iter().zip(gradients).map(each).collect()
}

/// Starts an all-reduce in place. The caller keeps the elements until the ticket has completed.
fn all_reduce<T>(group: &Group, op: ReduceOp, dtype: DType, elements: &mut [T]) -> Ticket {
    assert_eq!(size_of::<T>(), dtype.size());
    let call = Call {
        collective: Collective::AllReduce,
        fingerprint: Fingerprint::new(Name::AllReduce, Some(op), dtype, None, elements.len() as u64),
        dtype,
        op,
        bytes: size_of_val(elements) as u64,
        splits: None,
        input: std::ptr::null(),
        output: elements.as_mut_ptr().cast(),
        tag: 0,
        coflow: 0,
        priority: Priority(0),
        hold: false,
        timeout: 20_000_000_000,
        keep: None,
    };
    // SAFETY: the caller keeps them.
    unsafe { group.start(call) }
}

/// Blocks until something is so.
fn until(holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < end, "it does not come true within 30 s");
        std::thread::yield_now();
    }
}

struct Ranks {
    groups: Vec<[Group; 2]>,
    reducers: Vec<Reducer>,
    engines: Vec<Engine>,
}

impl Ranks {
    fn new(world: usize, memory: bool, lengths: &[usize], change: impl Fn(&mut ReducerSpec)) -> Ranks {
        let config = |rank| Config {
            rank,
            host: "test".into(),
            generation: Generation(1),
            addresses: vec!["127.0.0.1".parse().unwrap()],
            ports: 0..=0,
            streams: 3,
            io_threads: 1,
            streams_within_host: 3,
            shared_memory: memory,
            checksum: false,
            dead_after: Duration::from_secs(4),
            socket_buffer_bytes: 0,
            ptracer: penstock_engine::Ptracer::default(),
            flight_recorder: None,
        };
        let engines: Vec<Engine> =
            (0..world).map(|rank| Engine::start(&config(rank as u32)).expect("starts")).collect();
        let (rounds, buckets) = (join(&engines, "rounds"), join(&engines, "buckets"));
        let groups: Vec<_> = rounds.into_iter().zip(buckets).map(|(rounds, buckets)| [rounds, buckets]).collect();
        let mut ranks = Ranks { groups, reducers: Vec::new(), engines };
        ranks.reducers = (0..world)
            .map(|rank| {
                let mut spec = ranks.spec(rank, lengths);
                change(&mut spec);
                Reducer::new(spec).expect("made")
            })
            .collect();
        ranks
    }

    fn spec(&self, rank: usize, lengths: &[usize]) -> ReducerSpec {
        let [rounds, buckets] = self.groups[rank].clone();
        ReducerSpec {
            rounds,
            buckets,
            rank: rank as u32,
            world: self.groups.len() as u32,
            gradients: lengths
                .iter()
                .enumerate()
                .map(|(at, &length)| Gradient {
                    name: format!("layer {at}"),
                    elements: length as u64,
                    dtype: DType::F32,
                    order: 0,
                })
                .collect(),
            op: ReduceOp::Sum,
            bucket_bytes: 1 << 20,
            wire: None,
            error_feedback: false,
            last_first: false,
            tapers: false,
            check_finite: false,
            priority: Priority(0),
            timeout: 20_000_000_000,
        }
    }
}

fn join(engines: &[Engine], name: &str) -> Vec<Group> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = GroupId(NEXT.fetch_add(1, Ordering::Relaxed));
    let members: Vec<_> = engines.iter().map(|engine| engine.contact().clone()).collect();
    let joins: Vec<_> = (engines.iter().enumerate())
        .map(|(rank, engine)| {
            engine.join(GroupSpec {
                id,
                generation: Generation(1),
                rank: rank as u32,
                members: members.clone(),
                secret: b"secret".to_vec(),
                algorithm: None,
                name: name.into(),
            })
        })
        .collect();
    joins
        .into_iter()
        .map(|(group, ticket)| {
            wait(&ticket).expect("joined");
            group
        })
        .collect()
}

fn wait(ticket: &Ticket) -> Result<(), Failure> {
    ticket.wait(Some(Duration::from_secs(30))).expect("ends within 30 s")
}

/// A value that tells where it came from; sums of them are exact.
fn value(rank: usize, gradient: usize, index: usize, step: usize) -> f32 {
    (rank * 1000 + (gradient * 31 + index * 7 + step) % 997) as f32
}

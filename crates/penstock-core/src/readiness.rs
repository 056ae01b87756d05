//! Agreement on which gradients are ready on every rank, without a master (AIACC-Training, section V-A).
//!
//! Autograd makes gradients in an order of its own, on each rank at its own pace, and an all-reduce needs all ranks. Every rank
//! keeps two bits a gradient; in a *round* the ranks all-reduce their bits with AND, and what is still set is ready
//! everywhere: all ranks hold the same list, and reduce what is on it in the same order. This is the decision alone; the
//! engine's `Reducer` carries it out.
//!
//! ```text
//!   | digest (8) | digest, inverted (8) | whole, a bit a rank | ready, a bit a gradient | absent, a bit a gradient |
//! ```
//!
//! The digest describes the gradients. The AND leaves both copies intact only if it is the same on all ranks.
//!
//! **When does a round begin?** When the ready gradients fill a bucket, or the backward pass has ended. One round runs at a
//! time, and gradients that become ready meanwhile go into the next. A rank that has ended waits in its round until the others
//! join it: there are as many rounds as the slowest rank asks for, and one more.
//!
//! **Rounds are smaller at both ends of a pass.** Until the first round the link has nothing to send, and what the last one
//! carries travels when no computation hides it. So a round is due earlier when fewer bytes than a bucket have gone into rounds,
//! or are still to come: sizes double from the beginning on and halve towards the end, down to what is just worth a round.
//! Each rank decides by its own estimate of that; what a round finds ready is the same on all ranks in any case.
//!
//! **The last round waits for the end of the pass.** Once a rank has submitted all its gradients, it begins no round before it
//! flushes: a round that completes the step has only ranks in it whose passes have ended well. The end of a step is agreed on
//! without a bit or a round of its own. The price: what the last round carries does not travel while a pass goes on behind its
//! last gradient.
//!
//! **A gradient that a rank does not produce** is *absent*: at the end of the pass it counts as ready, and as zeros. A
//! gradient that is absent on all ranks is not reduced, and stays as it was.
//!
//! **A pass that raises** is withdrawn. While no gradient of the step is agreed on, that concerns this rank alone: the others
//! wait for its next pass. Once one is agreed on, the step can neither be taken back nor completed: this rank joins one more
//! round, in which it clears its bit of *whole*, and all ranks drop the step. All of them take part in that round: they are
//! still in the step, since all have agreed and none can have ended it without the last gradient, which this rank keeps back
//! until its pass has ended.

use crate::digest::digest;
use penstock_plan::buckets::Entry;

/// One rank's view of its gradients.
#[derive(Debug)]
pub struct Readiness {
    digest: u64,
    entries: Vec<(Entry, State)>,
    rank: u32,
    world: u32,
    /// Of all gradients.
    total_bytes: u64,
    /// Bytes of this step that are not ready here yet.
    left_bytes: u64,
    /// Bytes that became ready after the last round began.
    fresh_bytes: u64,
    /// Gradients that are ready here and not yet agreed on.
    pending: usize,
    /// The backward pass has ended: no more gradients become pending.
    flushed: bool,
    in_round: bool,
    /// Gradients that all ranks have agreed on in this step.
    agreed: usize,
    /// This rank's pass has raised, and its step is not over yet.
    withdrawn: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Ready,
    Absent,
    /// Agreed on in this step.
    Agreed,
}

/// What a round has decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Gradients that are ready on all ranks and that at least one rank has produced, in the order of their indices.
    pub ready: Vec<Entry>,
    /// Gradients that no rank has produced.
    pub absent: Vec<u32>,
    /// Ranks whose passes have raised: the step is dropped, and nothing is ready or absent.
    pub withdrawn: Vec<u32>,
}

impl Readiness {
    /// `entries` are the gradients, by index; `names` is a digest of everything else that ranks must share about them.
    pub fn new(entries: Vec<Entry>, names: u64, rank: u32, world: u32) -> Readiness {
        debug_assert!(entries.iter().enumerate().all(|(place, entry)| entry.index as usize == place));
        let total_bytes = entries.iter().map(|entry| entry.bytes).sum();
        Readiness {
            digest: digest(
                entries
                    .iter()
                    .flat_map(|entry| [u64::from(entry.index), entry.bytes, u64::from(entry.class)])
                    .chain([names]),
            ),
            entries: entries.into_iter().map(|entry| (entry, State::Idle)).collect(),
            rank,
            world,
            total_bytes,
            left_bytes: total_bytes,
            fresh_bytes: 0,
            pending: 0,
            flushed: false,
            in_round: false,
            agreed: 0,
            withdrawn: false,
        }
    }

    /// A gradient is ready here, or absent in this pass. Returns false if it was submitted in this step before.
    pub fn submit(&mut self, index: u32, absent: bool) -> bool {
        let (entry, state) = &mut self.entries[index as usize];
        if *state != State::Idle {
            return false;
        }
        *state = if absent { State::Absent } else { State::Ready };
        self.left_bytes -= entry.bytes;
        self.fresh_bytes += entry.bytes;
        self.pending += 1;
        true
    }

    /// The backward pass has ended: the pending gradients go into rounds as they are.
    pub fn flush(&mut self) {
        self.flushed = self.pending > 0;
    }

    /// The pass has raised: no more gradients of it come, and their averages are not needed.
    pub fn withdraw(&mut self) {
        self.withdrawn = self.pending > 0 || self.agreed > 0;
        self.settle();
    }

    /// Ends the step at once if it can be taken back.
    fn settle(&mut self) {
        if self.withdrawn && !self.in_round && self.agreed == 0 {
            self.reset();
        }
    }

    /// Forgets what was submitted.
    fn reset(&mut self) {
        self.entries.iter_mut().for_each(|(_, state)| *state = State::Idle);
        (self.left_bytes, self.fresh_bytes) = (self.total_bytes, 0);
        (self.pending, self.agreed) = (0, 0);
        (self.flushed, self.withdrawn) = (false, false);
    }

    /// Whether nothing waits for other ranks.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && !self.withdrawn
    }

    /// Whether a gradient waits for other ranks.
    pub fn is_pending(&self, index: u32) -> bool {
        matches!(self.entries[index as usize].1, State::Ready | State::Absent)
    }

    /// How many gradients wait for other ranks.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// The bits to all-reduce with AND, if it is time for a round: fresh gradients fill a bucket of `bucket_bytes`, or a smaller
    /// one, but not below `least_bytes`, at the beginning of a pass and towards its end.
    pub fn poll_round(&mut self, bucket_bytes: u64, least_bytes: u64) -> Option<Vec<u8>> {
        // A pass may raise behind its last gradient: only its end lets the step become complete.
        let may_go_on = self.pending + self.agreed < self.entries.len();
        let is_full = || self.fresh_bytes >= self.due_bytes(bucket_bytes, least_bytes);
        let is_due = self.pending > 0 && (self.flushed || (may_go_on && is_full()));
        if self.in_round || !(self.withdrawn || is_due) {
            return None;
        }
        self.in_round = true;
        self.fresh_bytes = 0;
        let head = self.head_bytes();
        let mut bits = vec![0; head + 2 * self.bitmap_bytes()];
        bits[..8].copy_from_slice(&self.digest.to_le_bytes());
        bits[8..16].copy_from_slice(&(!self.digest).to_le_bytes());
        bits[16..head].fill(0xff);
        if self.withdrawn {
            bits[16 + self.rank as usize / 8] &= !(1 << (self.rank % 8));
        }
        let (ready, absent) = bits[head..].split_at_mut(self.bitmap_bytes());
        for (at, (_, state)) in self.entries.iter().enumerate() {
            let bit = 1 << (at % 8);
            match state {
                State::Idle | State::Agreed => {}
                State::Ready => ready[at / 8] |= bit,
                State::Absent => {
                    ready[at / 8] |= bit;
                    absent[at / 8] |= bit;
                }
            }
        }
        Some(bits)
    }

    /// A round has ended with these bits. Returns `None` if the ranks do not have the same gradients.
    pub fn handle_round(&mut self, bits: &[u8]) -> Option<Agreed> {
        debug_assert!(self.in_round);
        self.in_round = false;
        if bits[..8] != self.digest.to_le_bytes() || bits[8..16] != (!self.digest).to_le_bytes() {
            return None;
        }
        let (whole, maps) = bits[16..].split_at(self.head_bytes() - 16);
        let (ready, absent) = maps.split_at(self.bitmap_bytes());
        let is_set = |bits: &[u8], at: usize| bits[at / 8] >> (at % 8) & 1 == 1;
        let withdrawn = (0..self.world).filter(|rank| !is_set(whole, *rank as usize)).collect();
        let mut agreed = Agreed { withdrawn, ..Agreed::default() };
        if !agreed.withdrawn.is_empty() {
            self.reset();
            return Some(agreed);
        }
        for (at, (entry, state)) in self.entries.iter_mut().enumerate() {
            if !is_set(ready, at) {
                continue;
            }
            debug_assert_ne!(*state, State::Idle, "the AND holds what this rank has given");
            *state = State::Agreed;
            self.pending -= 1;
            self.agreed += 1;
            if is_set(absent, at) {
                agreed.absent.push(entry.index);
            } else {
                agreed.ready.push(*entry);
            }
        }
        if self.agreed == self.entries.len() {
            // The step is over on all ranks, and was flushed by all.
            self.reset();
        } else if self.pending == 0 {
            self.flushed = false;
        }
        self.settle();
        Some(agreed)
    }

    /// How many fresh bytes begin a round.
    fn due_bytes(&self, bucket_bytes: u64, least_bytes: u64) -> u64 {
        let begun_bytes = self.total_bytes - self.left_bytes - self.fresh_bytes;
        begun_bytes.min(self.left_bytes).max(least_bytes).min(bucket_bytes)
    }

    fn head_bytes(&self) -> usize {
        16 + (self.world as usize).div_ceil(8)
    }

    fn bitmap_bytes(&self) -> usize {
        self.entries.len().div_ceil(8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    fn entries(sizes: &[u64]) -> Vec<Entry> {
        let entry = |(index, &bytes)| Entry { index: index as u32, bytes, class: 0 };
        sizes.iter().enumerate().map(entry).collect()
    }

    /// Ranks whose gradients come in any order, in each step another, and of which some are missing on some ranks, agree on
    /// the same lists in the same rounds; every gradient is agreed once a step, as absent only if nobody had it.
    #[test]
    fn any_order_ends_in_agreement() {
        for seed in 0..300 {
            let mut rng = Rng::with_seed(seed);
            let (world, count) = (rng.usize(1..9), rng.usize(1..40));
            let sizes: Vec<u64> = (0..count).map(|_| rng.u64(1..1000)).collect();
            let bucket_bytes = rng.u64(1..3000);
            let least_bytes = if rng.bool() { u64::MAX } else { rng.u64(1..3000) };
            let mut ranks: Vec<Readiness> =
                (0..world).map(|rank| Readiness::new(entries(&sizes), 0, rank as u32, world as u32)).collect();
            for _step in 0..3 {
                let missing: Vec<Vec<bool>> =
                    (0..world).map(|_| (0..count).map(|_| rng.u8(..6) == 0).collect()).collect();
                let mut orders: Vec<Vec<u32>> = (0..world).map(|_| (0..count as u32).collect()).collect();
                orders.iter_mut().for_each(|order| rng.shuffle(order));
                let mut waiting: Vec<Option<Vec<u8>>> = vec![None; world];
                let (mut rounds, mut most) = (0, 0);
                let mut seen = vec![0; count];
                while orders.iter().any(|order| !order.is_empty()) || ranks.iter().any(|rank| rank.pending() > 0) {
                    let rank = rng.usize(..world);
                    match orders[rank].pop() {
                        Some(index) if missing[rank][index as usize] => {
                            // Known at the end only: put off.
                            let last = orders[rank].iter().all(|&other| missing[rank][other as usize]);
                            if last {
                                assert!(ranks[rank].submit(index, true), "seed {seed}");
                            } else {
                                orders[rank].insert(0, index);
                            }
                        }
                        Some(index) => assert!(ranks[rank].submit(index, false), "seed {seed}"),
                        None => {}
                    }
                    if orders[rank].is_empty() {
                        ranks[rank].flush();
                    }
                    if waiting[rank].is_none() {
                        waiting[rank] = ranks[rank].poll_round(bucket_bytes, least_bytes);
                    }
                    if waiting.iter().all(Option::is_some) {
                        rounds += 1;
                        let all: Vec<Vec<u8>> =
                            waiting.iter_mut().map(|bits| bits.take().expect("looked at")).collect();
                        let and: Vec<u8> =
                            (0..all[0].len()).map(|at| all.iter().fold(0xff, |and, bits| and & bits[at])).collect();
                        let agreed: Vec<Agreed> =
                            ranks.iter_mut().map(|rank| rank.handle_round(&and).expect("alike")).collect();
                        assert!(agreed.windows(2).all(|pair| pair[0] == pair[1]), "seed {seed}");
                        for entry in &agreed[0].ready {
                            seen[entry.index as usize] += 1;
                            assert!(missing.iter().any(|missing| !missing[entry.index as usize]), "seed {seed}");
                        }
                        for index in &agreed[0].absent {
                            seen[*index as usize] += 1;
                            assert!(missing.iter().all(|missing| missing[*index as usize]), "seed {seed}");
                        }
                        most = most.max(rounds);
                    }
                }
                assert!(seen.iter().all(|&times| times == 1), "seed {seed}: {seen:?}");
                // At most one round for each bucket that the slowest fills, and the end; sizes double and halve a few times.
                let halvings = 2 * (bucket_bytes / least_bytes.min(bucket_bytes)).ilog2();
                let limit = sizes.iter().sum::<u64>() / bucket_bytes + 2 + u64::from(halvings);
                assert!(most <= limit, "seed {seed}: {most} rounds, not {limit}");
            }
        }
    }

    /// In the same order on all ranks, a step costs a round for each bucket at most, and one gradient is not asked for twice.
    #[test]
    fn the_same_order_costs_a_round_a_bucket() {
        let mut rank = Readiness::new(entries(&[100; 50]), 0, 0, 1);
        let mut rounds = 0;
        for index in 0..50 {
            assert!(rank.submit(index, false) && !rank.submit(index, true));
            if let Some(bits) = rank.poll_round(1000, u64::MAX) {
                rounds += 1;
                assert_eq!(rank.handle_round(&bits).expect("alike").ready.len(), 10);
            }
        }
        // The last bucket is full, and waits for the end of the pass.
        assert_eq!((rounds, rank.pending()), (4, 10));
        rank.flush();
        let bits = rank.poll_round(1000, u64::MAX).expect("flushed");
        assert_eq!(rank.handle_round(&bits).expect("alike").ready.len(), 10);
        assert_eq!((rank.pending(), rank.poll_round(1000, u64::MAX)), (0, None));
    }

    /// Rounds carry few bytes first, then twice as many each, and half of what is left each at the end, between the least and a
    /// bucket. A step that was dropped in the middle does not count in the next one.
    #[test]
    fn rounds_grow_and_shrink() {
        let mut rank = Readiness::new(entries(&[10; 100]), 0, 0, 1);
        let sizes = |rank: &mut Readiness, count: u32, least_bytes: u64| {
            let mut sizes = Vec::new();
            for index in 0..count {
                assert!(rank.submit(index, false));
                if index == 99 {
                    rank.flush();
                }
                if let Some(bits) = rank.poll_round(200, least_bytes) {
                    sizes.push(rank.handle_round(&bits).expect("alike").ready.len());
                }
            }
            sizes
        };
        let whole = [3, 3, 6, 12, 20, 20, 18, 9, 5, 3, 1];
        assert_eq!(sizes(&mut rank, 100, 30), whole);
        assert_eq!(sizes(&mut rank, 40, 30), whole[..4]);
        rank.withdraw();
        let bits = rank.poll_round(200, 30).expect("it tells the others");
        assert_eq!(rank.handle_round(&bits).expect("alike").withdrawn, [0]);
        assert_eq!(sizes(&mut rank, 100, 30), whole);
        assert_eq!(sizes(&mut rank, 100, 200), [20; 5]);
        assert_eq!(sizes(&mut rank, 100, u64::MAX), [20; 5]);
    }

    /// Ranks whose passes raise anywhere, while rounds are under way or not, and begin anew: what is agreed on in the end was
    /// submitted by every rank in one pass each, which has ended, or all ranks have dropped the step; nobody waits for ever.
    /// A pass may raise after its last gradient.
    #[test]
    fn withdrawn_passes_are_dropped_by_all_or_noticed_by_none() {
        for seed in 0..500 {
            let mut rng = Rng::with_seed(seed);
            let (world, count) = (rng.usize(2..5), rng.usize(1..12));
            let (bucket_bytes, least_bytes) = (rng.u64(1..30), rng.u64(1..60));
            let sizes = vec![10; count];
            let mut ranks: Vec<Readiness> =
                (0..world).map(|rank| Readiness::new(entries(&sizes), 0, rank as u32, world as u32)).collect();
            let mut waiting: Vec<Option<Vec<u8>>> = vec![None; world];
            // In each pass of each rank: what has been submitted, and where it raises, if it does.
            let mut submitted = vec![0; world];
            let mut raises: Vec<Option<usize>> =
                (0..world).map(|_| (rng.u8(..2) == 0).then(|| rng.usize(..=count))).collect();
            let (mut halted, mut ended, mut dropped) = (vec![false; world], vec![false; world], 0);
            let (mut complete, mut agreed_now) = (0, 0);
            for _ in 0..20_000 {
                let rank = rng.usize(..world);
                if halted[rank] {
                    // It begins anew when its step is over; so does a rank that has heard of another's.
                    if ranks[rank].is_idle() && waiting[rank].is_none() {
                        (halted[rank], ended[rank]) = (false, false);
                        (submitted[rank], raises[rank]) = (0, None);
                    }
                } else if raises[rank] == Some(submitted[rank]) {
                    ranks[rank].withdraw();
                    halted[rank] = true;
                } else if submitted[rank] < count {
                    assert!(ranks[rank].submit(submitted[rank] as u32, false), "seed {seed}");
                    submitted[rank] += 1;
                } else {
                    ranks[rank].flush();
                    ended[rank] = true;
                }
                if waiting[rank].is_none() {
                    waiting[rank] = ranks[rank].poll_round(bucket_bytes, least_bytes);
                }
                if waiting.iter().all(Option::is_some) {
                    let all: Vec<Vec<u8>> = waiting.iter_mut().map(|bits| bits.take().expect("looked at")).collect();
                    let and: Vec<u8> =
                        (0..all[0].len()).map(|at| all.iter().fold(0xff, |and, bits| and & bits[at])).collect();
                    let agreed: Vec<Agreed> =
                        ranks.iter_mut().map(|rank| rank.handle_round(&and).expect("alike")).collect();
                    assert!(agreed.windows(2).all(|pair| pair[0] == pair[1]), "seed {seed}");
                    agreed_now += agreed[0].ready.len();
                    if !agreed[0].withdrawn.is_empty() {
                        assert!(agreed[0].ready.is_empty() && agreed_now > 0 && agreed_now < count, "seed {seed}");
                        assert!(ranks.iter().all(Readiness::is_idle), "seed {seed}");
                        (agreed_now, dropped) = (0, dropped + 1);
                        halted.fill(true);
                    } else if agreed_now == count {
                        assert!(ranks.iter().all(Readiness::is_idle), "seed {seed}");
                        assert!(ended.iter().all(|ended| *ended), "seed {seed}: complete, and not all have ended");
                        complete += 1;
                        agreed_now = 0;
                        halted.fill(true);
                    }
                }
                if complete == 3 {
                    break;
                }
            }
            assert!(complete == 3 && dropped <= world, "seed {seed}: {complete} steps, {dropped} dropped");
        }
    }

    /// Ranks with other gradients, or another order of them, find out in the first round.
    #[test]
    fn other_gradients_are_found_out() {
        for other in [&[8, 8, 16][..], &[8, 16]] {
            let mut ranks = [Readiness::new(entries(&[16, 8, 8]), 0, 0, 2), Readiness::new(entries(other), 0, 1, 2)];
            let mut all = ranks.each_mut().map(|rank| {
                assert!(rank.submit(0, false));
                rank.flush();
                rank.poll_round(1, u64::MAX).expect("flushed")
            });
            let length = all[0].len().min(all[1].len());
            let [first, second] = &mut all;
            first.truncate(length);
            let and: Vec<u8> = first.iter().zip(second.iter()).map(|(a, b)| a & b).collect();
            assert_eq!(ranks.each_mut().map(|rank| rank.handle_round(&and)), [None, None]);
        }
    }
}

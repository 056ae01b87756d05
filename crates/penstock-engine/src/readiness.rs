//! Which gradients are ready on every rank, agreed without a master (AIACC-Training, section V-A).
//!
//! Autograd makes gradients in an order of its own, on each rank at its own pace, and an all-reduce needs all ranks. Every rank
//! keeps two bits a gradient; in a *round* the ranks all-reduce their bits with AND, and what is still set is ready
//! everywhere: all ranks hold the same list, and reduce what is on it in the same order. This is the decision alone; the
//! [`Reducer`](crate::Reducer) carries it out.
//!
//! ```text
//!   | digest (8) | digest, inverted (8) | ready, a bit a gradient | absent, a bit a gradient |
//! ```
//!
//! The digest is of what the gradients are. The AND of both copies gives them back only if it is the same on all ranks.
//!
//! **When is it time for a round?** When as much is ready as a unit holds, or the backward pass has ended; one at a time, so
//! that what becomes ready meanwhile goes into the next. A rank that has ended waits in its round until the others come to
//! theirs: there are as many rounds as the slowest rank asks for, and one more.
//!
//! **A gradient that a rank does not produce** is *absent*: at the end of the pass it counts as ready, and as zeros. If it is
//! absent everywhere, nobody reduces it, and it stays as it was.

use crate::digest::digest;
use penstock_plan::units::Entry;

/// One rank's view of its gradients.
#[derive(Debug)]
pub(crate) struct Readiness {
    digest: u64,
    entries: Vec<(Entry, State)>,
    /// Bytes that became ready after the last round began.
    fresh_bytes: u64,
    /// Gradients that are ready here and not yet agreed.
    pending: usize,
    /// The backward pass has ended; what is pending will not grow.
    flushed: bool,
    in_round: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Ready,
    Absent,
}

/// What a round has decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Ready on all ranks, and produced by one at least; in the order of their indices.
    pub(crate) ready: Vec<Entry>,
    /// Produced by no rank.
    pub(crate) absent: Vec<u32>,
}

impl Readiness {
    /// Of gradients whose indices are their places in the list; `names` is a digest of what they are called.
    pub(crate) fn new(entries: Vec<Entry>, names: u64) -> Readiness {
        debug_assert!(entries.iter().enumerate().all(|(place, entry)| entry.index as usize == place));
        Readiness {
            digest: digest(
                entries
                    .iter()
                    .flat_map(|entry| [u64::from(entry.index), entry.bytes, u64::from(entry.class)])
                    .chain([names]),
            ),
            entries: entries.into_iter().map(|entry| (entry, State::Idle)).collect(),
            fresh_bytes: 0,
            pending: 0,
            flushed: false,
            in_round: false,
        }
    }

    /// A gradient is ready here, or will not be in this pass. False if it is pending already.
    pub(crate) fn submit(&mut self, index: u32, absent: bool) -> bool {
        let (entry, state) = &mut self.entries[index as usize];
        if *state != State::Idle {
            return false;
        }
        *state = if absent { State::Absent } else { State::Ready };
        self.fresh_bytes += entry.bytes;
        self.pending += 1;
        true
    }

    /// The backward pass has ended: what is pending goes as it is.
    pub(crate) fn flush(&mut self) {
        self.flushed = self.pending > 0;
    }

    /// How many gradients wait for other ranks.
    pub(crate) fn pending(&self) -> usize {
        self.pending
    }

    /// The bits to all-reduce with AND, if it is time for a round.
    pub(crate) fn poll_round(&mut self, unit_bytes: u64) -> Option<Vec<u8>> {
        if self.in_round || self.pending == 0 || !(self.flushed || self.fresh_bytes >= unit_bytes) {
            return None;
        }
        self.in_round = true;
        self.fresh_bytes = 0;
        let mut bits = vec![0; 16 + 2 * self.bitmap_bytes()];
        bits[..8].copy_from_slice(&self.digest.to_le_bytes());
        bits[8..16].copy_from_slice(&(!self.digest).to_le_bytes());
        let (ready, absent) = bits[16..].split_at_mut(self.bitmap_bytes());
        for (at, (_, state)) in self.entries.iter().enumerate() {
            let bit = 1 << (at % 8);
            match state {
                State::Idle => {}
                State::Ready => ready[at / 8] |= bit,
                State::Absent => {
                    ready[at / 8] |= bit;
                    absent[at / 8] |= bit;
                }
            }
        }
        Some(bits)
    }

    /// A round has ended with these bits. `None`: the ranks do not have the same gradients.
    pub(crate) fn handle_round(&mut self, bits: &[u8]) -> Option<Agreed> {
        debug_assert!(self.in_round);
        self.in_round = false;
        if bits[..8] != self.digest.to_le_bytes() || bits[8..16] != (!self.digest).to_le_bytes() {
            return None;
        }
        let (ready, absent) = bits[16..].split_at(self.bitmap_bytes());
        let is_set = |bits: &[u8], at: usize| bits[at / 8] >> (at % 8) & 1 == 1;
        let mut agreed = Agreed::default();
        for (at, (entry, state)) in self.entries.iter_mut().enumerate() {
            if !is_set(ready, at) {
                continue;
            }
            debug_assert_ne!(*state, State::Idle, "the AND holds what this rank has given");
            *state = State::Idle;
            self.pending -= 1;
            if is_set(absent, at) {
                agreed.absent.push(entry.index);
            } else {
                agreed.ready.push(*entry);
            }
        }
        if self.pending == 0 {
            self.flushed = false;
        }
        Some(agreed)
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
            let unit_bytes = rng.u64(1..3000);
            let mut ranks: Vec<Readiness> = (0..world).map(|_| Readiness::new(entries(&sizes), 0)).collect();
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
                        waiting[rank] = ranks[rank].poll_round(unit_bytes);
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
                // At most one round for each unit that the slowest fills, and the end.
                assert!(most <= sizes.iter().sum::<u64>() / unit_bytes + 2, "seed {seed}: {most} rounds");
            }
        }
    }

    /// In the same order on all ranks, a step costs a round for each unit at most, and one gradient is not asked for twice.
    #[test]
    fn the_same_order_costs_a_round_a_unit() {
        let mut rank = Readiness::new(entries(&[100; 50]), 0);
        let mut rounds = 0;
        for index in 0..50 {
            assert!(rank.submit(index, false) && !rank.submit(index, true));
            if let Some(bits) = rank.poll_round(1000) {
                rounds += 1;
                assert_eq!(rank.handle_round(&bits).expect("alike").ready.len(), 10);
            }
        }
        rank.flush();
        assert_eq!((rounds, rank.pending(), rank.poll_round(1000)), (5, 0, None));
    }

    /// Ranks with other gradients, or another order of them, find out in the first round.
    #[test]
    fn other_gradients_are_found_out() {
        for other in [&[8, 8, 16][..], &[8, 16]] {
            let mut ranks = [Readiness::new(entries(&[16, 8, 8]), 0), Readiness::new(entries(other), 0)];
            let mut all = ranks.each_mut().map(|rank| {
                assert!(rank.submit(0, false));
                rank.flush();
                rank.poll_round(1).expect("flushed")
            });
            let length = all[0].len().min(all[1].len());
            let [first, second] = &mut all;
            first.truncate(length);
            let and: Vec<u8> = first.iter().zip(second.iter()).map(|(a, b)| a & b).collect();
            assert_eq!(ranks.each_mut().map(|rank| rank.handle_round(&and)), [None, None]);
        }
    }
}

//! Tests of `claims`.

use super::*;
use penstock_stream::frame::NumberSpace;
use penstock_types::{ChannelId, GroupId, OpSeq};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Says what it was told to let go of.
struct Told(Arc<Mutex<Vec<Scope>>>);

impl Half for Told {
    fn drop_all(&mut self, _: PeerId, scope: Scope, _: &Source) {
        self.0.lock().expect("alone").push(scope);
    }
}

fn key(group: u64, op: u64) -> MessageKey {
    let space = NumberSpace::Collective(ChannelId::MAIN);
    MessageKey { group: GroupId(group), space, op: OpSeq(op), message: 0 }
}

fn scope(group: u64) -> Scope {
    GroupId(group).into()
}

/// Whatever threads claim and give back, operations that end and groups that fail in between: nobody is told of an end while a
/// claim touches its memory, everybody is as soon as none does, and who comes back into a failed group lets go of it, once.
#[test]
fn ends_wait_for_claims() {
    let seed = std::env::var("PENSTOCK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0xc1a1);
    println!("PENSTOCK_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..2_000 {
        let mut claims = Claims::new(3);
        // By thread: what it claims, and the groups that have failed since.
        let mut open: Vec<Option<(Vec<MessageKey>, Vec<u64>)>> = vec![None; 3];
        // What was told to whom is one, and what that waits for.
        let mut ends: Vec<(Arc<AtomicU32>, Vec<usize>)> = Vec::new();
        for _ in 0..rng.usize(1..40) {
            let thread = rng.usize(0..3);
            let (group, op) = (rng.u64(0..2), rng.u64(0..2));
            let touching = |open: &[Option<(Vec<MessageKey>, Vec<u64>)>], touches: &dyn Fn(&MessageKey) -> bool| {
                let by =
                    |claim: &Option<(Vec<MessageKey>, _)>| claim.as_ref().is_some_and(|(k, _)| k.iter().any(touches));
                (0..3).filter(|at| by(&open[*at])).collect::<Vec<usize>>()
            };
            match rng.u32(0..5) {
                0 | 1 if open[thread].is_none() => {
                    // Each thread has another frame.
                    let lands = rng.bool().then(|| (key(group, op), thread as u64));
                    let lent: Vec<MessageKey> =
                        (0..rng.usize(0..3)).map(|_| key(rng.u64(0..2), rng.u64(0..2))).collect();
                    let keys = lands.iter().map(|(key, _)| *key).chain(lent.clone()).collect();
                    claims.open(thread, Claim { peer: Some(0), token: thread as u64, lands, lent });
                    open[thread] = Some((keys, Vec::new()));
                }
                2 if open[thread].is_some() => {
                    let told = Arc::new(Mutex::new(Vec::new()));
                    claims.close(thread, Some(&mut Told(told.clone()))).into_iter().for_each(|act| act());
                    let (_, failed) = open[thread].take().expect("it is open");
                    let failed: Vec<Scope> = failed.into_iter().map(scope).collect();
                    assert_eq!(*told.lock().expect("alone"), failed);
                    ends.iter_mut().for_each(|(_, waits)| waits.retain(|by| *by != thread));
                }
                3 => {
                    let told = Arc::new(AtomicU32::new(0));
                    ends.push((told.clone(), touching(&open, &|known| *known == key(group, op))));
                    claims.when_untouched(&key(group, op), move || {
                        told.fetch_add(1, Ordering::Relaxed);
                    });
                }
                4 => {
                    let by = touching(&open, &|known| known.group == GroupId(group));
                    claims.drop_all(scope(group), Box::new(|_, _, _, _| None));
                    by.iter().for_each(|by| open[*by].as_mut().expect("it touches").1.push(group));
                    let told = Arc::new(AtomicU32::new(0));
                    ends.push((told.clone(), by));
                    claims.after_drops(Box::new(move || {
                        told.fetch_add(1, Ordering::Relaxed);
                    }));
                }
                _ => {}
            }
            for (told, waits) in &ends {
                let told = told.load(Ordering::Relaxed);
                assert!(told == 0 || told == 1 && waits.is_empty(), "{told} while {waits:?} touch it");
            }
        }
        for thread in 0..3 {
            claims.close(thread, None).into_iter().for_each(|act| act());
        }
        assert!(ends.iter().all(|(told, _)| told.load(Ordering::Relaxed) == 1), "an end is not told");
    }
}

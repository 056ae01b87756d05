//! What is urgent anywhere, for all peers: which of them is served first is up to `Turn::pump`, how long queues are to each peer.

use super::Driver;
use crate::arbiter::{Arbiter, CLAIM, CLAIM_MOST, Claim};
use penstock_stream::peer::{Peer, Urgency};
use penstock_types::{MILLISECOND, PeerId, Time};

impl Driver {
    /// Learns what is urgent from the peers that have something to send, and from the other processes of this host.
    pub(super) fn settle_urgency(&mut self, is_stopping: bool) {
        let now = self.peers.now;
        let Urgency { mut here, mut anywhere, .. } = self.peers.urgency;
        let (mut leaves_host, mut would_wait) = (false, false);
        let mut paused: Option<Time> = None;
        for peer in &self.peers.dirty {
            let machine = self.peers.look(*peer);
            let urgency = machine.urgency(now);
            // What waits leaves then.
            paused = paused.into_iter().chain(machine.paused_until()).min();
            (here, anywhere) = (here.max(urgency.here), anywhere.max(urgency.anywhere));
            if !machine.config().descriptors {
                leaves_host |= machine.has_urgent(now);
                would_wait |= machine.most_urgent().is_some_and(|priority| !priority.is_urgent());
            }
        }
        let (peers, connections) = (&self.peers, &self.connections);
        let goes_on = |peer: &PeerId| !is_stopping && !connections[*peer as usize].finished;
        self.blocked.retain(|peer| goes_on(peer) && is_blocked(peers.look(*peer), now));
        let blocked = (!self.blocked.is_empty()).then(|| now.plus(LOOK_AGAIN));
        if let Some(again) = blocked {
            self.arbiter.claim(CLAIM_MOST);
            self.schedule_timers(again);
        } else if leaves_host {
            self.arbiter.claim(CLAIM);
        }
        let claimed = self.arbiter.claimed(now);
        anywhere = claimed.map_or(anywhere, |claim| anywhere.max(claim.until.plus(Urgency::LASTS)));
        let claimed = claimed.filter(|_| would_wait && !is_stopping);
        let (held, ignores_pauses) = obeyed(claimed, paused, &mut self.arbiter, now);
        let held = held.into_iter().chain(blocked).max();
        for until in held.into_iter().chain(paused) {
            // What waits leaves then.
            self.schedule_timers(until);
        }
        self.peers.urgency = Urgency { here, anywhere, held: held.unwrap_or(Time(0)), ignores_pauses };
        self.pause_others();
    }

    /// A peer has had its turn. While something urgent waits for room on its streams, other peers send nothing less urgent, which would
    /// share the link with it.
    pub(super) fn had_turn(&mut self, peer: PeerId, is_stopping: bool) {
        let now = self.peers.now;
        if !is_stopping && is_blocked(self.peers.look(peer), now) {
            if self.blocked.insert(peer) {
                let again = now.plus(LOOK_AGAIN);
                self.peers.urgency.held = self.peers.urgency.held.max(again);
                self.schedule_timers(again);
            }
        } else if self.blocked.remove(&peer) && self.blocked.is_empty() {
            for other in 0..self.connections.len() as PeerId {
                if self.peers.look(other).has_more() {
                    self.peers.machine(other);
                }
            }
        }
    }

    /// While a peer sends us what is urgent, the others that send us something less urgent are asked to pause.
    fn pause_others(&mut self) {
        let now = self.peers.now;
        let urgent = |peer: &PeerId| Some((self.peers.look(*peer).brings_urgent(now)?, *peer));
        let Some((priority, from)) = self.peers.dirty.iter().filter_map(urgent).min() else { return };
        let lasts = self.peers.look(from).pause_lasts();
        for peer in 0..self.connections.len() as PeerId {
            let machine = self.peers.look(peer);
            if peer == from || machine.config().descriptors || !machine.has_sent_less_urgent(priority, now) {
                continue;
            }
            if machine.may_ask_again(now) {
                self.peers.machine(peer).pause(priority, lasts, now);
            }
            self.schedule_timers(now.plus(LOOK_AGAIN));
        }
    }
}

/// Whether something urgent waits for room on the streams to a peer on another host, which take what is before it.
fn is_blocked(machine: &Peer, now: Time) -> bool {
    !machine.config().descriptors && machine.awaits_room(now)
}

/// What is not urgent waits until `claimed`, since this process or another one of this host sends what is, and until `paused`, since peers
/// want that. Other processes and peers use up one limit. Returns until when it waits for the former, and whether it does not wait for
/// the latter.
fn obeyed(claimed: Option<Claim>, paused: Option<Time>, arbiter: &mut Arbiter, now: Time) -> (Option<Time>, bool) {
    let is_limited = paused.is_some() || claimed.is_some_and(|claim| !claim.is_own);
    let has_waited_enough = is_limited && !arbiter.may_hold(now);
    (claimed.filter(|claim| claim.is_own || !has_waited_enough).map(|claim| claim.until), has_waited_enough)
}

/// How often claims and pauses are renewed: on slow links frames and acknowledgements are further apart than those last.
const LOOK_AGAIN: u64 = MILLISECOND;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::Peers;
    use penstock_stream::MessageKey;
    use penstock_stream::fingerprint::Fingerprint;
    use penstock_stream::frame::{Kind, NumberSpace};
    use penstock_stream::peer::{Body, OpStatus, Outgoing, PeerConfig};
    use penstock_types::{ChannelId, GroupId, OpSeq, Priority};

    /// Times of claims or pauses, which begin and end at any time.
    struct Asking {
        is_on: bool,
        until: u64,
    }

    impl Asking {
        fn at(&mut self, ms: u64, rng: &mut fastrand::Rng) -> bool {
            while self.until <= ms {
                self.is_on = !self.is_on;
                self.until += rng.u64(1..if self.is_on { 700 } else { 60 });
            }
            self.is_on
        }
    }

    fn send(peer: &mut Peer, op: u64, priority: Priority) {
        let space = NumberSpace::Collective(ChannelId::MAIN);
        let key = MessageKey { group: GroupId(7), space, op: OpSeq(op), message: 0 };
        let (fingerprint, body) = (Fingerprint::default(), Body::Owned(vec![1; 8].into()));
        peer.send(Outgoing { key, priority, is_changed: false, fingerprint, coflow: 0, body });
    }

    /// Carries over what may leave now. Returns the operations of data.
    fn carry(from: &mut Peer, to: &mut Peer, now: Time) -> Vec<u64> {
        let mut data = Vec::new();
        while let Some(frame) = from.poll_frame(0, now) {
            let header = frame.header;
            to.handle_header(0, &header, OpStatus::Active, now).expect("a good header");
            to.handle_frame(0, &header, frame.payload.bytes().unwrap_or(&[]), OpStatus::Active).expect("a good frame");
            data.extend((header.kind == Kind::Data).then_some(header.key.op.0));
        }
        data
    }

    /// Peers have their turns by the most urgent that each has to send, in whatever order they were touched.
    #[test]
    fn the_most_urgent_peer_has_the_first_turn() {
        let chosen = std::env::var("PENSTOCK_SEED").ok().and_then(|seed| seed.parse().ok());
        for seed in chosen.map_or(0..30, |seed: u64| seed..seed + 1) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut peers = Peers::new(1);
            let mut priorities: Vec<i32> = (-3..4).collect();
            rng.shuffle(&mut priorities);
            for (peer, priority) in (0..).zip(&priorities) {
                peers.machines.push(Peer::new(PeerConfig::default(), Time(0)));
                peers.is_dirty.push(false);
                peers.machine(peer).stream_up(0, Time(0));
                send(peers.machine(peer), 0, Priority(*priority));
            }
            let mut turns = peers.take_dirty();
            turns.reverse();
            let served: Vec<i32> = turns.iter().map(|peer| priorities[*peer as usize]).collect();
            assert!(served.len() == 7 && served.is_sorted(), "seed {seed}: {served:?}");
            assert_eq!(peers.take_dirty(), Vec::<PeerId>::new(), "seed {seed}");
        }
    }

    /// Processes of the host claim its card and another host's rank asks for pauses, each for as long as it likes and whenever it likes:
    /// what is not urgent leaves in a fifth of any quarter of a second all the same, since both use up one limit. It waits otherwise,
    /// and what is urgent never does.
    #[test]
    fn claims_and_pauses_share_a_limit() {
        let chosen = std::env::var("PENSTOCK_SEED").ok().and_then(|seed| seed.parse().ok());
        for seed in chosen.map_or(0..30, |seed: u64| seed..seed + 1) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let start = Time(1_000 * MILLISECOND);
            let [mut here, mut there] = [0; 2].map(|_| {
                let mut peer = Peer::new(PeerConfig::default(), start);
                peer.stream_up(0, start);
                peer
            });
            let [mut arbiter, mut of_process] = [0; 2].map(|_| Arbiter::none());
            let [mut claims, mut pauses] = [0; 2].map(|_| Asking { is_on: rng.bool(), until: 0 });
            // Whether what is not urgent could leave, by millisecond; how often it waited for which of the two alone.
            let (mut left, mut waited) = (Vec::new(), [0; 2]);
            send(&mut here, 0, Priority::USUAL);
            for ms in 0..3_000 {
                let now = start.plus(ms * MILLISECOND);
                for peer in [&mut here, &mut there] {
                    peer.handle_timeout(now);
                }
                let until = now.plus(MILLISECOND + 1);
                let claimed = claims.at(ms, &mut rng).then_some(Claim { until, is_own: false });
                let own = Some(Claim { until, is_own: true });
                assert_eq!(
                    obeyed(own, Some(until), &mut of_process, now).0,
                    Some(until),
                    "seed {seed}: of this process"
                );
                let wants_pause = pauses.at(ms, &mut rng);
                if wants_pause {
                    there.pause(Priority::LEAST_URGENT, 2 * MILLISECOND, now);
                    carry(&mut there, &mut here, now);
                }
                let paused = here.paused_until().filter(|until| now < *until);
                let (held, ignores_pauses) = obeyed(claimed, paused, &mut arbiter, now);
                here.hurry(Urgency { held: held.unwrap_or(Time(0)), ignores_pauses, ..Urgency::default() });
                send(&mut here, 1_000_000 + ms, Priority::LEAST_URGENT);
                let sent = carry(&mut here, &mut there, now);
                assert_eq!(sent.first(), Some(&(1_000_000 + ms)), "seed {seed}, {ms} ms: what is urgent waits");
                let has_left = sent.len() > 1;
                if has_left {
                    send(&mut here, 1 + ms, Priority::USUAL);
                }
                left.push(has_left);
                assert!(has_left || claimed.is_some() || paused.is_some(), "seed {seed}, {ms} ms: it waits for nobody");
                waited[0] += u32::from(!has_left && paused.is_none());
                waited[1] += u32::from(!has_left && claimed.is_none());
                carry(&mut there, &mut here, now);
            }
            // A fifth of the time, but for 200 ms at a time.
            for (ms, some) in left.windows(1250).enumerate() {
                let free = some.iter().filter(|left| **left).count();
                assert!(free >= 200, "seed {seed}: {free} of 1250 ms from {ms} ms on");
            }
            assert!(waited.iter().all(|ms| *ms > 0), "seed {seed}: {waited:?}");
        }
    }
}

//! What is urgent anywhere, for all peers: which of them is served first is up to `Turn::pump`, how long queues are to each peer.

use super::Driver;
use penstock_stream::peer::Urgency;
use penstock_types::{PeerId, Time};

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
                leaves_host |= machine.has_urgent();
                would_wait |= machine.most_urgent().is_some_and(|priority| !priority.is_urgent());
            }
        }
        if leaves_host {
            self.arbiter.claim();
        }
        let claimed = self.arbiter.claimed(now);
        anywhere = claimed.map_or(anywhere, |until| anywhere.max(until.plus(Urgency::LASTS)));
        let held = claimed.filter(|_| would_wait && !is_stopping);
        let has_waited_enough = (held.is_some() || paused.is_some()) && !self.arbiter.may_hold(now);
        let held = held.filter(|_| !has_waited_enough);
        for until in held.into_iter().chain(paused) {
            // What waits leaves then.
            self.schedule_timers(until);
        }
        let held = held.unwrap_or(Time(0));
        self.peers.urgency = Urgency { here, anywhere, held, ignores_pauses: has_waited_enough };
        self.pause_others();
    }

    /// While a peer sends us what is urgent, the others that send us something less urgent are asked to pause.
    fn pause_others(&mut self) {
        let now = self.peers.now;
        let urgent = |peer: &PeerId| Some((self.peers.look(*peer).brings_urgent(now)?, *peer));
        let Some((priority, from)) = self.peers.dirty.iter().filter_map(urgent).min() else { return };
        for peer in 0..self.connections.len() as PeerId {
            let machine = self.peers.look(peer);
            if peer != from && !machine.config().descriptors && machine.should_pause(priority, now) {
                self.peers.machine(peer).pause(priority, now);
            }
        }
    }
}

//! What is due: retries, silent peers, hand-shakes that take too long, and what the engine has ordered.

use super::connect::FROM_THE_START;
use super::threads::JUNK_BYTES;
use super::{Connections, Driver};
use crate::close_reason::CloseReason;
use crate::descriptors::make_room;
use crate::handler::{Handler, Order};
use crate::socket::Socket;
use penstock_stream::peer::StreamId;
use penstock_types::{MILLISECOND, PeerId, SECOND, Time};

impl Driver {
    pub(super) fn handle_timers<H: Handler>(&mut self, handler: &mut H, now: Time) {
        let mut next = now.plus(SECOND);
        // What is done below may schedule something earlier.
        self.next_timers = next;
        let readers = self.sockets.values().filter_map(|socket| socket.reader.as_ref());
        self.peers.buffer_bytes =
            readers.map(|reader| reader.memory_bytes()).sum::<usize>() + self.threads.count() * JUNK_BYTES;
        for peer in 0..self.connections.len() as PeerId {
            if self.connections[peer as usize].finished {
                continue;
            }
            if self.connections[peer as usize].was_up {
                self.peers.machine(peer).handle_timeout(now);
                self.handle_peer_events(handler, peer, now);
                next = next.min(self.peers.look(peer).poll_timeout(now));
            }
            let due: Vec<(StreamId, u32)> = {
                let connections = &mut self.connections[peer as usize];
                let due =
                    connections.retries.iter().filter(|(_, at, _)| *at <= now).map(|(s, _, n)| (*s, *n)).collect();
                connections.retries.retain(|(_, at, _)| *at > now);
                due
            };
            for (stream, attempt) in due {
                if stream == FROM_THE_START {
                    self.connect_from_the_start(handler, peer, attempt, now);
                    continue;
                }
                self.connect_stream(handler, peer, stream, attempt, now);
            }
            let connections = &self.connections[peer as usize];
            for (_, at, _) in &connections.retries {
                next = next.min(*at);
            }
            if let Some(since) = connections.down_since
                && now.since(since) > RECONNECT_WITHIN
            {
                self.lose(handler, peer, "closed all its connections: the process has probably died", false, now);
            }
        }
        next = self.listeners.resume(&self.system, now).map_or(next, |at| next.min(at));
        let late: Vec<u64> =
            self.sockets.iter().filter(|(_, s)| !s.is_up() && now > s.deadline).map(|(token, _)| *token).collect();
        for token in late {
            // The end of one may be the end of all to its peer.
            let Some(socket) = self.sockets.remove(&token) else { continue };
            self.closed(handler, token, socket, &CloseReason::NoAnswer, now);
        }
        if self.sockets.values().any(|socket| !socket.is_up()) {
            next = next.min(now.plus(100 * MILLISECOND));
        }
        // Deliberately coarse: nothing here needs better than a few milliseconds.
        self.next_timers = next.min(self.next_timers).max(now.plus(MILLISECOND));
    }

    /// Makes connections for peers that the engine has added.
    pub(super) fn add_connections(&mut self) {
        if self.peers.added.is_empty() {
            return;
        }
        if self.settings.shared_memory {
            let added = self.peers.added.iter().map(|(_, contact)| contact);
            self.yama.meet(added.filter(|one| one.memory_epoch != 0).map(|one| one.process));
        }
        for (peer, contact) in self.peers.added.drain(..) {
            match self.connections.get_mut(peer as usize) {
                Some(connections) => {
                    debug_assert!(connections.finished && connections.sockets.is_empty(), "the one before is gone");
                    *connections = Connections::new(contact);
                }
                None => self.connections.push(Connections::new(contact)),
            }
        }
        let awaited = self.connections.iter().filter(|connections| !connections.was_up && !connections.finished);
        let to_come = awaited.map(|connections| usize::from(self.streams_to(&connections.contact))).sum();
        if let Err(trouble) = make_room(to_come) {
            let peers = self.connections.len();
            log::warn!(
                "penstock: {trouble}: {to_come} streams to {peers} peers. Some ranks may not reach each other. Raise the \
                 hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile of a container), or lower PENSTOCK_STREAMS"
            );
        }
    }

    pub(super) fn follow_orders<H: Handler>(&mut self, handler: &mut H, now: Time) {
        self.follow_orders_with(handler, None, now);
    }

    /// `current`: a socket that is being read and is not in the table.
    pub(super) fn follow_orders_with<H: Handler>(
        &mut self,
        handler: &mut H,
        mut current: Option<&mut Socket>,
        now: Time,
    ) {
        self.part(handler);
        self.add_connections();
        while let Some(order) = self.peers.orders.pop_front() {
            match order {
                Order::Connect(peer, job, secret) => self.connect(handler, peer, job, secret, now),
                Order::Drop(scope, source) => {
                    for socket in self.sockets.values_mut().chain(current.as_deref_mut()) {
                        socket.drop_all(scope, &source);
                    }
                    self.peers.claims.drop_all(scope, source);
                }
                Order::Then(act) => self.peers.claims.after_drops(act),
            }
        }
    }
}

/// A peer without a stream must be back within this time. Together with the time to notice, this is below 5 s.
pub(super) const RECONNECT_WITHIN: u64 = 1500 * MILLISECOND;

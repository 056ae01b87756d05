//! The end of the loop: good-byes, and sockets closed so that peers can read what was sent.

use super::{Connections, Driver};
use crate::handler::Handler;
use crate::socket::Socket;
use crate::system::System;
use penstock_types::{MILLISECOND, PeerId, SECOND, Time};
use rustix::event::epoll;
use std::collections::HashMap;
use std::io::IoSliceMut;

impl Driver {
    /// Sends a good-bye to every peer that has taken all messages, or to all peers. A peer that received one accepts no new
    /// stream, so frames that the good-bye overtakes are lost with the streams. `farewells`: when each peer got it.
    pub(super) fn say_bye(&mut self, farewells: &mut HashMap<PeerId, Time>, waits_for_messages: bool, now: Time) {
        for peer in 0..self.connections.len() as PeerId {
            let connections = &self.connections[peer as usize];
            let is_due = !waits_for_messages || self.peers.look(peer).may_say_bye();
            if connections.was_up && !connections.finished && is_due && !farewells.contains_key(&peer) {
                self.peers.machine(peer).bye();
                farewells.insert(peer, now);
            }
        }
    }

    /// Whether every peer has left, is lost, or has acknowledged the good-bye, and has been sent all acknowledgements: a peer
    /// whose last frames are not acknowledged would take them for lost. A peer that does not acknowledge is not waited for
    /// long.
    pub(super) fn has_taken_leave(&self, farewells: &HashMap<PeerId, Time>, now: Time) -> bool {
        (0..self.connections.len() as PeerId).all(|peer| {
            let (connections, machine) = (&self.connections[peer as usize], self.peers.look(peer));
            let has_taken_it = || machine.is_quiet() && !machine.owes_acks() && self.is_flushed(connections);
            let is_over = || farewells.get(&peer).is_some_and(|said| now.since(*said) >= self.linger());
            !connections.was_up || connections.finished || has_taken_it() || is_over()
        })
    }

    /// How long the end waits at most. A peer that says nothing is lost after `dead_after`, and is not waited for any more. What another
    /// one has not taken may have to be sent again on another stream; then the good-bye's acknowledgement takes as long once more.
    pub(super) fn patience<H: Handler>(&self, handler: &H) -> u64 {
        handler.patience().map_or(UNHEARD, |timeouts| timeouts.max(2 * self.linger()))
    }

    /// How long the end waits for a peer to acknowledge the good-bye. A stream that stands still is closed after half of
    /// `dead_after`, and what was on it is sent again: a good-bye, or an acknowledgement that the peer needs.
    fn linger(&self) -> u64 {
        (self.settings.peer.dead_after / 4 * 3).max(2 * SECOND)
    }

    /// Whether every frame that was begun is written.
    pub(super) fn is_flushed(&self, connections: &Connections) -> bool {
        let sockets = connections.sockets.iter().filter_map(|token| self.sockets.get(token));
        sockets.filter(|socket| socket.is_up()).all(Socket::is_flushed)
    }

    /// Closes the sockets so that peers can still read what was sent: a socket that is closed with unread bytes resets the
    /// connection.
    pub(super) fn half_close(&mut self) {
        let end = self.now().plus(UNREAD_FOR);
        let mut junk = [0; 64 * 1024];
        for socket in self.sockets.values() {
            socket.wire.finish();
        }
        let System::Kernel { epolls, .. } = &*self.system else { return self.sockets.clear() };
        while !self.sockets.is_empty() && self.now() < end {
            self.sockets.retain(|_, socket| {
                loop {
                    match socket.wire.read(&mut [IoSliceMut::new(&mut junk)], false, &mut Vec::new()) {
                        Ok(0) => return false,
                        Ok(_) => {}
                        Err(rustix::io::Errno::AGAIN) => return true,
                        Err(_) => return false,
                    }
                }
            });
            let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2 * MILLISECOND as i64 };
            let mut buffer =
                [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
            let _ = epoll::wait(&epolls[0], &mut buffer[..], Some(&timeout));
        }
        self.sockets.clear();
    }
}

/// How long sockets are read to their end, so that their closing resets no connection.
const UNREAD_FOR: u64 = 500 * MILLISECOND;
/// How long the end waits if the caller does not wait: good-byes leave, and are not acknowledged.
const UNHEARD: u64 = 100 * MILLISECOND;

//! The end of a socket, and of a peer that cannot be reached any more.

use super::connect::FROM_THE_START;
use super::timers::RECONNECT_WITHIN;
use super::{Driver, Gone, How};
use crate::close_reason::CloseReason;
use crate::handler::Handler;
use crate::socket::{Progress, Socket, Stage};
use penstock_types::{PeerId, Time};

impl Driver {
    /// Handles the end of a socket.
    pub(super) fn closed<H: Handler>(
        &mut self,
        handler: &mut H,
        token: u64,
        mut socket: Socket,
        reason: &CloseReason,
        now: Time,
    ) {
        let is_refused = self.system.is_played() && matches!(reason, CloseReason::Frame(_));
        debug_assert!(!is_refused, "a played network damages nothing, and right peers send nothing wrong: {reason}");
        let is_acceptor = matches!(socket.stage, Stage::Acceptor(_));
        if is_acceptor {
            self.listeners.unauthenticated -= 1;
        }
        let Some(peer) = socket.peer else {
            // A member that connects before this process has read who is in its job is told to try again. That needs no line
            // for each.
            let level = if reason.is_usual() { log::Level::Debug } else { log::Level::Warn };
            log::log!(level, "penstock: refused a connection from {}: {reason}", socket.remote);
            return;
        };
        if socket.is_up() && socket.local && *reason != CloseReason::ClosedThere {
            self.say_why(handler, peer, &mut socket, reason, now);
        }
        let (was_up, stream, local, attempt) = (socket.is_up(), socket.stream, socket.local, socket.attempt);
        let remote = socket.remote.clone();
        drop(socket);
        self.connections[peer as usize].sockets.retain(|known| *known != token);
        if was_up {
            let landing = self.peers.claims.landing_of(token);
            let machine = self.peers.machine(peer);
            if let Some((key, offset)) = landing {
                machine.hold(&key, offset);
            }
            machine.stream_down(stream);
        }
        let connections = &mut self.connections[peer as usize];
        // Also while stopping: messages that the peer has not taken need a connection. A peer that was never connected is not
        // waited for.
        if connections.finished || (handler.stopping() && !connections.was_up) {
            return;
        }
        let machine = self.peers.look(peer);
        let none_up = machine.stream_count() == 0;
        // A peer that ends closes its streams itself, once its good-bye is acknowledged. A stream that was lost before may have
        // taken acknowledgements along, which the peer stays to repeat.
        let may_return = none_up && !local && *reason != CloseReason::ClosedThere && machine.has_frames_out();
        if connections.said_bye && !may_return {
            if none_up {
                self.lose(handler, peer, "has no stream left", false, now);
            }
            return;
        }
        if local && was_up {
            // A local socket ends only with the peer's process, or because this side closes it for a reason.
            let what = match reason {
                CloseReason::ClosedThere => "closed its connection: the process has died",
                reason => &format!("was cut off: {reason}"),
            };
            self.lose(handler, peer, what, false, now);
            return;
        }
        log::debug!("penstock: stream {stream} to {remote} closed: {reason}");
        if is_acceptor {
            return; // who it was has not proved to be the peer
        }
        let connections = &mut self.connections[peer as usize];
        if was_up && !connections.lost.contains(&stream) {
            connections.lost.push(stream);
        }
        if none_up && connections.was_up && connections.down_since.is_none() {
            connections.down_since = Some(now);
            self.schedule_timers(now.plus(RECONNECT_WITHIN));
        }
        let attempt = if was_up { 0 } else { attempt };
        // A local connection that was told to wait chooses its medium again at the next attempt.
        let stream = if local { FROM_THE_START } else { stream };
        self.retry(handler, peer, (stream, attempt), &remote, reason, now);
    }

    /// Tells a peer why its only connection is about to be closed. Otherwise it would take this process for dead.
    pub(super) fn say_why<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        socket: &mut Socket,
        reason: &CloseReason,
        now: Time,
    ) {
        let connections = &self.connections[peer as usize];
        if connections.finished || connections.said_bye || handler.stopping() {
            return;
        }
        // A half written frame of a group that has just failed is copied before the rest of it is written.
        self.follow_orders_with(handler, Some(socket), now);
        handler.cut_off(&mut self.peers, peer, &reason.to_string());
        while socket.write_batch(&mut self.peers, handler, now) == Some(Progress::More) {}
    }

    /// Tells a peer that is given up for its silence that it was, as far as its sockets take it at once. A peer that was
    /// stopped reads this when it goes on.
    pub(super) fn give_up<H: Handler>(&mut self, handler: &mut H, peer: PeerId, what: &str, now: Time) {
        let connections = &self.connections[peer as usize];
        if connections.finished || connections.said_bye {
            return;
        }
        let tokens = connections.sockets.clone();
        // As in `say_why`: a peer that was given up earlier in this turn has ended its groups.
        self.follow_orders(handler, now);
        handler.cut_off(&mut self.peers, peer, &format!("it {what}"));
        for token in tokens {
            let Some(mut socket) = self.sockets.remove(&token) else { continue };
            while socket.is_up() && socket.write_batch(&mut self.peers, handler, now) == Some(Progress::More) {}
            self.sockets.insert(token, socket);
        }
    }

    /// Ends everything with a peer that cannot be reached any more. One that has said good-bye has left; of another, `what` says
    /// what is wrong, and `has_died` whether its process is gone for certain.
    pub(super) fn lose<H: Handler>(&mut self, handler: &mut H, peer: PeerId, what: &str, has_died: bool, now: Time) {
        let connections = &self.connections[peer as usize];
        if connections.finished {
            return;
        }
        let who = connections.contact.describe();
        if connections.said_bye {
            log::debug!("penstock: {who} has said good-bye, and {what}");
            self.end_with(handler, peer, How::Left, format!("{who} has left the job"), now);
        } else {
            self.end_with(handler, peer, How::Lost { has_died }, format!("{who} {what}"), now);
        }
    }

    /// Ends everything with a peer that was never connected, since one of the two processes has refused the other.
    pub(super) fn refuse<H: Handler>(&mut self, handler: &mut H, peer: PeerId, reason: String, now: Time) {
        if !self.connections[peer as usize].finished {
            self.end_with(handler, peer, How::Refused, reason, now);
        }
    }

    fn end_with<H: Handler>(&mut self, handler: &mut H, peer: PeerId, how: How, reason: String, now: Time) {
        let connections = &mut self.connections[peer as usize];
        connections.finished = true;
        connections.retries.clear();
        for token in std::mem::take(&mut connections.sockets) {
            if let Some(socket) = self.sockets.remove(&token) {
                self.closed(handler, token, socket, &CloseReason::PeerLost, now);
            }
        }
        self.gone.push(Gone { peer, how, reason });
        self.part(handler);
    }

    /// Tells of the peers that are gone. A thread may still use a frame that came before: of that peer when it has done so.
    pub(super) fn part<H: Handler>(&mut self, handler: &mut H) {
        while let Some(at) = self.gone.iter().position(|gone| !self.peers.claims.concern(gone.peer)) {
            let Gone { peer, how, reason } = self.gone.remove(at);
            match how {
                How::Left => handler.left(&mut self.peers, peer, &reason),
                How::Lost { has_died } => handler.lost(&mut self.peers, peer, &reason, has_died),
                How::Refused => handler.refused(&mut self.peers, peer, &reason),
            }
        }
    }
}

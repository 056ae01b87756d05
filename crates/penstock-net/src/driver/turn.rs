//! One turn of a thread: it sends, sleeps, and handles what came.

use super::threads::{Loop, Run, State, Turn};
use super::{FIRST_LISTENER, FIRST_SOCKET, LOCAL_LISTENER, WAKE};
use crate::claims::Claim;
use crate::close_reason::CloseReason;
use crate::handler::{Handler, Unlocked};
use crate::socket::Progress;
use penstock_stream::Header;
use penstock_stream::frame::{FLAG_PAYLOAD_SUM, Kind};
use penstock_stream::peer::{LOST_STREAM, StreamId};
use penstock_types::{MILLISECOND, PeerId, SECOND};
use rustix::event::epoll;
use std::sync::atomic::Ordering;

impl<H: Handler> Loop<H> {
    /// One turn of a thread: sends, waits, and handles what came. Returns false when the thread ends; when thread 0 does so,
    /// [`Loop::finish`] follows.
    pub fn turn(&self, run: &mut Run) -> bool {
        self.begin(run.thread).turn(run)
    }

    /// The end of the loop: sends the last frames to the peers, and closes the connections.
    pub fn finish(&self) {
        let mut turn = self.begin(0);
        let State { driver, handler } = turn.state();
        for peer in 0..driver.connections.len() {
            if driver.connections[peer].was_up
                && !driver.connections[peer].finished
                && !driver.connections[peer].said_bye
            {
                handler.undelivered(&mut driver.peers, peer as PeerId);
            }
        }
        handler.ending(&mut driver.peers);
        turn.follow_orders();
        while !turn.driver().peers.dirty.is_empty() {
            turn.pump();
        }
        turn.driver().half_close();
    }
}

impl<H: Handler> Turn<'_, H> {
    fn turn(&mut self, run: &mut Run) -> bool {
        let driver = self.driver();
        let now = driver.now();
        driver.peers.now = now;
        if driver.threads.has_ended {
            return false;
        }
        // Also before the end: other threads wait for these requests.
        self.follow_orders();
        self.pump();
        if self.thread == 0 && !self.handle_times(run) {
            return false;
        }
        let mut events = std::mem::take(&mut run.events);
        self.wait(&mut events);
        let driver = self.driver();
        driver.peers.now = driver.now();
        for event in events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            self.handle_event(run, data.u64(), flags);
        }
        run.events = events;
        let thread = self.thread;
        for token in std::mem::take(&mut self.driver().threads.again[thread]) {
            self.handle_event(run, token, epoll::EventFlags::IN);
        }
        if self.state().handler.has_work() {
            self.follow_orders();
            self.pump();
            self.work();
        }
        // What was decided is carried out before another thread decides.
        self.follow_orders();
        true
    }

    /// What thread 0 has to do with time: the end, and timers. Returns false at the end.
    fn handle_times(&mut self, run: &mut Run) -> bool {
        let State { driver, handler } = self.state();
        let now = driver.peers.now;
        if handler.stopping() {
            let is_patient = now.since(*run.stopping_since.get_or_insert(now)) < driver.patience(handler);
            driver.say_bye(&mut run.farewells, is_patient, now);
            if !is_patient || driver.has_taken_leave(&run.farewells, now) {
                return false;
            }
            self.pump();
        }
        // Only if the sockets were read late enough: what has arrived is read before a peer counts as silent, also when this
        // process was stopped or busy for long.
        let State { driver, handler } = self.state();
        if driver.has_read(driver.next_timers) {
            driver.handle_timers(handler, now);
            self.follow_orders();
            self.pump();
        }
        let State { driver, handler } = self.state();
        if driver.has_read(driver.next_tick) {
            driver.next_tick = handler.tick(&mut driver.peers, now);
            self.follow_orders();
            self.pump();
        }
        true
    }

    /// Does one piece of what takes long.
    fn work(&mut self) {
        let thread = self.thread;
        let State { driver, handler } = self.state();
        let Some((key, mut task)) = handler.work(&mut driver.peers) else { return };
        if handler.has_work() {
            driver.wake_another(thread);
        }
        self.claimed(Claim { lent: vec![key], ..Claim::default() }, || task.run());
        self.give_back_nothing();
        let State { driver, handler } = self.state();
        handler.worked(&mut driver.peers, task);
    }

    pub(super) fn follow_orders(&mut self) {
        let State { driver, handler } = self.state();
        let now = driver.peers.now;
        driver.follow_orders(handler, now);
    }

    /// Sleeps until something happens, and stores it in `events`.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) {
        let thread = self.thread;
        self.may_sleep(true);
        let State { driver, handler } = self.state();
        let now = driver.now();
        if thread == 0 {
            // Commands that came before the flag was set did not write to the descriptor.
            handler.woken(&mut driver.peers, now);
        }
        let has_to_send = !driver.peers.dirty.is_empty() || !driver.peers.orders.is_empty();
        // But not forever: commands may come faster than they are carried out, and then nothing would be read.
        if has_to_send && now.since(driver.threads.looked[thread]) < LOOK_WITHIN {
            self.may_sleep(false);
            return;
        }
        let until = driver.next_timers.min(driver.next_tick);
        let is_idle = !has_to_send && driver.threads.again[thread].is_empty() && !handler.has_work();
        let nanos = match (is_idle, handler.stopping()) {
            (false, _) => 0,
            (true, _) if thread > 0 => SECOND,
            (true, true) => MILLISECOND,
            // What is due waits for another thread that has not read yet.
            (true, false) if until <= now && driver.threads.count() > 1 => READS_WITHIN,
            (true, false) => until.since(now),
        };
        if thread == 0 {
            driver.threads.sleeps_until = if is_idle { until } else { now };
        }
        // Room for all that is ready, so that no socket waits while others are read again and again.
        let room = driver.sockets.len() + driver.listeners.len() + 1;
        self.follow_orders();
        self.sleep(events, room, nanos, FIRST_LISTENER);
        let driver = self.driver();
        driver.threads.looked[thread] = driver.now();
        if thread == 0 {
            driver.threads.sleeps_until = now;
        }
    }

    // ------------------------------------------------------------------ reading

    fn handle_event(&mut self, run: &mut Run, token: u64, flags: epoll::EventFlags) {
        let thread = self.thread;
        let State { driver, handler } = self.state();
        let now = driver.peers.now;
        // The event before may have been a wake-up that added the peer to which this hand-shake belongs.
        driver.add_connections();
        match token {
            WAKE => {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&driver.threads.wakes[thread].event, &mut count);
                if thread == 0 {
                    handler.woken(&mut driver.peers, now);
                }
            }
            LOCAL_LISTENER => driver.accept_local(handler, now),
            token if token < FIRST_SOCKET => driver.accept_tcp(handler, (token - FIRST_LISTENER) as usize, now),
            token => {
                let Some(socket) = driver.sockets.get_mut(&token) else { return };
                if socket.is_up() && socket.thread == thread {
                    if flags.contains(epoll::EventFlags::OUT)
                        && let Some(peer) = socket.peer
                    {
                        driver.peers.machine(peer);
                        socket.watch_write(&driver.system, token, false);
                    }
                    if let Err(reason) = self.read(&mut run.junk, token) {
                        self.close(token, &reason);
                    }
                } else if !socket.is_up() {
                    let mut socket = driver.sockets.remove(&token).expect("just seen");
                    match driver.handshake(handler, token, &mut socket, now) {
                        Ok(()) => drop(driver.sockets.insert(token, socket)),
                        Err(reason) => driver.closed(handler, token, socket, &reason, now),
                    }
                }
            }
        }
    }

    /// Closes the socket that this thread has read.
    fn close(&mut self, token: u64, reason: &CloseReason) {
        // The peer is told why, over this socket if it has no other.
        while self.driver().sockets.get(&token).is_some_and(|socket| socket.local)
            && self.driver().peers.claims.are_on(token)
        {
            self.await_release();
        }
        let State { driver, handler } = self.state();
        if let Some(socket) = driver.sockets.remove(&token) {
            driver.closed(handler, token, socket, reason, driver.peers.now);
        }
        self.follow_orders();
    }

    /// Reads from a stream that is up, and handles the frames.
    fn read(&mut self, junk: &mut [u8], token: u64) -> Result<(), CloseReason> {
        let mut budget = READ_BUDGET;
        let mut descriptors = Vec::new();
        loop {
            // The buffer may hold frames from the hand-shake or the last round.
            while self.use_frame(token)? {}
            let thread = self.thread;
            let driver = self.driver();
            let Some(socket) = driver.sockets.get_mut(&token) else { return Ok(()) };
            if budget == 0 {
                driver.threads.again[thread].push(token);
                return Ok(());
            }
            let (peer, local) = (socket.peer.expect("up"), socket.local);
            let mut reader = socket.reader.take().expect("only its thread reads");
            let lands = reader.landing();
            let claim = Claim { peer: Some(peer), token, lands, lent: Vec::new() };
            let (count, last) = self.claimed(claim, || reader.fill_frame(local, junk, &mut descriptors));
            if !self.give_back_reader(token, reader) {
                self.follow_orders();
                return Ok(());
            }
            let State { driver, handler } = self.state();
            for descriptor in descriptors.drain(..) {
                handler.passed(peer, descriptor)?;
            }
            driver.peers.counts[thread].read_bytes += count as u64;
            budget = budget.saturating_sub(count);
            match last {
                Ok(0) if driver.sockets.get(&token).is_some_and(|socket| socket.was_reset) => {
                    return Err(CloseReason::of_call(rustix::io::Errno::CONNRESET, local));
                }
                Ok(0) => return Err(CloseReason::ClosedThere),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(CloseReason::of_call(error, local)),
            }
        }
    }

    /// Handles the next frame in a socket's buffer. Returns false if there is none that is whole.
    fn use_frame(&mut self, token: u64) -> Result<bool, CloseReason> {
        let State { driver, handler } = self.state();
        let Some(peer) = driver.sockets.get(&token).map(|socket| socket.peer.expect("up")) else { return Ok(false) };
        let now = driver.peers.now;
        driver.handle_peer_events(handler, peer, now);
        driver.follow_orders(handler, now);
        let Some(socket) = driver.sockets.get_mut(&token) else { return Ok(false) };
        if driver.connections[peer as usize].finished {
            return Err(CloseReason::PeerLost);
        }
        let stream = socket.stream;
        let reader = socket.reader.as_mut().expect("only its thread reads");
        let Some(header) = reader.advance(peer, stream, &mut driver.peers, handler)? else {
            driver.handle_peer_events(handler, peer, now);
            driver.follow_orders(handler, now);
            return Ok(false);
        };
        if header.kind == Kind::Data {
            if driver.peers.claims.lands(peer, &header.key, header.offset) {
                // Another thread has a copy of it, which counts, unless that thread finds its stream broken.
                self.await_release();
                return Ok(true);
            }
            if header.length >= LONG_FRAME {
                return self.use_long(token, peer, &header).map(|()| true);
            }
        }
        let (payload, placed) = reader.payload();
        let loser = handler.frame(&mut driver.peers, peer, stream, &header, payload, placed)?;
        reader.used();
        if let Some(loser) = loser {
            driver.revoke(peer, loser, &header);
        }
        Ok(true)
    }

    /// Handles a data frame whose payload takes long to check or to use.
    fn use_long(&mut self, token: u64, peer: PeerId, header: &Header) -> Result<(), CloseReason> {
        let lands = Some((header.key, header.offset));
        let reader = self.driver().sockets.get_mut(&token).and_then(|socket| socket.reader.take());
        let mut reader = reader.expect("it has a whole frame");
        let (is_staged, is_placed) = (reader.is_staged(), reader.landing().is_some());
        let is_summed = header.flags & FLAG_PAYLOAD_SUM != 0;
        if is_summed && reader.sum_is_right().is_none() && (is_staged || is_placed) {
            // A staged copy claims nothing yet: if it is damaged, another one may count. One may have come when this is done.
            let claim = Claim { peer: Some(peer), token, lands: lands.filter(|_| is_placed), lent: Vec::new() };
            self.claimed(claim, || reader.check_sum());
            self.give_back_reader(token, reader);
            self.follow_orders();
            return Ok(());
        }
        let is_checked = !is_summed || reader.sum_is_right() == Some(true);
        let State { driver, handler } = self.state();
        let stream = driver.sockets[&token].stream;
        let claimed =
            (is_staged && is_checked).then(|| handler.claim(&mut driver.peers, peer, stream, header)).flatten();
        let Some((act, loser)) = claimed else {
            // What lies in its place, what is discarded, a duplicate, and what the core keeps.
            let (payload, placed) = reader.payload();
            let used = handler.frame(&mut driver.peers, peer, stream, header, payload, placed && is_checked);
            reader.used();
            driver.sockets.get_mut(&token).expect("looked at under the lock").reader = Some(reader);
            if let Some(loser) = used? {
                driver.revoke(peer, loser, header);
            }
            return Ok(());
        };
        if let Some(loser) = loser {
            driver.revoke(peer, loser, header);
        }
        self.claimed(Claim { peer: Some(peer), token, lands, lent: Vec::new() }, || act(reader.payload().0));
        reader.used();
        // Its bytes have been used: it counts, also when its stream was closed meanwhile.
        let stream = if self.give_back_reader(token, reader) { stream } else { LOST_STREAM };
        let State { driver, handler } = self.state();
        let loser = handler.frame(&mut driver.peers, peer, stream, header, &[], true)?;
        debug_assert!(loser.is_none(), "it was revoked when the frame was claimed");
        self.follow_orders();
        Ok(())
    }

    // ------------------------------------------------------------------ writing

    /// Lets every stream that has room pull frames and write them, of all peers the most urgent first. While other threads always find
    /// more, it ends when this thread has not looked at its sockets for long.
    pub(super) fn pump(&mut self) {
        loop {
            let State { driver, handler } = self.state();
            if driver.peers.dirty.is_empty() {
                return;
            }
            driver.settle_urgency(handler.stopping());
            let mut turns = driver.peers.take_dirty();
            while let Some(peer) = turns.pop() {
                if self.pump_peer(peer, turns.last().copied()) {
                    let peers = &self.driver().peers;
                    let urgency = peers.look(peer).most_urgent();
                    let at = turns.partition_point(|other| peers.look(*other).most_urgent() > urgency);
                    turns.insert(at, peer);
                } else {
                    let State { driver, handler } = self.state();
                    driver.had_turn(peer, handler.stopping());
                }
                if self.is_to_look() {
                    for peer in turns {
                        self.driver().peers.machine(peer);
                    }
                    return;
                }
            }
        }
    }

    /// Whether other threads may find this one more to send for ever, and it has not looked at its sockets for long.
    fn is_to_look(&mut self) -> bool {
        let thread = self.thread;
        let driver = self.driver();
        driver.threads.count() > 1 && driver.now().since(driver.threads.looked[thread]) >= LOOK_WITHIN
    }

    /// Lets the streams to a peer pull frames. Returns true if the peer has more to send, but `next` something more urgent.
    fn pump_peer(&mut self, peer: PeerId, next: Option<PeerId>) -> bool {
        let driver = self.driver();
        let now = driver.peers.now;
        driver.peers.hurry(peer);
        let connections = &mut driver.connections[peer as usize];
        connections.round = connections.round.wrapping_add(1);
        let (tokens, first) = (connections.sockets.clone(), connections.round);
        let mut open: Vec<u64> = (0..tokens.len()).map(|at| tokens[(at + first) % tokens.len()]).collect();
        if let Some(express) = driver.peers.look(peer).express(now) {
            open.sort_by_key(|token| driver.sockets.get(token).is_none_or(|socket| socket.stream != express));
        }
        let mut gives_way = false;
        // One batch a stream and round, so that streams take turns.
        while !open.is_empty() && !gives_way {
            open.retain(|token| match self.write_batch(peer, *token) {
                Some(Progress::Closed(reason)) => {
                    let State { driver, handler } = self.state();
                    if let Some(socket) = driver.sockets.remove(token) {
                        driver.closed(handler, *token, socket, &reason, driver.peers.now);
                    }
                    // A group may have failed because of it, and other streams may have written half a frame of that group.
                    self.follow_orders();
                    false
                }
                progress => progress == Some(Progress::More),
            });
            let peers = &self.driver().peers;
            let urgency = peers.look(peer).most_urgent();
            gives_way = next.is_some_and(|next| peers.look(next).most_urgent() < urgency);
            if !open.is_empty() && self.is_to_look() {
                self.driver().peers.machine(peer);
                return false;
            }
        }
        gives_way && !open.is_empty()
    }

    /// Writes one batch to a stream. Returns `None` if there is nothing to write, or the stream is not to be written to now.
    fn write_batch(&mut self, peer: PeerId, token: u64) -> Option<Progress> {
        let thread = self.thread;
        let State { driver, handler } = self.state();
        let socket = driver.sockets.get_mut(&token).filter(|socket| socket.is_up() && !socket.watches_write)?;
        let (stream, now) = (socket.stream, driver.peers.now);
        let mut writer = socket.writer.take()?;
        if !writer.gather((peer, stream), &mut driver.peers, handler, now) {
            socket.writer = Some(writer);
            return None;
        }
        driver.call_for_help(thread, peer);
        let claim = Claim { peer: Some(peer), token, lands: None, lent: writer.lent() };
        let result = self.claimed(claim, || writer.write());
        let lives = self.give_back_writer(token, writer);
        self.follow_orders();
        let driver = self.driver();
        driver.peers.counts[thread].written_bytes += *result.as_ref().unwrap_or(&0) as u64;
        let socket = driver.sockets.get_mut(&token).filter(|_| lives)?;
        let progress = socket.wrote(result);
        match progress {
            // The peer's last frames may wait to be read, and the end of the stream after them. Nothing more is written.
            Progress::Gone => socket.watches_write = true,
            Progress::Blocked => socket.watch_write(&driver.system, token, true),
            _ => {}
        }
        Some(progress)
    }
}

impl super::Driver {
    /// A stream reads another copy of a frame that was used: the rest of it is discarded.
    fn revoke(&mut self, peer: PeerId, stream: StreamId, header: &Header) {
        for other in self.sockets.values_mut().filter(|s| s.peer == Some(peer) && s.stream == stream) {
            if let Some(reader) = &mut other.reader {
                reader.revoke(|reading| reading.key == header.key && reading.offset == header.offset);
            }
        }
    }

    /// This thread is about to write to a peer, and looks for more afterwards. If there is more for other streams already, a thread that
    /// sleeps is woken to write that.
    fn call_for_help(&mut self, thread: usize, peer: PeerId) {
        let has_room = |token: &u64| {
            let socket = self.sockets.get(token);
            socket.is_some_and(|socket| socket.is_up() && !socket.watches_write && socket.writer.is_some())
        };
        if self.threads.count() > 1
            && self.peers.look(peer).has_more()
            && self.connections[peer as usize].sockets.iter().any(has_room)
            && self.wake_another(thread)
        {
            self.peers.machine(peer);
        }
    }

    /// Wakes another thread, if one sleeps.
    fn wake_another(&self, thread: usize) -> bool {
        let mut others = self.threads.wakes.iter().enumerate().filter(|(other, _)| *other != thread);
        let sleeping = others.find(|(_, wake)| wake.sleeping.load(Ordering::SeqCst));
        sleeping.inspect(|(_, wake)| wake.wake()).is_some()
    }
}

/// Bytes read from one stream before the others have their turn: few, so that what has arrived on all of them is still in the
/// cache.
const READ_BUDGET: usize = 256 * 1024;
/// A payload from this length on is checked and used without the lock.
const LONG_FRAME: u32 = 8 * 1024;
/// How long thread 0 sleeps while another thread has not read what came before a timer.
const READS_WITHIN: u64 = MILLISECOND / 20;
/// How often a thread that always has something to send looks at its sockets; a look costs a microsecond.
const LOOK_WITHIN: u64 = MILLISECOND;
